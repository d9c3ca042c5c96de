import json

from openai import OpenAI
from talk import BASE_URL, KEY, MODEL, QUESTIONS, done, run, schema

client = OpenAI(base_url=BASE_URL, api_key=KEY)
messages, answers = [], []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while True:
        tools = [schema("add"), schema("multiply")]
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            said = run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    answers.append(reply.content)
done(answers)
