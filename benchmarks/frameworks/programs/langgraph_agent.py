from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent
from talk import BASE_URL, KEY, MODEL, QUESTIONS, ROOT_URL, VARIANT, add, done, multiply

if VARIANT == "messages":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=ROOT_URL, api_key=KEY, max_tokens=1000)
else:
    from langchain_openai import ChatOpenAI

    responses = VARIANT == "responses"
    model = ChatOpenAI(
        model=MODEL, base_url=BASE_URL, api_key=KEY, use_responses_api=responses, streaming=VARIANT == "stream"
    )
agent = create_react_agent(model, [add, multiply], checkpointer=InMemorySaver())
answers = []
for question in QUESTIONS:
    state = agent.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "1"}})
    answers.append(state["messages"][-1].text)
done([one if isinstance(one, str) else one() for one in answers])
