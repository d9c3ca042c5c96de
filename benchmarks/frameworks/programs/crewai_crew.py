import os

from talk import BASE_URL, KEY, MODEL, QUESTIONS, add, done, multiply

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

model = LLM(model=f"openai/{MODEL}", base_url=BASE_URL, api_key=KEY)
agent = Agent(role="reckoner", goal="Reckon.", backstory="", llm=model, tools=[tool(add), tool(multiply)])
tasks = [Task(description=question, expected_output="numbers", agent=agent) for question in QUESTIONS]
done([one.raw for one in Crew(agents=[agent], tasks=tasks).kickoff().tasks_output])
