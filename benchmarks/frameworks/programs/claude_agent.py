import asyncio

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage, create_sdk_mcp_server, tool
from talk import KEY, MODEL, QUESTIONS, ROOT_URL, add, done, multiply

TAKES = {"a": float, "b": float}


@tool("add", "Add two numbers", TAKES)
async def added(given: dict) -> dict:
    return {"content": [{"type": "text", "text": add(given["a"], given["b"])}]}


@tool("multiply", "Multiply two numbers", TAKES)
async def multiplied(given: dict) -> dict:
    return {"content": [{"type": "text", "text": multiply(given["a"], given["b"])}]}


async def main() -> None:
    options = ClaudeAgentOptions(
        model=MODEL,
        mcp_servers={"calc": create_sdk_mcp_server("calc", tools=[added, multiplied])},
        allowed_tools=["mcp__calc__add", "mcp__calc__multiply"],
        setting_sources=[],
        env={
            "ANTHROPIC_BASE_URL": ROOT_URL,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
    )
    answers = []
    async with ClaudeSDKClient(options) as client:
        for question in QUESTIONS:
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, ResultMessage):
                    answers.append(message.result)
    done(answers)


asyncio.run(main())
