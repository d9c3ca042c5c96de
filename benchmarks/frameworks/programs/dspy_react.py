import dspy
from talk import BASE_URL, KEY, MODEL, QUESTIONS, add, done, multiply

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False, max_tokens=1000))
agent = dspy.ReAct("history: str, question -> answer", tools=[add, multiply], max_iters=4)
answers, history = [], ""
for question in QUESTIONS:
    answers.append(agent(question=question, history=history).answer)
    history += f"{question} {answers[-1]} "
done(answers)
