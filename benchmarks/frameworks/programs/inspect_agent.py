import asyncio

from inspect_ai.model import ChatMessageUser, execute_tools, get_model
from inspect_ai.tool import tool
from talk import BASE_URL, KEY, MODEL, QUESTIONS, ROOT_URL, VARIANT, add, done, multiply

place = ("anthropic/", ROOT_URL) if VARIANT == "messages" else ("openai/", BASE_URL)


def made(function: object) -> object:
    """A tool of Inspect's."""

    async def execute(a: float, b: float) -> str:
        """Reckon.

        Args:
            a: the first
            b: the second
        """
        return function(a, b)

    return tool(name=function.__name__)(lambda: execute)()


async def main() -> None:
    more = {} if VARIANT == "messages" else {"responses_api": VARIANT == "responses"}
    model = get_model(place[0] + MODEL, base_url=place[1], api_key=KEY, **more)
    tools = [made(add), made(multiply)]
    messages, answers = [], []
    for question in QUESTIONS:
        messages.append(ChatMessageUser(content=question))
        while True:
            reply = (await model.generate(messages, tools=tools)).message
            messages.append(reply)
            if not reply.tool_calls:
                break
            messages += (await execute_tools(messages, tools)).messages
        answers.append(reply.text)
    done(answers)


asyncio.run(main())
