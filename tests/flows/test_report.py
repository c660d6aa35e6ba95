"""What the page of a nightly run says and shows."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import pytest

from rollout_core.base.errors import Recoverable
from rollout_core.base.ids import canonical_json, hash_bytes
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint
from rollout_core.runs.samples import shown_prompt
from tasks.runtime.journal import StageEntry
from tasks.runtime.nightly_report import Progress, Report, compare_samples, write_report
from tasks.runtime.report import Curve, curves_of_iterations, figure_of_steps, picture
from tests.support.evaluations import evaluation

SOME = hash_bytes(b"some")


def report(progress: Progress) -> Report:
    return Report(
        name="night <b>",
        held_out={"before": 0.25, "after PPO": 0.75},
        held_out_temperature=0.0,
        progress=progress,
        sft_losses=[2.0, 1.0],
        promotion="better",
        promoted=True,
        model=SOME,
        stages=[StageEntry("sft_update", "nightly", "Cached", 0.1, (SOME,), (SOME,))] * 90,
        samples=[],
        evidence=["gain 0.5 <0.4 to 0.6>"],
    )


def checkpoint(objects: ObjectStore, *rows: dict[str, float]) -> Checkpoint:
    metrics = objects.put_bytes(b"\n".join(canonical_json(row) for row in rows))
    return Checkpoint(
        model=SOME, train_state=SOME, metrics=metrics, algorithm="ppo", step=len(rows), summary=dict(rows[-1])
    )


def test_the_page_says_at_which_temperature_each_reward_was_drawn(tmp_path):
    curve = Curve("mean training reward", [0.1, 0.4], "PPO iteration")
    page = (write_report(report(Progress(curve, temperature=1.0)), tmp_path) / "index.html").read_text()
    assert "Training reward is that of completions drawn at temperature 1," in page
    assert "held-out reward that of completions of other prompts drawn at temperature 0." in page


@pytest.mark.parametrize("temperature", [0.0, None])
def test_the_page_says_nothing_of_temperatures_where_they_are_one_or_no_rewards_are_compared(tmp_path, temperature):
    curve = Curve("margin", [0.1, 0.4], "DPO step")
    page = (write_report(report(Progress(curve, temperature=temperature)), tmp_path) / "index.html").read_text()
    assert "drawn at temperature" not in page


def test_every_curve_is_a_picture_of_the_page_and_the_stages_are_folded(tmp_path):
    others = (Curve("KL to the reference, nats a completion", [0.0, 0.1], "PPO iteration"),)
    progress = Progress(Curve("mean training reward", [0.1, 0.4], "PPO iteration"), temperature=1.0, others=others)
    page = (write_report(report(progress), tmp_path) / "index.html").read_text()
    pictures = re.findall(r'<img src="([^"]+)"', page)
    assert pictures == ["progress.png", "kl-to-the-reference.png", "sft-loss.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert re.search(r"<details><summary>90 stages: 90 cached</summary>.*</details>", page, re.DOTALL)
    assert "night &lt;b&gt;" in page
    assert "<p>Evidence:</p><ul><li>gain 0.5 &lt;0.4 to 0.6&gt;</li></ul>" in page


def test_a_picture_is_drawn_once_and_another_is_drawn_anew(tmp_path, monkeypatch):
    objects = ObjectStore.from_url("memory://pictures")
    curve, drawn = Curve("loss", [2.0, float("nan"), 1.0], "step"), []
    first = picture(objects, curve, "Loss", {"before": 0.5})
    assert first.startswith(b"\x89PNG")
    monkeypatch.setattr("tasks.runtime.report.draw_curve", lambda target, *_, **shown: drawn.append(shown))
    assert picture(objects, curve, "Loss", {"before": 0.5}) == first and not drawn
    others = [
        (Curve("loss", [2.0, 1.0, 1.0], "step"), "Loss", {"before": 0.5}),
        (Curve("margin", curve.values, "step"), "Loss", {"before": 0.5}),
        (Curve("loss", curve.values, "iteration"), "Loss", {"before": 0.5}),
        (curve, "Losses", {"before": 0.5}),
        (curve, "Loss", {"before": 0.6}),
        (curve, "Loss", {"after": 0.5}),
        (curve, "Loss", None),
    ]
    for number, other in enumerate(others, start=1):
        picture(objects, *other)
        assert len(drawn) == number
    monkeypatch.setattr("tasks.runtime.report.version", lambda _: "another matplotlib")
    picture(objects, curve, "Loss", {"before": 0.5})
    assert len(drawn) == len(others) + 1


def test_a_curve_of_iterations_is_the_mean_over_the_steps_of_each_and_missing_figures_make_none():
    objects = ObjectStore.from_url("memory://report")
    first = checkpoint(objects, {"step": 1, "entropy": 2.0, "value_loss": 4.0}, {"step": 2, "entropy": 1.0})
    second = checkpoint(objects, {"step": 1, "entropy": 0.5})
    curves = curves_of_iterations(objects, [first, second], "PPO iteration")
    assert [(curve.what, list(curve.values)) for curve in curves] == [("entropy, nats a token", [1.5, 0.5])]
    assert figure_of_steps(objects, first, "value_loss") == [4.0]


def test_a_report_is_written_though_storage_is_away_for_a_moment(monkeypatch):
    """It is the last that a run does: the model is promoted, and nothing starts a run again that has failed."""
    objects = ObjectStore.from_url("memory://away")
    trained = checkpoint(objects, {"step": 1, "loss": 2.0})
    judged = evaluation(objects, SOME, ("sort 2 1 =", 1.0, 2, "stop"))

    def away_every_other_time(name: str) -> None:
        real, calls = getattr(ObjectStore, name), count()

        def call(*arguments: Any) -> Any:
            if next(calls) % 2 == 0:
                raise Recoverable("storage is away")
            return real(*arguments)

        monkeypatch.setattr(ObjectStore, name, call)

    monkeypatch.setattr("tasks.runtime.stage.RETRY_DELAYS_SECONDS", [0.0] * 3)
    for name in ("get_bytes", "put_bytes", "set_ref", "cached_bytes"):
        away_every_other_time(name)
    assert figure_of_steps(objects, trained, "loss") == [2.0]
    assert [shown.rewards for shown in compare_samples(objects, judged)] == [(1.0,)]
    assert picture(objects, Curve("loss", [2.0, 1.0], "step"), "Loss").startswith(b"\x89PNG")


def test_a_conversation_is_shown_as_people_read_it():
    talk = [
        {"role": "user", "content": "What is 17 - 5?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "minus"}}]},
        {"role": "tool", "content": "12"},
    ]
    assert shown_prompt(talk) == ('user: What is 17 - 5?\n\nassistant: [{"function": {"name": "minus"}}]\n\ntool: 12')
    assert shown_prompt([{"role": "user", "content": [{"type": "text", "text": "a"}]}]) == (
        'user: [{"type": "text", "text": "a"}]'
    )
    assert shown_prompt("sort 2 1 =") == "sort 2 1 ="
