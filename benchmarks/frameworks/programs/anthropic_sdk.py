from anthropic import Anthropic
from talk import KEY, MODEL, QUESTIONS, ROOT_URL, VARIANT, done, run, schema

client = Anthropic(base_url=ROOT_URL, api_key=KEY)
functions = [schema(name)["function"] for name in ("add", "multiply")]
tools = [{"name": one["name"], "description": one["name"], "input_schema": one["parameters"]} for one in functions]
messages, answers = [], []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while True:
        asked = {"model": MODEL, "max_tokens": 1000, "messages": messages, "tools": tools}
        if VARIANT == "stream":
            with client.messages.stream(**asked) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": run(call.name, call.input)} for call in calls
        ]
        messages.append({"role": "user", "content": results})
    answers.append("".join(block.text for block in reply.content if block.type == "text"))
done(answers)
