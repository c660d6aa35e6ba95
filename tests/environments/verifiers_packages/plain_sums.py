"""An environment as users of verifiers write it: one answer, and a rubric."""

import verifiers as vf
from datasets import Dataset


def load_environment(num_train: int = 6, num_eval: int = 3, weight: float = 1.0, reward: str = "single"):
    def rows(first, count):
        made = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(first, first + count)]
        return Dataset.from_list(made)

    parser = vf.XMLParser(["answer"], answer_field="answer")

    def is_right(completion, answer, **kwargs) -> float:
        return float(parser.parse_answer(completion) == answer)

    def of_the_group(completions, **kwargs) -> list[float]:
        return [1.0 for _ in completions]

    rubric = vf.Rubric(funcs=[is_right], weights=[weight], parser=parser)
    rubric.add_reward_func(parser.get_format_reward_func(), weight=0.25)
    if reward == "group":
        rubric.add_reward_func(of_the_group)
    return vf.SingleTurnEnv(
        dataset=rows(0, num_train),
        eval_dataset=rows(100, num_eval) if num_eval else None,
        system_prompt="Answer in <answer></answer>.",
        parser=parser,
        rubric=rubric,
    )
