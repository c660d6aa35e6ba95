"""Our scorers against tasks of lm-evaluation-harness as they stand in its package, on stored answers: the same prompts,
and question by question the same scores, but for the differences that docs/evaluation.md lists."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.api.metrics import bleu, chrf
from lm_eval.api.model import LM
from pydantic import TypeAdapter

from rollout_core.config.evaluation import ChoiceScorer, SuitePrompt
from rollout_core.config.rewards import RewardSpec
from rollout_core.data.continuations import Loglikelihood
from rollout_core.data.datasets import PromptRow, TaskRow
from rollout_core.evaluation.choices import continued, is_right, read_choices
from rollout_core.evaluation.prompts import render_prompts
from rollout_core.evaluation.suite_files import read_suite
from rollout_core.rewards.verifiers.process import verifier_of
from tests.evaluation.test_lm_eval import by_themselves
from tests.rewards.test_verifiers import FOLLOWED

THEIR_TASKS = Path(lm_eval.tasks.__file__).parent
SPECS: TypeAdapter[Any] = TypeAdapter(RewardSpec)


class Stored(LM):
    """A model whose answers stand in the rows: a text as ``said``, or the log-likelihood of each choice."""

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [request.doc["said"] for request in requests]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [(request.doc["loglikelihoods"][request.idx], False) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("no task here asks for it")


def their_samples(folder: Path, task: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the task of a file of lm_eval's makes of each row and filter, with its rows from here."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = ", ".join(f'{split}: "{path}"' for split in ("train", "validation", "test", "dev"))
    (folder / "stored.yaml").write_text(
        f"include: {THEIR_TASKS / task}\ntask: stored\ndataset_path: json\ndataset_name: null\nnum_fewshot: 0\n"
        f"dataset_kwargs: {{data_files: {{{splits}}}}}\n"
    )
    found = by_themselves(folder, ["stored"], Stored())["samples"]["stored"]
    assert len({sample["doc_id"] for sample in found}) == len(rows) >= 30
    return sorted(found, key=lambda sample: sample["doc_id"])


def prompted(suite: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[PromptRow]:
    """A suite's questions, without its examples."""
    prompt = {key: value for key, value in suite["prompt"].items() if key != "few_shot"}
    return render_prompts(SuitePrompt.model_validate(prompt), [TaskRow(extras=dict(row)) for row in rows])


def scored(rows: Sequence[Mapping[str, Any]], **scorer: Any) -> list[float]:
    score = verifier_of(SPECS.validate_python(scorer), Path())
    return [score(row["said"], dict(row)) for row in rows]


