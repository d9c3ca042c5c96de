import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from talk import BASE_URL, KEY, MODEL, QUESTIONS, add, done, multiply


async def main() -> None:
    info = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": False
    }  # fmt: skip
    model = OpenAIChatCompletionClient(model=MODEL, base_url=BASE_URL, api_key=KEY, model_info=info)
    agent = AssistantAgent("reckoner", model, tools=[add, multiply], reflect_on_tool_use=True)
    done([(await agent.run(task=question)).messages[-1].content for question in QUESTIONS])


asyncio.run(main())
