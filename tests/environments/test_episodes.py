"""Episodes: turns, tools and rewards, and what is kept of them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollout_core.inference.backend import ModelRef
from rollout_core.models.pretrained import load_tokenizer
from tests.environments.acting import TEMPLATE, Scene, called

SUMS = '''
from rollout_core.environments import Done, ToolError


class Env:
    """Sums, by a tool."""

    def reset(self, row, seed):
        self.row, self.used = row, 0
        return f"{row['a']} + {row['b']}?"

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.used += 1
        if a < 0:
            raise ToolError("only natural numbers")
        return a + b

    async def submit(self, answer: int):
        """Give the answer."""
        self.answer = answer
        return Done("thanks")

    def reward(self):
        right = float(getattr(self, "answer", None) == self.row["a"] + self.row["b"])
        return {"right": right, "tools": -0.1 * self.used}
'''
ROWS = [{"a": number, "b": 2 * number + 1} for number in range(6)]


def asked(text: str) -> tuple[int, int]:
    """The numbers of the question."""
    a, b = text.split("user: ")[1].split("?")[0].split("+")
    return int(a), int(b)


def adds(text: str, seed: int) -> str:
    """Calls `add`, then `submit` with what it said."""
    a, b = asked(text)
    answers = text.split("tool: ")[1:]
    if not answers:
        return called("add", a=a, b=b)
    return called("submit", answer=int(answers[-1].split("<")[0]))


async def test_a_model_calls_tools_and_is_rewarded(scene: Scene):
    scene.write(SUMS)
    engine = scene.engine(adds)
    tally = await scene.play(engine, ROWS, group=2)
    assert (tally.done, tally.failed, dict(tally.endings)) == (12, 0, {"done": 12})
    ended = await scene.ended(ROWS, group=2)
    assert [row.status for row in ended] == ["succeeded"] * 12
    assert [row.reward for row in ended] == [pytest.approx(0.9)] * 12
    assert sum(engine.asked.values()) == 24 and set(engine.asked.values()) == {1}
    spans = await scene.spans(ROWS[3])
    assert [span.name for span in spans] == [
        "rollout.llm_call", "agentlightning.operation", "rollout.llm_call", "agentlightning.operation",
        "agentlightning.annotation",
    ]  # fmt: skip
    assert spans[1].attributes["agentlightning.operation.output"] == "10"
    assert json.loads(spans[1].attributes["agentlightning.operation.input"]) == {"a": 3, "b": 7}
    assert spans[3].attributes["agentlightning.operation.output"] == "thanks"


async def test_what_is_learned_from_is_what_the_engine_wrote_and_nothing_else(scene: Scene):
    scene.write(SUMS)
    await scene.play(scene.engine(adds), ROWS)
    tokenizer = load_tokenizer(scene.model.folder)
    for row, sample in zip(ROWS, await scene.samples(ROWS), strict=True):
        assert sample.written is not None and len(sample.written) == 2
        said = [tokenizer.decode(sample.token_ids[start:stop]) for start, stop in sample.written]
        total = row["a"] + row["b"]
        assert said == [
            called("add", a=row["a"], b=row["b"]) + "<|endoftext|>",
            called("submit", answer=total) + "<|endoftext|>",
        ]
        # Between them stands what the template writes behind an answer, without the end that the answer has already.
        between = sample.token_ids[sample.written[0][1] : sample.written[1][0]]
        assert tokenizer.decode(between) == f"\ntool: {total}<|endoftext|>\nassistant: "
        assert all(value == -0.5 for start, stop in sample.written for value in sample.logprobs[start:stop])
        assert sample.reward == pytest.approx(0.9)


THINKING = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}",
)
"""Drops the thoughts of all turns, as some templates do."""


async def test_what_500_episodes_give_the_learner_is_what_the_engine_wrote_byte_for_byte(
    scene: Scene, chatting: ModelRef, tmp_path: Path
):
    folder = tmp_path / "thinking"
    shutil.copytree(chatting.folder, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": THINKING}))
    scene.model = ModelRef(chatting.content_id, folder)
    three_turns = TALKING.replace("return None if", "return None if self.turns == 3 or")
    scene.write(three_turns.replace('"content": "one"', '"content": f"row {row}"'))
    rows = [{"x": number} for number in range(500)]
    engine = scene.engine(lambda text, seed: f"<think>{seed % 97} é</think> {seed}")
    await scene.play(engine, rows, episodes_at_once=500)
    samples = await scene.samples(rows)
    assert len(samples) == 500 and len(engine.answers) == 1500
    for sample in samples:
        assert sample.written is not None and len(sample.written) == 3
        for start, stop in sample.written:
            before = (*sample.prompt_token_ids, *sample.token_ids[:start])
            assert engine.answers[before] == sample.token_ids[start:stop]


async def test_a_model_that_calls_wrongly_is_answered_so_that_it_can_try_again(scene: Scene):
    scene.write(SUMS)

    def tries(text: str, seed: int) -> str:
        wrong = [called("multiply", a=1), called("add", a="x", b=2), called("add", a=-1, b=2)]
        number = text.count("tool: ")
        return wrong[number] if number < len(wrong) else called("submit", answer=1)

    tally = await scene.play(scene.engine(tries), ROWS[:1])
    assert dict(tally.endings) == {"done": 1} and tally.attempts_failed == 0
    outputs = [
        (span.attributes["agentlightning.operation.output"], span.status.status_code)
        for span in await scene.spans(ROWS[0])
        if span.name == "agentlightning.operation"
    ]
    assert outputs[0] == ("there is no tool 'multiply'; expected add, submit", "ERROR")
    assert "a: " in outputs[1][0] and outputs[1][1] == "ERROR"
    assert outputs[2] == ("only natural numbers", "ERROR") and outputs[3] == ("thanks", "OK")


TALKING = """
class Env:
    def reset(self, row, seed):
        self.turns = 0
        return [{"role": "system", "content": "Count."}, {"role": "user", "content": "one"}]

    def step(self, message):
        self.turns += 1
        assert message["role"] == "assistant"
        return None if "stop" in message["content"] else f"turn {self.turns}"

    def reward(self):
        return self.turns
