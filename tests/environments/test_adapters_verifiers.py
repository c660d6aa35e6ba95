"""Environments of verifiers, as their users write them (`verifiers_packages`), played unchanged.

verifiers needs packages of other versions than ours, so it has a Python of its own:
``python -m venv build/verifiers && build/verifiers/bin/pip install 'verifiers>=0.2,<0.3'``.
"""

from __future__ import annotations

import asyncio
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import EnvironmentRows
from rollout_core.config.environments import VerifiersEnvironment
from rollout_core.config.tools import FilesTool
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.hosts import HostEnded, Hosts, Place, look_at, rows_of
from rollout_core.environments.protocol import EnvironmentFailed
from rollout_core.objects import ObjectStore
from tests.conftest import PROJECT
from tests.environments.acting import Scene, called

PYTHON = PROJECT / "build" / "verifiers" / "bin" / "python"
PACKAGES = Path(__file__).with_name("verifiers_packages")
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="verifiers is not installed in build/verifiers")
SUM = {"prompt": [{"role": "user", "content": "2 + 1?"}], "answer": "3", "example_id": 2}
ADA = {"prompt": [{"role": "user", "content": "How old is Ada?"}], "answer": "36", "example_id": 0}


def of(name: str, path: Path = PACKAGES, **settings: Any) -> VerifiersEnvironment:
    return VerifiersEnvironment(kind="verifiers", name=name, path=str(path), python=str(PYTHON), **settings)


@cache
def _code(environment: str) -> EnvironmentCode:
    settings = VerifiersEnvironment.model_validate_json(environment)
    return EnvironmentCode.of(settings, Path())


def code_of(environment: VerifiersEnvironment) -> EnvironmentCode:
    """What is read once, as it takes a process of that Python."""
    return _code(environment.model_dump_json())


def played(environment: VerifiersEnvironment, *episodes: Any) -> list[Any]:
    """What each function of a place gave."""

    async def play() -> list[Any]:
        hosts = Hosts(code_of(environment), environment)

        async def one(number: int, episode: Any) -> Any:
            async with hosts.place(f"{number}") as place:
                return await episode(place)

        try:
            return list(await asyncio.gather(*(one(*each) for each in enumerate(episodes))))
        finally:
            await hosts.close()

    return asyncio.run(play())


async def said(place: Place, row: dict[str, Any], *texts: str) -> list[Any]:
    """What was asked first, what followed each answer, and the reward."""
    found: list[Any] = [await place.call("reset", row, 5)]
    for text in texts:
        found.append(await place.call("step", {"role": "assistant", "content": text}))
    found.append(await place.call("reward"))
    await place.call("close")
    return found


def test_a_single_turn_is_rewarded_by_its_rubric():
    right, wrong, nothing = played(
        of("plain-sums"),
        lambda place: said(place, {"question": "2 + 1?", **SUM}, "<answer>3</answer>"),
        lambda place: said(place, SUM, "<answer>4</answer>"),
        lambda place: said(place, SUM),
    )
    assert right[:2] == [[{"role": "user", "content": "2 + 1?"}], None]
    assert right[2] == {"is_right": 1.0, "format_reward_func": 0.25}
    assert wrong[2] == {"is_right": 0.0, "format_reward_func": 0.25}
    assert nothing[1] == {"is_right": 0.0, "format_reward_func": 0.0}  # its answer was cut


def test_the_environment_answers_by_itself_and_many_episodes_share_it():
    texts = [["36"], ["1", "36"], ["1", "2", "3", "4"], ["1"]]
    found = played(
        of("tool-notes", config={"kind": "asking", "max_turns": 4}),
        *(lambda place, texts=texts: said(place, ADA, *texts) for texts in texts),
    )
    assert [one[1:] for one in found] == [
        [None, 1.0],
        [[{"role": "user", "content": "no, 2"}], None, 1.0],
        [[{"role": "user", "content": f"no, {n}"}] for n in (2, 3, 4)] + [None, 0.0],
        [[{"role": "user", "content": "no, 2"}], 0.0],  # it was at the limits of the run
    ]


def test_a_time_limit_of_its_own_ends_the_episode():
    async def play(place: Place) -> float:
        await place.call("reset", ADA, 5)
        while await place.call("step", {"role": "assistant", "content": "1"}) is not None:
            pass
        return await place.call("reward")

    environment = of("tool-notes", config={"kind": "asking", "max_turns": -1, "seconds": 0.5})
    assert played(environment, play) == [0.0]


