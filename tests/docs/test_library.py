"""The scripts of docs/library.md run to their ends, killed on their way, and the page shows them as they are."""

from __future__ import annotations

import importlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.store import SqlLightningStore
from tests.conftest import PROJECT
from tests.support.faces import relocated, stubs

LIBRARY = PROJECT / "examples" / "library"
PAGE = PROJECT / "docs" / "library.md"
SCRIPTS = sorted(LIBRARY.rglob("*.py"))
FRAMEWORKS = PROJECT / "tests" / "agents" / "frameworks"
PLUGINS = PROJECT / "examples" / "plugins"
SHOWN = [
    (PROJECT / "docs" / "plugins.md", PLUGINS / "brevity" / "brevity.py"),
    (PROJECT / "docs" / "plugins.md", PLUGINS / "brevity-sidecar" / "main.py"),
    (PROJECT / "docs" / "plugins.md", PLUGINS / "brevity-shell" / "main.sh"),
    *((PAGE, script) for script in SCRIPTS),
    *((PROJECT / "docs" / "agents-frameworks.md", agent) for agent in sorted(FRAMEWORKS.glob("*.py"))),
]
"""Pages and the scripts that they show."""
LANGUAGES = {".py": "python", ".sh": "bash"}
FACES = [".".join(stub.parent.relative_to(PROJECT).parts) for stub in stubs()]


def output_of(process, *, seconds: float = 240.0) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output[-4000:]
    return output