"""


@pytest.mark.parametrize(
    ("policy", "settings", "ended", "reward"),
    [
        (lambda text, seed: "stop" if "turn 2" in text else "next", {}, "done", 3),
        (lambda text, seed: "next", {"max_turns": 2}, "max turns", 2),
        (lambda text, seed: "next", {"max_turns": 2, "truncated": "zero"}, "max turns", 0),
        (lambda text, seed: "x" * 200, {}, "length", 0),
        (lambda text, seed: "next", {"max_tokens": 60, "max_turns": 100}, "no room", None),
    ],
)
async def test_an_episode_ends_by_its_environment_or_at_its_limits(
    scene: Scene, policy: Any, settings: dict[str, Any], ended: str, reward: float | None
):
    scene.write(TALKING)
    tally = await scene.play(scene.engine(policy), [{"x": 1}], **settings)
    [row] = await scene.ended([{"x": 1}])
    if ended == "no room":  # or the last answer was cut by what room there was
        assert set(tally.endings) <= {"no room", "length"}
        [sample] = await scene.samples([{"x": 1}])
        assert len(sample.prompt_token_ids) + len(sample.token_ids) <= 60
    else:
        assert dict(tally.endings) == {ended: 1} and row.reward == reward


async def test_what_has_ended_is_never_played_again(scene: Scene):
    scene.write(SUMS)
    await scene.play(scene.engine(adds), ROWS[:3])
    engine = scene.engine(adds)
    before = await scene.ended(ROWS[:3])
    await scene.play(engine, ROWS)
    assert len(engine.asked) == 2 * 3  # of the rows that are new
    assert await scene.ended(ROWS[:3]) == before


FAILING = """
import os, pathlib

class Env:
    def reset(self, row, seed):
        self.row, self.turns = row, 0
        return row["task"]

    def step(self, message):
        self.turns += 1
        mark = pathlib.Path(os.environ["MARKS"]) / f"{self.row['task']}-{self.turns}"
        if self.turns == self.row["at"] and not mark.exists():
            mark.touch()
            how = self.row["how"]
            if how == "exit":
                os._exit(3)
            if how == "signal":
                os.kill(os.getpid(), 11)
            if how == "raise":
                raise KeyError("lost")
            if how == "type":
                return 42
            if how == "hang":
                import time
                time.sleep(600)
            if how == "spin":
                import asyncio
                return self._forever()
        return None if self.turns == 3 else f"turn {self.turns}"

    async def _forever(self):
        import asyncio
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

    def reward(self):
        return float("nan") if self.row["how"] == "nan" else self.turns
