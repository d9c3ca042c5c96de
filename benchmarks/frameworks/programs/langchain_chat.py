from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from talk import BASE_URL, KEY, MODEL, QUESTIONS, add, done, multiply, run

model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY).bind_tools([add, multiply])
messages, answers = [], []
for question in QUESTIONS:
    messages.append(HumanMessage(question))
    while True:
        reply = model.invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            break
        messages += [ToolMessage(run(call["name"], call["args"]), tool_call_id=call["id"]) for call in reply.tool_calls]
    answers.append(reply.content)
done(answers)