def differing(rows: Sequence[Mapping[str, Any]], ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Answers that the two score otherwise, with our score."""
    return {
        row["said"]: one
        for row, one, other in zip(rows, ours, theirs, strict=True)
        if one != pytest.approx(float(other), abs=1e-9)
    }


# -- choices ---------------------------------------------------------------------------------------------------------

ARC = {
    "prompt": {"text": "Question: {{ question }}\nAnswer:"},
    "scorer": {"kind": "choice", "answer_key": "answerKey", "answer_as": "label"},
}


def with_likelihoods(row: dict[str, Any], count: int, chance: random.Random) -> dict[str, Any]:
    """Of few different values, so that some choices are equally likely."""
    return {**row, "loglikelihoods": [-chance.randrange(1, 9) / 2 for _ in range(count)]}


def mmlu_rows() -> list[dict[str, Any]]:
    chance, choices = random.Random(1), ["0", "1", "\N{GREEK SMALL LETTER PI} / 2", " \n3, or 4"]
    rows = [
        {"subject": "abstract_algebra", "question": f" Which one is {n}?\n", "choices": choices, "answer": n % 4}
        for n in range(40)
    ]
    return [with_likelihoods(row, 4, chance) for row in rows]


def arc_rows() -> list[dict[str, Any]]:
    chance, texts = random.Random(2), ["ice", "Wärme", "a much longer one, of words", "É", "水"]
    rows = []
    for n in range(40):
        count = 3 + n % 3
        chosen, labels = chance.sample(texts, count), list("12345" if n % 2 else "ABCDE")[:count]
        row = {"question": f"Which is {n}?", "choices": {"text": chosen, "label": labels}, "answerKey": labels[n % 3]}
        rows.append(with_likelihoods(row, count, chance))
    return rows


@pytest.mark.parametrize(
    ("task", "suite", "rows", "metrics"),
    [
        ("mmlu/default/mmlu_abstract_algebra.yaml", read_suite("mmlu"), mmlu_rows(), ["acc"]),
        ("arc/arc_easy.yaml", ARC, arc_rows(), ["acc", "acc_norm"]),
    ],
    ids=["mmlu", "arc_easy"],
)
def test_the_likeliest_choices_are_the_same(
    tmp_path: Path, task: str, suite: dict[str, Any], rows: list[dict[str, Any]], metrics: list[str]
):
    theirs = their_samples(tmp_path, task, rows)
    scorer = ChoiceScorer.model_validate(suite["scorer"])
    asked = prompted(suite, rows)
    pairs = [(row.prompt, text) for row, text in continued(scorer, asked)]
    assert pairs == [tuple(arguments) for sample in theirs for arguments in sample["arguments"]]
    for metric in metrics:
        ours = [
            is_right(metric, choices, [Loglikelihood(total, 1, False) for total in row["loglikelihoods"]])
            for choices, row in zip(read_choices(scorer, asked), rows, strict=True)
        ]
        assert ours == [sample[metric] for sample in theirs] and 0 < sum(ours) < len(ours)


# -- numbers ---------------------------------------------------------------------------------------------------------

NUMBERS = [
    (72, "48 / 2 = 24, so 48 + 24 = 72.\n#### 72"), (10, "#### 10."), (5, "#### $5"), (42, "#### -42"),
    (-42, "So it fell.\n#### -42"), (1200, "#### 1,200"), (3600, "$3,600."), (18, "The answer is 18"),
    (18, "The answer is 18."), (18, "The answer is **18**."), (18, r"The answer is \boxed{18}."),
    (18, "18 dollars and 0 cents"), (18, "Either 17 or 18"), (18, "Either 18 or 17"), (18, "#### 18\n#### 19"),
    (19, "#### 18\n\n#### 19"), (18, "#### 18 because 3 x 6 = 18, not 20"), (18, "####18"), (18, "#### eighteen"),
    (18, "eighteen"), (18, ""), (18, "No answer at all."), (3, "It is 5-2 = 3"), (50, "50%"), (0, "#### 0"),
    (1000000, "1,000,000 people"), (1000000, "1 000 000 people"), (12, "Step 1: 4.\nStep 2: 12.\n"), (2, "1/2"),
    (25, "0.25"), (9, "#### 9 eggs, or 2 for each"), (6, "6.\n\nQ"), (2.5, "#### 2.5"), (11, "He has €11."),
    (11, "At 11:30"), (30, "It was 11:30"), (4, "x = 4,"), (4, "x = 4;"), (-3, "It is \N{MINUS SIGN}3."),
]  # fmt: skip
WRITTEN_OTHERWISE = [
    (18, "The answer is 18..."), (18, "The answer is 18.0"), (18, "The answer is 18, ..."), (2.5, "It is 2.50"),
    (1200, "It costs $1,200.00"), (7, "007"), (1000, "1e3"), (18, "About 17-18"), (18, "It is １８."),
]  # fmt: skip
"""Right by value, and not as text, which the harness compares."""
STRICT = {"take": "pattern", "pattern": r"#### (\-?[0-9\.\,]+)", "which": "first"}


def test_numbers_are_the_same_unless_they_are_written_otherwise(tmp_path: Path):
    suite = read_suite("gsm8k")
    answers = [*NUMBERS, *WRITTEN_OTHERWISE, (18, "#### 18.0")]
    rows = [
        {"question": f"What is {n}?", "answer": f"It is so.\n#### {answer}", "said": said}
        for n, (answer, said) in enumerate(answers)
    ]
    both = their_samples(tmp_path, "gsm8k/gsm8k.yaml", rows)
    theirs = {
        name: [sample for sample in both if sample["filter"] == name] for name in ("flexible-extract", "strict-match")
    }
    asked = [sample["arguments"][0][0] for sample in theirs["strict-match"]]
    assert [row.prompt for row in prompted(suite, rows)] == asked
    flexible, strict = ([sample["exact_match"] for sample in samples] for samples in theirs.values())
    assert 0 < sum(strict) < sum(flexible) < len(rows)
    assert differing(rows, scored(rows, **suite["scorer"]), flexible) == dict.fromkeys(
        [said for _, said in WRITTEN_OTHERWISE] + ["#### 18.0"], 1.0
    )
    ours = scored(rows, kind="text", compare="numeric", extract=STRICT)
    assert differing(rows, ours, strict) == {"#### 18.0": 1.0}


# -- instructions ----------------------------------------------------------------------------------------------------

BY_NLTK = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
"""Checks for which the harness loads a tokenizer of NLTK from the network."""


def instruction_rows() -> list[dict[str, Any]]:
    rows = []
    for name, kwargs, followed, broken in FOLLOWED:
        for said in (followed, broken, f"Sure!\n{followed}\nBye", followed.upper(), f"**{followed}**", " "):
            names = [name, "punctuation:no_comma"][: 1 if name == "punctuation:no_comma" else 2]
            row = {"key": len(rows), "prompt": f"Do {len(rows)}.", "instruction_id_list": names, "said": said}
            rows += [] if name in BY_NLTK else [{**row, "kwargs": [kwargs, {}][: len(names)]}]
    return rows


def test_the_same_instructions_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nltk.download", lambda name: False)
    rows = instruction_rows()
    theirs = their_samples(tmp_path, "ifeval/ifeval.yaml", rows)
    assert [row.messages[0].content for row in prompted(read_suite("ifeval"), rows) if row.messages] == [
        sample["arguments"][0][0] for sample in theirs
    ]
    for loose, how in ((False, "strict"), (True, "loose")):
        every = [sample[f"prompt_level_{how}_acc"] for sample in theirs]
        each = [sample[f"inst_level_{how}_acc"] for sample in theirs]
        assert scored(rows, kind="instructions", loose=loose) == every and 30 < sum(every) < len(rows) - 30
        assert scored(rows, kind="instructions", loose=loose, value="share") == [sum(one) / len(one) for one in each]


# -- words -----------------------------------------------------------------------------------------------------------

NAMES = {
    "Paris": [
        "Paris",
        " paris ",
        "PARIS!",
        "Paris, France",
        "Par is",
        "",
        "Paris.",
        '"Paris"',
        "Pa-ris",
        "Parîs",
        "London",
    ],
    "Beatles": ["Beatles", "BEATLES", "Beetles", "Beatles Beatles"],
    "Beyoncé": ["Beyoncé", "BEYONCÉ", "Beyonce\N{COMBINING ACUTE ACCENT}", "Beyonce"],
    "1,000": ["1,000", "1000", "1.000", "1 000", "a thousand"],
    "Große Straße": ["GROßE STRAßE", "Grosse Strasse", "große straße"],
    "AC/DC": ["AC/DC", "ACDC", "ac dc", "AC–DC"],
}
WITH_ARTICLES = {"Paris": ["The Paris"], "Beatles": ["beatles, the", "A Beatles"]}
SPACED = {"Große Straße": ["große  straße"]}


def test_names_are_the_same_but_for_articles_and_spaces(tmp_path: Path):
    rows = [
        {"question": f"Who is {n}", "answer": {"aliases": [name, f"{name} ({n})"]}, "said": said}
        for table in (NAMES, WITH_ARTICLES, SPACED)
        for n, (name, texts) in enumerate(table.items())
        for said in texts
    ]
    rows = [{**row, "aliases": row["answer"]["aliases"]} for row in rows]
    theirs = [sample["exact_match"] for sample in their_samples(tmp_path, "triviaqa/default.yaml", rows)]
    others = [said for table in (WITH_ARTICLES, SPACED) for texts in table.values() for said in texts]
    ours = scored(rows, kind="text", answer_key="aliases")
    assert differing(rows, ours, theirs) == dict.fromkeys(others, 1.0) and 0 < sum(theirs) < len(rows)


WORDS = {
    "a red hen": ["a red hen", "Red hen", "the hen, red", "hen", "", "red red hen", "A red hen\nQ: x", "RED-HEN"],
    "the": ["the", "", "hen"],
    "yes": ["Yes", "yes, it is", "No", " Yes. ", "Yes\n\nyes"],
    "42 km": ["42", "42 km", "42km", "42.0 km", "km 42"],
    "été – fin": ["été", "e\N{COMBINING ACUTE ACCENT}te\N{COMBINING ACUTE ACCENT} fin", "ÉTÉ FIN", "fin été –"],
    "an apple and the pear": ["apple and pear", "pear and an apple", "pears", "the the", "apple apple pear", "nut"],
}  # fmt: skip


def test_words_of_an_answer_are_counted_the_same(tmp_path: Path):
    """Of coqa, which counts by SQuAD's rules, the first line of an answer."""
    rows = [
        {"story": "S.", "questions": {"input_text": ["Q?"]}, "answers": {"input_text": [answer]}, "said": said}
        for answer, texts in WORDS.items()
        for said in texts
    ]
    theirs = their_samples(tmp_path, "coqa/default.yaml", rows)
    rows = [{**row, "answer": row["answers"]["input_text"][0]} for row in rows]
    extract = {"take": "pattern", "pattern": r"^\s*([^\n]*)", "which": "first"}
    for compare, metric in (("normalised", "em"), ("f1", "f1")):
        values = [sample[metric] for sample in theirs]
        assert not differing(rows, scored(rows, kind="text", compare=compare, extract=extract), values)
        assert 5 < sum(values) < len(rows) - 5


# -- overlaps --------------------------------------------------------------------------------------------------------

SENTENCES = {
    "The cat sat on the mat in the sun.": [
        "The cat sat on the mat in the sun.", "The cat sat on a mat.", "the cat sat on the mat in the sun",
        "A dog ran by.", "", "The cat sat on", " The cat sat on the mat in the sun. ", "mat the on sat cat The",
    ],
    "It costs $1,200.50 (about 1,000 €).": [
        "It costs $1,200.50 (about 1,000 €).", "It costs 1200.50 dollars, about 1000 euro.",
        "It costs $ 1,200.50 ( about 1,000 € ) .", "It costs: $1,200.50", "costs (about) it", "$1,200.50 (1,000 €)",
    ],
    "Și a spus că e bine – foarte bine!": [
        "Și a spus că e bine – foarte bine!", "Si a spus ca e bine - foarte bine!", "Și a spus că e foarte bine",
        "S\N{COMBINING COMMA BELOW}i a spus ca\N{COMBINING BREVE} e bine",
    ],
    "Na škole je 12 učitelů a 3 učitelky.": [
        "Na škole je 12 učitelů.", "Na škole je 12 učitelů a 3 učitelky .", "Na skole je 12 ucitelu a 3 ucitelky.",
        "učitelky, učitelů, škole",
    ],
    "No.": ["No, no, no, no, no.", "Yes, of course it is."], "今天天气很好。": ["今天 天气 很 好 。", "天 气 好 了"],
}  # fmt: skip
SHORT = {"The cat sat on the mat in the sun.": ["The cat", "cat sat."], "No.": ["No.", "Yes."], "ice": ["ice"]}
"""Of fewer than four words, which have no 4-grams: sacrebleu's score of a corpus is 0, that of a sentence is not."""


def sentence_rows(**tables: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [
        {"answer": answer, "said": said, "of": name}
        for name, table in tables.items()
        for answer, texts in table.items()
        for said in texts
    ]


def test_bleu_and_chrf_of_sentences_are_the_same_but_for_bleu_of_a_few_words(tmp_path: Path):
    rows = sentence_rows(long=SENTENCES, short=SHORT)
    pairs = [{**row, "translation": {"de": f"Satz {n}", "en": row["answer"]}} for n, row in enumerate(rows)]
    theirs = their_samples(tmp_path, "translation/wmt16_de-en.yaml", pairs)
    assert not differing(rows, scored(rows, kind="text", compare="chrf"), [chrf([one["chrf"]]) / 100 for one in theirs])
    found = differing(rows, scored(rows, kind="text", compare="bleu"), [bleu([one["bleu"]]) / 100 for one in theirs])
    assert list(found) == [row["said"] for row in rows if row["of"] == "short"] and all(found.values())


def test_rouge_is_the_same_of_one_sentence(tmp_path: Path):
    several = {"It is blue. It is cold.": ["It is cold . It is blue ."]}
    rows = [
        {**row, "references": [f"{row['answer'].rstrip('.')}.", "Another one.", "I have no comment."]}
        for row in sentence_rows(one=SENTENCES, few=SHORT, several=several)
    ]
    asked = [
        {**row, "question": "Q?", "correct_answers": row["references"][:2], "incorrect_answers": ["Not at all."]}
        for row in rows
    ]
    theirs = [sample["rougeL_max"] / 100 for sample in their_samples(tmp_path, "truthfulqa/truthfulqa_gen.yaml", asked)]
    found = differing(rows, scored(rows, kind="text", compare="rouge", answer_key="references"), theirs)
    assert list(found) == ["It is cold . It is blue ."] and 5 < sum(theirs) < len(rows) - 5