"""


@pytest.mark.parametrize(
    ("hows", "most"),
    [
        (["raise", "type", "hang", "spin", "nan", "none"], {"none": 0, "nan": 2}),
        (["exit", "signal", "none"], {"none": 0}),
    ],
    ids=["in its method", "to its process"],
)
async def test_what_an_environment_does_wrong_costs_one_attempt_of_its_episode(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, hows: list[str], most: dict[str, int]
):
    scene.write(FAILING)
    marks = scene.folder / "marks"
    marks.mkdir()
    monkeypatch.setenv("MARKS", str(marks))
    rows = [{"task": f"{how}{at}", "how": how, "at": at} for how in hows for at in (1, 3)]
    engine = scene.engine(lambda text, seed: f"answer {seed}")
    tally = await scene.play(engine, rows, turn_seconds=2.0, max_attempts=2)
    pairs = zip(rows, await scene.ended(rows), strict=True)
    ended = {row["task"]: (found.status, found.reward) for row, found in pairs}
    assert ended == {row["task"]: ("failed", None) if row["how"] == "nan" else ("succeeded", 3.0) for row in rows}
    # Every answer was drawn once, also those of attempts that failed.
    assert set(engine.asked.values()) == {1} and len(engine.asked) == 3 * len(rows)
    failed = {row["task"]: await scene.num_failed(row) for row in rows}
    expected = {row["task"]: most.get(row["how"], 1) for row in rows}
    if "exit" in hows:  # where it does right when it is alone, none
        assert all(failed[task] <= count for task, count in expected.items())
    else:
        assert failed == expected
    assert (tally.failed, tally.attempts_failed) == (2 * ("nan" in hows), sum(failed.values()))


async def test_a_method_that_holds_up_its_process_costs_no_other_episode_an_attempt(scene: Scene):
    scene.write(
        """
        import time

        class Env:
            def reset(self, row, seed):
                self.row, self.turns = row, 0
                return str(row)

            async def step(self, message):
                self.turns += 1
                if self.row["blocks"] and self.turns == 1:
                    time.sleep(3)
                return None if self.turns == 4 else "again"

            def reward(self):
                return 1.0
        """
    )
    rows = [{"number": number, "blocks": number == 0} for number in range(4)]
    tally = await scene.play(scene.engine(lambda text, seed: "a"), rows, turn_seconds=1.0)
    assert (tally.attempts_failed, tally.done, tally.failed) == (0, 4, 0)


async def test_an_object_that_was_made_too_late_takes_nobodys_place(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    scene.write(
        """
        import os, pathlib, time

        class Env:
            def __init__(self):
                mark = pathlib.Path(os.environ["MARKS"]) / "made"
                self.is_first = not mark.exists()
                mark.touch()
                if self.is_first:
                    time.sleep(4)

            def reset(self, row, seed):
                self.turns = 0
                return "go"

            def step(self, message):
                time.sleep(1)
                self.turns += 1
                return None if self.turns == 5 else "again"

            def reward(self):
                return -1.0 if self.is_first else self.turns
        """
    )
    monkeypatch.setenv("MARKS", str(scene.folder))
    row = {"x": 1}
    tally = await scene.play(scene.engine(lambda text, seed: "a"), [row], turn_seconds=2.0, looked_at=False)
    assert (tally.attempts_failed, (await scene.ended([row]))[0].reward) == (1, 5.0)


async def test_two_workers_play_each_episode_once(scene: Scene):
    scene.write(SUMS)
    engines = [scene.engine(adds), scene.engine(adds)]
    tallies = await asyncio.gather(
        *(scene.play(engine, ROWS, worker=f"w{n}", episodes_at_once=2) for n, engine in enumerate(engines))
    )
    assert [(tally.done, tally.failed) for tally in tallies] == [(6, 0)] * 2
    assert [row.reward for row in await scene.ended(ROWS)] == [pytest.approx(0.9)] * 6
    assert max((engines[0].asked + engines[1].asked).values()) == 1


async def test_text_that_cannot_be_stored_is_mended_and_a_part_called_reward_is_kept(scene: Scene):
    scene.write(
        '''
        class Env:
            def reset(self, row, seed):
                return "go " + chr(0xd83d)

            def look(self) -> str:
                """Look."""
                return "a " + chr(0xd83d) + " b"

            def reward(self):
                return {"reward": 1.0, "bonus": 0.5}
        '''
    )
    row = {"x": 1}
    await scene.play(scene.engine(lambda text, seed: "done" if "a ? b" in text else called("look")), [row])
    *_, last = await scene.spans(row)
    rewards = [value for key, value in last.attributes.items() if "reward" in key]
    assert sorted(map(str, rewards)) == ["0.5", "1.0", "1.5", "bonus", "reward", "total"]
    assert (await scene.ended([row]))[0].reward == 1.5
