from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter
from talk import BASE_URL, KEY, MODEL, QUESTIONS, add, done, multiply


class Letters(BaseTokenCounter):
    """Counts without asking for files that lie elsewhere."""

    def count_tokens_from_messages(self, messages: list) -> int:
        return len(str(messages)) // 4

    def encode(self, text: str) -> list:
        return list(text.encode())

    def decode(self, token_ids: list) -> str:
        return bytes(token_ids).decode()


model = ModelFactory.create(
    model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
    model_type=MODEL,
    url=BASE_URL,
    api_key=KEY,
    token_counter=Letters(),
)
agent = ChatAgent("You reckon.", model=model, tools=[FunctionTool(add), FunctionTool(multiply)])
done([agent.step(question).msgs[0].content for question in QUESTIONS])
