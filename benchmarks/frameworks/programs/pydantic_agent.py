from pydantic_ai import Agent
from talk import BASE_URL, KEY, MODEL, QUESTIONS, ROOT_URL, VARIANT, add, done, multiply

if VARIANT == "messages":
    from pydantic_ai.models.anthropic import AnthropicModel as Model
    from pydantic_ai.providers.anthropic import AnthropicProvider as Provider
else:
    from pydantic_ai.providers.openai import OpenAIProvider as Provider

    if VARIANT == "responses":
        from pydantic_ai.models.openai import OpenAIResponsesModel as Model
    else:
        from pydantic_ai.models.openai import OpenAIChatModel as Model
url = ROOT_URL if VARIANT == "messages" else BASE_URL
agent = Agent(Model(MODEL, provider=Provider(base_url=url, api_key=KEY)), tools=[add, multiply])
history, answers = [], []
for question in QUESTIONS:
    result = agent.run_sync(question, message_history=history)
    history = result.all_messages()
    answers.append(result.output)
done(answers)
