"""Cache keys of all calls of stages that each example configuration makes, by a dry run: nothing is computed.

``python -m tests.golden.keys`` prints them as JSON. It is a process of its own, started without what could differ by
machine (`VARIABLES`, `SETTINGS`), and held to portable numerics, as most examples ask for them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rollout_core.base.determinism import NUMERICS, hold_numerics
from rollout_core.base.errors import ConfigError
from tests.golden.inputs import write_inputs

PROJECT = Path(__file__).resolve().parents[2]
VARIABLES = ("ROLLOUT_", "PREFECT_", "VLLM_", "OMP_", "MKL_", "DASK_", "CUDA_", "HIP_", "ROCR_")
"""Beginnings of variables that the process does not inherit: some of them enter keys or change arithmetic."""
SETTINGS = {
    # Keys name the device.
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "ROLLOUT_DISK_CHECK": "off",
    # Threads that wait beside busy ones cost many times what they compute.
    "OMP_WAIT_POLICY": "passive",
}
"""What it has instead."""

FEWER: Mapping[str, Any] = {"algorithm.iterations": 2, "ppo.iterations": 2, "grpo.iterations": 2}
"""Where an example has the key: later iterations make the calls of the second one."""
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "batch-dask": {"workers.dask.address": "SCHEDULER"},
    "batch-s3": {"input.glob": "data/example/prompts.jsonl", "output.dir": "data/completions"},
    "batch-parquet": {"input.glob": "data/example/held-out.jsonl"},
    "grpo-dask": {"placement.dask.address": "SCHEDULER"},
    "online-lookup": {"runners.model_port": "FREE PORT"},
    "replay-tiny": {"algorithm.iterations": 3},
    "tune-wording": {"search.rounds": 1},
}
"""What a dry run cannot do without: a cluster that runs, rows that are here, a port that is free; a third iteration,
which replays; and fewer rounds of the same calls."""
NOT_ALL = "more calls may follow, as results say"
PAIRS = {"dataset": {"path": "data/example/pairs.jsonl"}, "optimizer": {"lr": 1e-4}, "sequence": {"max_length": 64}}
TRAINED_REWARD = {"kind": "model", "model": "data/example/reward-model"}
CHOICES = {
    "name": "choices",
    "rows": {"path": str(PROJECT / "examples" / "suites" / "choices.jsonl")},
    "prompt": {"text": "{{ question }}"},
    "scorer": {"kind": "choice"},
}
HELD_OUT = {"name": "sorting", "rows": {"path": "data/example/held-out.jsonl"}, "sampling": {"max_tokens": 16}}
AWAY = {"kind": "endpoint", "url": "http://127.0.0.1:9/v1", "model": "served", "revision": "1"}
INSPECT = {"kind": "inspect", "name": "theirs", "tasks": ["sorting.py"], "generate_config": {"max_tokens": 8}}
LM_EVAL = {"kind": "lm_eval", "name": "theirs", "tasks": ["sorting.yaml"]}
ENVIRONMENT = {"path": "examples/environments/lookup.py:Lookup", "tools": [{"kind": "files"}]}
REMEMBERS = {"path": "examples/environments/notebook.py:Notebook", "episodic_memory": True}
FURTHER: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "eval-tiny, tasks of lm_eval": ("eval-tiny", {"suites": [LM_EVAL]}),
    "eval-tiny, tasks of inspect_ai": ("eval-tiny", {"suites": [INSPECT]}),
    "eval-tiny, choices": ("eval-tiny", {"suites": [CHOICES]}),
    "eval-tiny, a model at an endpoint": ("eval-tiny", {"model": AWAY, "suites": [HELD_OUT]}),
    "ppo-tiny, a reward model": ("ppo-tiny", {"algorithm.reward": TRAINED_REWARD}),
    "grpo-tiny, a sum of rewards": (
        "grpo-tiny",
        {"algorithm.reward": {"kind": "composite", "parts": [{"weight": 2.0, "reward": {"kind": "exact_match"}}]}},
    ),
    "grpo-tiny, a plugin's reward": ("grpo-tiny", {"algorithm.reward": {"kind": "plugin", "name": "length"}}),
    "grpo-tiny, rewards by name": (
        "grpo-tiny",
        {
            "algorithm.reward": {
                "kind": "expression",
                "expression": "exact + model",
                "rewards": {"exact": {"kind": "exact_match"}, "model": TRAINED_REWARD},
            }
        },
    ),
    "grpo-tiny, easy prompts first": (
        "grpo-tiny",
        {"algorithm.curriculum": {"by": "reward", "samples": 2}},
    ),
    "grpo-tiny, partial rollouts": (
        "grpo-tiny",
        {"algorithm.partial_rollouts": {"max_tokens_per_iteration": 8}, "algorithm.correction": {}},
    ),
    "grpo-tiny, transformers": ("grpo-tiny", {"backend": {"kind": "transformers"}}),
    "grpo-tiny, parts of rewards normalized, hacking watched": (
        "grpo-tiny",
        {
            "algorithm.reward": {"kind": "composite", "parts": [{"reward": {"kind": "exact_match"}}] * 2},
            "algorithm.reward_normalization": "each",
            "algorithm.guards": {"reward_hacking": {"prompts": {"path": "data/example/held-out.jsonl"}}},
        },
    ),
    "grpo-tiny, two processes": ("grpo-tiny", {"algorithm.parallel.nproc": 2}),
    "grpo-tiny, refreshed": ("grpo-tiny", {"run.refresh": "again"}),
    "sft-tiny, adapters and held-out rows": (
        "sft-tiny",
        {
            "algorithm.lora": {"r": 4},
            "algorithm.evaluation": {"dataset": {"path": "data/example/sft.jsonl"}, "every_steps": 20},
        },
    ),
    "sft-tiny, half precision and rules for steps": (
        "sft-tiny",
        {
            "numerics": "native",
            "algorithm.weights": "bfloat16",
            "algorithm.precision": "bfloat16",
            "algorithm.ema_decay": 0.9,
            "algorithm.max_tokens_per_microbatch": 256,
            "algorithm.skip_spikes": {"factor": 2.0},
        },
    ),
    "grpo-tiny, vLLM in half precision": (
        "grpo-tiny",
        {
            "numerics": "native",
            "backend.dtype": "bfloat16",
            "backend.num_threads": 2,
            "backend.enable_prefix_caching": True,
        },
    ),
    "batch-tiny, scripted": ("batch-tiny", {"backend": {"kind": "scripted"}}),
    "sft-tiny, distilled": (
        "sft-tiny",
        {"algorithm.distillation": {"teacher": {"uri": "data/example/teacher"}}},
    ),
    "nightly-tiny, in an environment": (
        "nightly-tiny",
        {"reward": None, "environment": ENVIRONMENT, "model.uri": "data/agents/model"},
    ),
    "nightly-tiny, in a plugin's environment": (
        "nightly-tiny",
        {"reward": None, "environment": {"kind": "plugin", "name": "letters"}, "model.uri": "data/agents/model"},
    ),
    "nightly-tiny, in an environment with a memory": (
        "nightly-tiny",
        {"reward": None, "environment": REMEMBERS, "model.uri": "data/agents/model"},
    ),
    "nightly-tiny, a base in bfloat16": ("nightly-tiny", {"model.uri": "data/example/half"}),
    "nightly-tiny, DPO": ("nightly-tiny", {"ppo": None, "dpo": PAIRS}),
    "nightly-tiny, a reward model is trained": ("nightly-tiny", {"rm": PAIRS}),
    "nightly-tiny, guards and a person": (
        "nightly-tiny",
        {
            "promotion.approval": "person",
            "promotion.guards": [
                {"kind": "kl", "max_kl": 0.5},
                {"kind": "reward", "reward": {"kind": "expression", "expression": "num_characters"}},
                {"kind": "prompts", "prompts": {"path": "data/example/prompts.jsonl"}},
            ],
        },
    ),
}
"""What no example asks for, by a name: the example, and what is changed in it."""


def examples() -> dict[str, Path]:
    """The files, by their names."""
    folder = PROJECT / "examples"
    files = [*folder.glob("*.toml"), *(folder / "agents").glob("*.toml"), *(folder / "environments").glob("*.toml")]
    # Its keys name the version of a package that a machine may lack, and its model is one of the hub.
    files.remove(folder / "environments" / "chain_sum.toml")
    return {file.stem: file for file in sorted(files)} | {"real/nightly": folder / "real" / "nightly.toml"}


@contextmanager
def _scheduler() -> Iterator[str]:
    """The address of a cluster with one worker that has all that the examples ask for."""
    from distributed import LocalCluster

    resources = {"GPU": 1, "CPU": 2, "LEARNER": 1}
    options: dict[str, Any] = {"dashboard_address": None, "protocol": "tcp://", "host": "127.0.0.1"}
    cluster: Any = LocalCluster(processes=False, n_workers=1, resources=resources, **options)
    with cluster:
        yield cluster.scheduler_address


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def calls_of(file: Path, changes: Mapping[str, Any]) -> list[str]:
    """A line for each call of a stage: name and version, label, and key, where results are cached; then whether a run
    may make more calls than these."""
    from rollout_core.config import CONFIG_KINDS, apply_overrides, parse_config
    from rollout_core.config.base import read_toml
    from rollout_core.config.kinds import kind_of
    from tasks.runtime.planning import plan_run

    tables = read_toml(file)
    changes = {key: value for key, value in FEWER.items() if _has(tables, key)} | dict(changes)
    left_out = [key for key, value in changes.items() if value is None]
    tables = apply_overrides(tables, {key: value for key, value in changes.items() if value is not None})
    for key in left_out:
        del tables[key]
    kind = kind_of(tables, file.name)
    config = parse_config(tables, CONFIG_KINDS[kind], name=file.name)
    _set_numerics(config.numerics)
    with _noted_calls() as lines:
        plan = plan_run(kind, config)
    return [*lines, *([NOT_ALL] if plan.remarks else [])]


def calls_alone() -> list[str]:
    """The same of calls that a dry run does not come to, as they depend on results that it does not have."""
    from blocks import ContentAddressedStorage
    from rollout_core.base.ids import ContentId
    from rollout_core.config import LearnOnlineConfig, SamplingParams, TrainSFTConfig, load_config
    from rollout_core.objects.records import AgentRollouts, Completions, PromptSet, Scores
    from tasks.collect import collect_samples
    from tasks.generate import continue_samples, join_completions
    from tasks.learn import ppo_update, sft_update
    from tasks.runtime.dry_run import DryRun, running_dry

    _set_numerics("portable")
    dry_run = DryRun(ContentAddressedStorage(url=os.environ["ROLLOUT_STORAGE"]))
    one, two, three, four = (ContentId(digit * 64) for digit in "1234")
    sampling = SamplingParams(max_tokens=8)
    settings = load_config(examples()["sft-tiny"], TrainSFTConfig).algorithm
    live: Any = load_config(examples()["online-lookup"], LearnOnlineConfig).algorithm
    with _noted_calls() as lines, running_dry(dry_run):
        placeholder = dry_run.placeholder
        continue_samples(one, two, sampling, label="nothing fresh")
        continue_samples(one, two, sampling, fresh=placeholder(PromptSet), label="fresh ones too")
        join_completions(placeholder(Completions), sampling, carried=one, number=1, group_size=2, label="carried")
        collect_samples(placeholder(AgentRollouts), failed="leave_out", form="trajectory", served=None, label="live")
        ppo_update(one, two, three, placeholder(Scores), four, live, seed=7, num_threads=2, label="live")
        sft_update(one, two, settings, seed=7, start_from=three, teacher=four, label="resumed")
    return lines


@contextmanager
def _noted_calls() -> Iterator[list[str]]:
    """The lines of calls of a dry run inside the block."""
    from tasks.runtime.arguments import spread_arguments
    from tasks.runtime.dry_run import DryRun

    lines: list[str] = []
    run_dry = DryRun.call

    def noted(self: DryRun, stage: Any, inputs: dict[str, Any]) -> Any:
        label = str(spread_arguments(inputs).get("label", ""))
        key = stage.key(inputs) if stage.cached else "not cached"
        lines.append(f"{stage.name}/{stage.version} [{label}] {key}")
        return run_dry(self, stage, inputs)

    DryRun.call = noted
    try:
        yield lines
    finally:
        DryRun.call = run_dry


def _has(tables: Mapping[str, Any], key: str) -> bool:
    table, _, name = key.partition(".")
    return name in tables.get(table, {})


def _set_numerics(asked: str) -> None:
    """This process was held before it imported torch, and native arithmetic may be any."""
    if asked == "portable":
        os.environ[NUMERICS] = "portable"
    else:
        os.environ.pop(NUMERICS, None)


def all_calls() -> dict[str, list[str]]:
    """Lines of `calls_of` by example, in a folder that has their inputs."""
    files = examples()
    found: dict[str, list[str]] = {}
    with ExitStack() as held:
        here = {"SCHEDULER": held.enter_context(_scheduler()), "FREE PORT": _free_port()}
        cases = {name: (name, CHANGES.get(name, {})) for name in files} | dict(FURTHER)
        for name, (example, changes) in cases.items():
            own = {key: here.get(value, value) if isinstance(value, str) else value for key, value in changes.items()}
            try:
                found[name] = calls_of(files[example], own)
            except ConfigError as error:
                found[name] = [f"refused: {error}"]
    return found | {"calls that no rehearsal comes to": calls_alone()}


def main() -> None:
    hold_numerics("portable")  # before torch is imported, so functions here import what may bring it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        os.chdir(folder)
        tempfile.tempdir = name  # Dask and torch leave folders where temporary files are
        os.environ["ROLLOUT_STORAGE"] = f"file://{folder / 'objects'}"
        os.environ["ROLLOUT_DATABASE"] = f"sqlite:///{folder / 'rollout.db'}"
        os.environ["ROLLOUT_CACHE"] = str(folder / "cache")
        os.environ["PREFECT_HOME"] = str(folder / "prefect")  # no profile of whoever runs this
        found = all_calls()
        os.chdir("/")
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
