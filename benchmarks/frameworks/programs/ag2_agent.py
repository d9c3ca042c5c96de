import asyncio

from ag2 import Agent, tool
from ag2.config import OpenAIConfig
from talk import BASE_URL, KEY, MODEL, QUESTIONS, add, done, multiply


async def main() -> None:
    config = OpenAIConfig(model=MODEL, base_url=BASE_URL, api_key=KEY)
    agent = Agent("reckoner", config=config, tools=[tool(add), tool(multiply)])
    reply = await agent.ask(QUESTIONS[0])
    first = await reply.content()
    reply = await reply.ask(QUESTIONS[1])
    done([first, await reply.content()])


asyncio.run(main())
