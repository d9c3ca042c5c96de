import json

import litellm
from talk import BASE_URL, KEY, MODEL, QUESTIONS, ROOT_URL, VARIANT, done, run, schema

place = ("anthropic/", ROOT_URL) if VARIANT == "messages" else ("openai/", BASE_URL)
messages, answers = [], []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while True:
        reply = (
            litellm.completion(
                model=place[0] + MODEL,
                api_base=place[1],
                api_key=KEY,
                messages=messages,
                tools=[schema("add"), schema("multiply")],
            )
            .choices[0]
            .message
        )
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            said = run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    answers.append(reply.content)
done(answers)
