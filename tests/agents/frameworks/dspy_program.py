"""DSPy: a program of two predictors, whose answers have named fields."""

import dspy
from weather import degrees_in, is_right

from rollout_core.agents import rollout


class Weather(dspy.Module):
    def __init__(self):
        super().__init__()
        self.find = dspy.Predict("question -> city")
        self.answer = dspy.ChainOfThought("question, report -> answer")

    def forward(self, question):
        found = self.find(question=question)
        return self.answer(question=question, report=degrees_in(found.city))


@rollout
def agent(task, llm):
    model = dspy.LM(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key or "none", cache=False)
    with dspy.context(lm=model):
        return is_right(task, Weather()(question=task["question"]).answer)