def kill_once(process, condition: Callable[[], bool]) -> None:
    """Kill the process and what it started as soon as ``condition`` holds, which must be before its end."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, "it did not come that far within 120 s"
        time.sleep(0.02)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_killed_worker_loses_nothing(start_process, tmp_path):
    database = f"sqlite:///{tmp_path / 'mine.db'}"

    def loop(command: str, *arguments: str):
        return start_process(str(LIBRARY / "worker_loop.py"), command, database, *arguments)

    output_of(loop("enqueue", "60"))
    output_of(loop("enqueue", "60"))  # adds nothing
    killed = loop("work")
    kill_once(killed, lambda: len(output_of(loop("report")).splitlines()) >= 5)
    workers = [loop("work"), loop("work")]
    done = sum(int(re.fullmatch(r"completed (\d+)\n", output_of(worker))[1]) for worker in workers)  # pyright: ignore[reportOptionalSubscript]
    assert 0 < done < 60, "the killed one had done some"
    results = dict(line.split() for line in output_of(loop("report")).splitlines())
    assert results == {f"square-{number}": str(number * number) for number in range(60)}


async def test_every_rollout_of_the_loop_ends_after_as_many_attempts_as_it_needed(start_process, tmp_path):
    database = f"sqlite:///{tmp_path / 'mine.db'}"
    for command in (("enqueue", database, "8"), ("work", database)):
        output_of(start_process(str(LIBRARY / "worker_loop.py"), *command))
    async with SqlLightningStore.from_url(database) as store:
        attempts = {
            number: [attempt.status for attempt in await store.query_attempts(f"square-{number}")]
            for number in range(8)
        }
    failed_once = {0: ["failed", "succeeded"], 7: ["failed", "succeeded"]}
    assert attempts == {number: failed_once.get(number, ["succeeded"]) for number in range(8)}


@pytest.mark.parametrize("script", [pytest.param("own_loss", marks=pytest.mark.campaign), "own_algorithm"])
def test_killed_in_training_it_ends_in_the_bytes_of_an_undisturbed_run(
    script, start_process, tiny_model, sorting_task, tmp_path
):
    rows = sorting_task.sft if script == "own_loss" else sorting_task.prompts

    def run(folder: str):
        return start_process(str(LIBRARY / f"{script}.py"), str(tiny_model), str(rows), str(tmp_path / folder))

    def has_snapshots() -> bool:
        folder = tmp_path / "killed" / "objects"
        return folder.is_dir() and len(SnapshotStore(ObjectStore.from_url(f"file://{folder}")).list()) >= 2

    whole = output_of(run("undisturbed"))
    kill_once(run("killed"), has_snapshots)
    resumed = output_of(run("killed"))
    assert whole.splitlines()[-1] == resumed.splitlines()[-1]
    assert re.fullmatch(r"model [0-9a-f]{64}", whole.splitlines()[-1])
    figures = [float(figure) for figure in re.findall(r"(?:loss|reward) ([\d.]+)", whole)]
    if script == "own_loss":
        first = re.search(r"step +(\d+)", resumed)
        assert first is not None and int(first[1]) > 1, "it went on from a snapshot"
        # This loss also falls where the model believes in nothing; its own figures are what counts, see below.
    else:
        assert sum(figures[-3:]) > 1.5 * sum(figures[:3]), "the policy learns"


def test_the_own_loss_is_its_equation_and_its_gradient_is_weighed_by_the_probability():
    import torch

    own_loss = importlib.import_module("own_loss")
    logprobs = torch.tensor([0.5, 0.25]).log().requires_grad_()
    loss = own_loss.dft_loss(logprobs, 4)
    loss.backward()
    assert loss.item() == pytest.approx((0.5 * 0.6931472 + 0.25 * 1.3862944) / 4)
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-0.5 / 4, -0.25 / 4])


def test_the_leave_one_out_baseline_is_the_mean_of_the_others():
    import torch

    own_algorithm = importlib.import_module("own_algorithm")
    found = own_algorithm.leave_one_out(torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0]), 3)
    assert found.tolist() == pytest.approx([-3.0, -1.5, 4.5, 0.0, 0.0, 0.0])


@pytest.mark.server
def test_a_flow_of_an_own_package_is_cached_and_goes_on_where_it_was_killed(
    start_process, tiny_model, sorting_task, tmp_path, prefect_server
):
    environment = {"PREFECT_API_URL": prefect_server}

    def run():
        arguments = ("-m", "best_of_n", str(tiny_model), str(sorting_task.prompts))
        return start_process(*arguments, cwd=LIBRARY, env=environment)

    def has_trained() -> bool:
        return bool(SnapshotStore(ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])).list())

    kill_once(run(), has_trained)
    first, second = output_of(run()), output_of(run())
    assert re.search(r"'choose_best.*' - Finished in state Cached", second)
    assert len(re.findall(r"'sft_update.*' - Finished in state Cached", second)) == 2
    told = [[line for line in text.splitlines() if line.startswith(("round", "model"))] for text in (first, second)]
    assert told[0] == told[1] and len(told[0]) == 3


@pytest.mark.campaign
def test_an_agent_is_trained_killed_and_ends_with_every_rollout_run_once(start_process, tiny_model, tmp_path):
    folder = tmp_path / "trained"

    def run():
        return start_process(str(LIBRARY / "train_agent.py"), str(tiny_model), str(folder))

    def has_learnt() -> bool:
        storage = folder / "objects"
        return storage.is_dir() and bool(SnapshotStore(ObjectStore.from_url(f"file://{storage}")).list())

    kill_once(run(), has_learnt)
    first, second = output_of(run()), output_of(run())
    rewards = [float(figure) for figure in re.findall(r"reward ([\d.]+)", first)]
    assert len(rewards) == 6 and sum(rewards[-2:]) > 1.5 * sum(rewards[:2]), "the agent learns"
    assert re.search(r"^model [0-9a-f]{64}$", first, re.MULTILINE)
    told = [[line for line in text.splitlines() if line.startswith(("iteration", "model"))] for text in (first, second)]
    assert told[0] == told[1]


@pytest.mark.parametrize(("page", "script"), SHOWN, ids=lambda path: str(path.relative_to(PROJECT)))
def test_a_page_shows_a_script_as_it_is(page: Path, script: Path):
    text = script.read_text(encoding="utf-8")
    language = LANGUAGES[script.suffix]
    assert f"```{language}\n{text}```" in page.read_text(encoding="utf-8"), (
        f"docs/{page.name} does not show {script.name} as it is; run python -m tests.docs.test_library"
    )


@pytest.mark.parametrize("face", FACES)
def test_every_name_that_a_package_offers_is_there(face: str):
    package = importlib.import_module(face)
    assert package.__all__ and all(getattr(package, name) is not None for name in package.__all__)


def test_names_that_moved_are_found_again(tmp_path: Path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.pyi").write_text("from .before import (\n    moved as moved,\n    gone as gone,\n)\n")
    (package / "after.py").write_text("def moved(): ...\n")
    expected = "from .after import (\n    moved as moved,\n)\nfrom .before import (\n    gone as gone,\n)\n"
    assert relocated(package / "__init__.pyi") == expected


def main() -> None:
    """Put the scripts as they are into the pages, each below the line that names it."""
    for page, script in SHOWN:
        shown = str(script.relative_to(PROJECT))
        language = LANGUAGES[script.suffix]
        block = f"```{language}\n{script.read_text(encoding='utf-8')}```"
        text, count = re.subn(
            rf"(`{re.escape(shown)}`:\n\n)```{language}\n.*?^```$",
            lambda found, block=block: found[1] + block,
            page.read_text(encoding="utf-8"),
            flags=re.M | re.S,
        )
        if count != 1:
            raise SystemExit(f"docs/{page.name} has {count} blocks below a line that ends in `{shown}`:")
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
