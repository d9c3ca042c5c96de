from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from talk import BASE_URL, KEY, MODEL, QUESTIONS, add, done, multiply

agent = ToolCallingAgent(
    tools=[tool(add), tool(multiply)],
    model=OpenAIServerModel(MODEL, api_base=BASE_URL, api_key=KEY),
    max_steps=4,
    verbosity_level=0,
    max_tool_threads=1,
)
done([agent.run(question, reset=not number) for number, question in enumerate(QUESTIONS)])
