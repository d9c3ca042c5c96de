import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike
from talk import BASE_URL, KEY, MODEL, QUESTIONS, add, done, multiply


async def main() -> None:
    model = OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True)
    agent = FunctionAgent(tools=[add, multiply], llm=model)
    memory = ChatMemoryBuffer.from_defaults(token_limit=10_000, tokenizer_fn=str.split)
    done([await agent.run(question, memory=memory) for question in QUESTIONS])


asyncio.run(main())