def test_its_tools_are_shown_and_called_by_it():
    environment = of("tool-notes")
    offer = look_at(code_of(environment), environment)
    assert offer.has_call_tools
    [tool] = offer.tools
    assert tool["function"]["name"] == "age" and tool["function"]["description"] == "Age of a person."
    assert tool["function"]["parameters"]["required"] == ["name"]

    def calling(*names: str) -> dict[str, Any]:
        calls = [
            {"id": f"c{n}", "type": "function", "function": {"name": "age", "arguments": f'{{"name": "{name}"}}'}}
            for n, name in enumerate(names)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    async def play(place: Place) -> list[Any]:
        await place.call("reset", ADA, 5)
        found = [await place.call("call_tools", calling("Ada", "Bob"))]
        found.append(await place.call("step", {"role": "assistant", "content": "36"}))
        return [*found, await place.call("reward")]

    [[answered, after, reward]] = played(environment, play)
    assert answered == [
        {"role": "tool", "content": "36", "tool_call_id": "c0", "name": "age"},
        {"role": "tool", "content": "'Bob'", "tool_call_id": "c1", "name": "age"},
    ]
    assert (after, reward) == (None, 1.0)


async def test_a_model_plays_it_and_the_calls_are_kept(scene: Scene):
    says = [called("age").replace("{}", '{"name": "Ada"}'), "36"]
    backend = scene.engine(lambda text, seed: says[text.count("assistant: ") - 1])
    tally = await scene.play(backend, [ADA], environment=of("tool-notes"))
    assert (tally.done, tally.failed, dict(tally.endings)) == (1, 0, {"done": 1})
    [ended] = await scene.ended([ADA])
    assert ended.reward == 1.0
    outputs = [span.attributes.get("agentlightning.operation.output") for span in await scene.spans(ADA)]
    assert [output for output in outputs if output is not None] == ["36"]
    [sample] = await scene.samples([ADA])
    assert sample.reward == 1.0


def test_rows_are_those_of_its_data_sets():
    environment = of("plain-sums", config={"num_train": 50})
    code = code_of(environment)

    def rows(**asked: Any) -> list[Any]:
        return rows_of(code, environment, EnvironmentRows(kind="environment", **asked))

    every, held_out = rows(), rows(split="eval")
    assert len(every) == 50 and len(held_out) == 3
    assert not {row["answer"] for row in every} & {row["answer"] for row in held_out}
    first = rows(size=10, seed=1)
    assert len(first) == 10 and [row["answer"] for row in first] != [row["answer"] for row in every[:10]]
    assert first[0]["prompt"][0] == {"role": "system", "content": "Answer in <answer></answer>."}
    without = of("plain-sums", config={"num_eval": 0})
    with pytest.raises(ConfigError, match="it has no eval_dataset, so none of its rows are held out"):
        rows_of(code_of(without), without, EnvironmentRows(kind="environment", split="eval"))


def test_what_an_environment_raises_costs_an_attempt_and_is_named():
    with pytest.raises(EnvironmentFailed, match="the rollout ended with ToolError: it broke"):
        played(of("tool-notes", config={"kind": "asking"}), lambda place: said(place, ADA, "break"))
    with pytest.raises(EnvironmentFailed, match="the environment rewrites the conversation"):
        played(of("tool-notes", config={"kind": "rewriting"}), lambda place: said(place, ADA, "1"))
    tools = {**ADA, "info": {"tool_defs": [{"name": "other", "description": "", "parameters": {}}]}}
    with pytest.raises(EnvironmentFailed, match=r"the row has tools of its own \(other\)"):
        played(of("tool-notes"), lambda place: said(place, tools))

    async def crash(place: Place) -> None:
        await place.call("reset", ADA, 5)
        function = {"name": "age", "arguments": '{"name": "crash"}'}
        call = {"id": "c", "type": "function", "function": function}
        await place.call("call_tools", {"role": "assistant", "content": "", "tool_calls": [call]})

    with pytest.raises(HostEnded, match="ended its process with exit code 5"):
        played(of("tool-notes"), crash)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "no-such-env"}, "has no module no_such_env; install its package there"),
        ({"name": "plain-sums", "config": {"num_trian": 2}}, "cannot be loaded: RuntimeError: .*num_trian"),
        ({"name": "plain-sums", "config": {"reward": "group"}}, "has a reward function of whole groups"),
        ({"name": "plain-sums", "python": "no/such/python"}, "python = 'no/such/python' is no interpreter"),
    ],
)
def test_what_cannot_be_played_is_said_before_a_model_is_loaded(settings: dict[str, Any], problem: str):
    given = {"kind": "verifiers", "path": str(PACKAGES), "python": str(PYTHON), **settings}
    environment = VerifiersEnvironment(**given)
    with pytest.raises(ConfigError, match=problem):
        look_at(EnvironmentCode.of(environment, Path()), environment)


def test_other_tools_are_refused():
    with pytest.raises(ValidationError, match="an environment of verifiers calls its tools itself"):
        of("tool-notes", tools=(FilesTool(),))


def test_versions_files_and_settings_are_its_identity_and_not_where_they_are(tmp_path: Path):
    shutil.copytree(PACKAGES, tmp_path / "one")
    shutil.copytree(PACKAGES, tmp_path / "other")
    environment = of("tool-notes", tmp_path / "one")
    code = EnvironmentCode.of(environment, tmp_path)
    assert code.adapted is not None and code.adapted["hosted"]["verifiers"].startswith("0.")
    assert str(tmp_path) not in str(code.adapted)
    other = of("tool-notes", tmp_path / "other")
    assert EnvironmentCode.of(other, tmp_path).id(other, tmp_path) == code.id(environment, tmp_path)
    configured = of("tool-notes", tmp_path / "one", config={"max_turns": 3})
    assert EnvironmentCode.of(configured, tmp_path).id(configured, tmp_path) != code.id(environment, tmp_path)
    objects = ObjectStore.from_url("memory://verifiers")
    source = code.file(objects, environment, tmp_path)
    notes = tmp_path / "one" / "tool_notes" / "notes.py"
    notes.write_text(notes.read_text().replace('"36"', '"37"'))
    assert EnvironmentCode.of(environment, tmp_path).id(environment, tmp_path) != code.id(environment, tmp_path)
    with pytest.raises(ConfigError, match="tool-notes has changed since the run began"):
        look_at(EnvironmentCode.filed(objects, source), environment)
