"""What the page of a nightly run says and shows."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import Recoverable
from rollout_core.base.ids import canonical_json, hash_bytes
from rollout_core.config import PromotionConfig, ScriptedBackend
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint
from rollout_core.promotion.evidence import Evidence, Promotion, compare, rewards_by_prompt
from rollout_core.promotion.guards import GuardFinding
from rollout_core.runs.run_samples import shown_prompt
from tasks.runtime.journal import StageEntry
from tasks.runtime.nightly_report import Learned, Progress, Report, compare_samples, progress_of, write_report
from tasks.runtime.report import PAGE, Curve, curves_of_iterations, figure_of_steps, picture
from tests.support.evaluations import evaluation

SOME, ANY_GAIN = hash_bytes(b"some"), PromotionConfig()


SFT_LOSS = Curve("SFT loss", [2.0, 1.0], "optimizer step")


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore.from_url("memory://report")


def written(objects: ObjectStore, progress: Progress, folder: Path) -> str:
    before = evaluation(objects, SOME, ("sort 2 1 =", 0.25, 2, "stop"))
    after = evaluation(objects, hash_bytes(b"new"), ("sort 2 1 =", 0.75, 2, "stop"))
    comparison = compare(
        "before", (SOME, SOME, rewards_by_prompt(objects, before)), (SOME, rewards_by_prompt(objects, after)), ANY_GAIN
    )
    guards = (GuardFinding(kind="length", passed=True, line="4 <5"),)
    report = Report(
        name="night <b>",
        evaluations={"before": before, "after PPO": after},
        temperature=0.0,
        backend=ScriptedBackend(kind="scripted"),
        progress=progress,
        promotion=Promotion(
            model=SOME, promoted=True, reason="better", evidence=Evidence(comparisons=(comparison,), guards=guards)
        ),
        stages=[StageEntry("sft_update", "nightly", "Cached", 0.1, (SOME,), (SOME,))] * 90,
    )
    assert report.held_out == {"before": 0.25, "after PPO": 0.75}
    return (write_report(report, folder, objects) / PAGE).read_text()


def checkpoint(objects: ObjectStore, *rows: dict[str, float]) -> Checkpoint:
    metrics = objects.put_bytes(b"\n".join(canonical_json(row) for row in rows))
    return Checkpoint(
        model=SOME, train_state=SOME, metrics=metrics, algorithm="ppo", step=len(rows), summary=dict(rows[-1])
    )


def test_the_page_says_at_which_temperature_each_reward_was_drawn(objects, tmp_path):
    curve = Curve("mean training reward", [0.1, 0.4], "PPO iteration")
    page = written(objects, Progress(curve, temperature=1.0), tmp_path)
    assert "Training reward is that of completions drawn at temperature 1," in page
    assert "held-out reward that of completions of other prompts drawn at temperature 0." in page


@pytest.mark.parametrize("temperature", [0.0, None])
def test_the_page_says_nothing_of_temperatures_where_they_are_one_or_no_rewards_are_compared(
    objects, tmp_path, temperature
):
    curve = Curve("margin", [0.1, 0.4], "DPO step")
    page = written(objects, Progress(curve, temperature=temperature), tmp_path)
    assert "drawn at temperature" not in page


def test_every_curve_is_a_picture_of_the_page_and_the_stages_are_folded(objects, tmp_path):
    others = (Curve("KL to the reference, nats a completion", [0.0, 0.1], "PPO iteration"), SFT_LOSS)
    progress = Progress(Curve("mean training reward", [0.1, 0.4], "PPO iteration"), temperature=1.0, others=others)
    page = written(objects, progress, tmp_path)
    pictures = re.findall(r'<img src="([^"]+)"', page)
    assert pictures == ["progress.png", "kl-to-the-reference.png", "sft-loss.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert re.search(r"<details><summary>90 stages: 90 cached</summary>.*</details>", page, re.DOTALL)
    assert "night &lt;b&gt;" in page
    assert f"<p>Checkpoint <code>{SOME}</code>: <b>promoted</b> (better).</p>\n<p>Evidence:</p><ul><li>against " in page
    assert "<li>guard passed: 4 &lt;5</li></ul>" in page
    assert page.index("<th>before</th>") < page.index("<code>x</code> (0.25)") < page.index("<code>x</code> (0.75)")


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


def test_progress_is_that_of_the_part_after_sft():
    objects = ObjectStore.from_url("memory://progress")
    tuned = checkpoint(objects, {"step": 1, "loss": 2.0})
    dpo = checkpoint(objects, {"step": 1, "rewards/margins": 0.5, "rewards/accuracies": 0.75, "loss": 0.25})
    progress = progress_of(objects, tuned, Learned("DPO", [dpo]))
    assert (progress.curve.what, progress.curve.values) == ("margin of chosen over rejected", [0.5])
    assert [list(curve.values) for curve in progress.others] == [[0.75], [0.25], [2.0]]
    ppo = checkpoint(objects, {"step": 1, "entropy": 3.0})
    progress = progress_of(objects, tuned, Learned("PPO", [ppo, ppo], [0.1, 0.2], temperature=1.0))
    assert (progress.curve, progress.temperature) == (Curve("mean training reward", [0.1, 0.2], "PPO iteration"), 1.0)
    assert [list(curve.values) for curve in progress.others] == [[3.0, 3.0], [2.0]]
    # Scores of a reward model are on no scale of the held-out reward.
    progress = progress_of(objects, tuned, Learned("GRPO", [ppo], [4.0], temperature=1.0, reward_model=dpo))
    assert (progress.curve.what, progress.temperature) == ("mean score of the reward model", None)
    assert [list(curve.values) for curve in progress.others] == [[0.75], [3.0], [2.0]]


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
