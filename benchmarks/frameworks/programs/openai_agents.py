import os

from talk import BASE_URL, KEY, MODEL, QUESTIONS, VARIANT, add, done, multiply

os.environ |= {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": KEY, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
from agents import Agent, Runner, SQLiteSession, function_tool, set_default_openai_api

if VARIANT == "chat":
    set_default_openai_api("chat_completions")
agent = Agent(name="reckoner", model=MODEL, tools=[function_tool(add), function_tool(multiply)])
session = SQLiteSession("1")
done([Runner.run_sync(agent, question, session=session).final_output for question in QUESTIONS])
