"""What is checked of a batch inference run before any engine starts."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, CorruptObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.config import InferBatchConfig
from rollout_core.config.environments import EnvironmentConfig
from rollout_core.data.dataset_sources import open_prompts
from rollout_core.data.datasets import PromptRow
from rollout_core.data.samples import length_problem
from rollout_core.data.text import try_prompts
from rollout_core.inference.batch_runs import RUN_ID_FILE, check_run, earlier_run_id, parameters_of
from rollout_core.inference.folders import output_folder
from rollout_core.inference.output import file_name
from rollout_core.inference.shards import imported_before, read_shard, shards_of
from rollout_core.models.locating import has_token, is_gated
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import PromptShards
from rollout_core.plans.cluster import check_cluster, check_placement
from rollout_core.plans.learner_plan import LearnerPlan
from rollout_core.plans.plan import Connections, Plan, context_limit
from rollout_core.runs.played_files import EPISODES_FILE

log = logging.getLogger(__name__)

SAMPLED_ROWS = 1000
"""Rows that are tokenised, to estimate how many will fail."""
_SAMPLED_SHARDS = 4


def plan_batch(
    config: InferBatchConfig,
    base: Path,
    connections: Connections | None = None,
    *,
    run_id: str | None = None,
    thorough: bool = False,
) -> dict[str, Any]:
    """Check a batch inference run, or one to be continued. Raises ConfigError naming all that is wrong.

    Every line of the input is read, unless the same files were read before. ``thorough``: a model that an earlier run
    found good is looked at again, and some rows are tokenised to estimate how many will fail.
    """
    if config.environment is not None:
        return _plan_episodes(config, config.environment, base, connections, run_id)
    plan = Plan(base, connections, trusts_notes=not thorough)
    plan.places()
    plan.no_resume(config.run, "a batch resumes by itself when it is started again; leave it out")
    plan.known_model("model", config.model)
    gated = [uri for uri in (config.model.uri, config.model.tokenizer) if uri and is_gated(uri)]
    if gated:
        plan.facts["hub token"] = "set" if has_token() else f"not set; {gated[0]} may ask for ROLLOUT_SECRET_HF_TOKEN"
    plan.place(config.placement)
    plan.backend("backend", config.backend)
    plan.sampling("sampling", config.sampling, config.backend)
    rows = plan.check("input.glob", lambda: _read(plan, config))
    plan.facts["inputs"] = rows.count if rows else 0
    plan.reading("input.glob", rows.remarks if rows else ())
    if config.placement is None:
        plan.facts["workers"] = _workers(plan, config)
    else:
        check_placement(plan, config.placement, ["generation"])
    plan.check("output.dir", lambda: _check_output(plan, config, run_id, file_name(config.output)))
    if rows and thorough:
        _count_failures(plan, config, rows)
    return plan.done()


def _plan_episodes(
    config: InferBatchConfig,
    environment: EnvironmentConfig,
    base: Path,
    connections: Connections | None,
    run_id: str | None,
) -> dict[str, Any]:
    """Of episodes that the rows of the input begin."""
    plan = LearnerPlan(base, connections)
    plan.places()
    plan.no_resume(config.run, "a batch resumes by itself when it is started again; leave it out")
    plan.model("model", config.model)
    plan.backend("backend", config.backend)
    plan.sampling("sampling", config.sampling, config.backend)
    plan.environment("environment", environment)
    plan.facts["inputs"] = plan.tasks("input", config.input.as_dataset())
    plan.check("output.dir", lambda: _check_output(plan, config, run_id, EPISODES_FILE))
    return plan.done()


def _workers(plan: Plan, config: InferBatchConfig) -> int | str | None:
    dask = config.workers.dask
    if dask is None:
        return config.workers.count
    return plan.check("workers.dask", lambda: check_cluster(dask))


class _Rows:
    """The number of rows, and some of them, each as likely as any other."""

    def __init__(self, count: int = 0, num_chats: int = 0) -> None:
        self.count = count
        self.num_chats = num_chats
        self.sampled: list[PromptRow] = []
        self.remarks: tuple[str, ...] = ()
        """What was changed to make rows of what the files hold; unknown of an input that was imported before."""
        self._random = random.Random(0)

    def see(self, rows: Iterable[PromptRow]) -> None:
        """Count rows, and keep a sample of them (Vitter's algorithm R)."""
        for row in rows:
            self.count += 1
            self.num_chats += row.messages is not None
            if len(self.sampled) < SAMPLED_ROWS:
                self.sampled.append(row)
            elif (place := int(self._random.random() * self.count)) < SAMPLED_ROWS:
                self.sampled[place] = row


_read_last: dict[ContentId, _Rows] = {}
"""By the identity of the input: a command plans, and then the flow that it starts in this process does."""


def _read(plan: Plan, config: InferBatchConfig) -> _Rows:
    prompts = open_prompts(config.input, plan.base, plan.objects)
    source = prompts.identity()
    rows = None
    if plan.objects is not None and source is not None:
        rows = _imported(plan.objects, source, config.workers.shard_size)
    if rows is None and source is not None:
        rows = _read_last.get(source)
    if rows is None:
        rows = _Rows()
        rows.see(prompts.rows())
        rows.remarks = prompts.remarks()
        _read_last.clear()
        _read_last.update({} if source is None else {source: rows})
    if rows.num_chats and plan.has_chat_template is False:
        raise ConfigError(
            f"{rows.num_chats} of {rows.count} rows hold chat messages, but the tokenizer has no chat template; give "
            "plain text, a model or model.tokenizer with a template, or model.chat_template"
        )
    return rows


def _imported(objects: ObjectStore, source: ContentId, shard_size: int) -> _Rows | None:
    """What is known of an input that was imported before; None where it was not, or what was kept cannot be read."""
    known = imported_before(objects, source, shard_size)
    if known is None:
        return None
    rows = _Rows(known.num_rows, known.num_chats)
    try:
        rows.sampled = _sample(objects, known)
    except (CorruptObject, NotFound) as error:
        log.warning("the input is read again: what was kept of it cannot be read (%s)", error)
        return None
    return rows


def _sample(objects: ObjectStore, prompts: PromptShards) -> list[PromptRow]:
    chosen = random.Random(0)
    shards = shards_of(objects, prompts)
    some = shards if len(shards) <= _SAMPLED_SHARDS else chosen.sample(shards, _SAMPLED_SHARDS)
    rows = [shard_row.row for shard, _ in some for shard_row in read_shard(objects, shard)]
    return rows if len(rows) <= SAMPLED_ROWS else chosen.sample(rows, SAMPLED_ROWS)


def _check_output(plan: Plan, config: InferBatchConfig, asked: str | None, name: str) -> None:
    folder = output_folder(config.output.dir, plan.base, plan.objects)
    folder.check(name, RUN_ID_FILE)
    if open_prompts(config.input, plan.base, plan.objects).covers(folder.where(name)):
        raise ConfigError(
            f"{folder.where(name)} would be part of the input {config.input.glob!r} of the next run; write to another "
            "folder, or give a pattern that leaves it out"
        )
    run_id = earlier_run_id(folder, asked)
    if run_id is None:
        return
    plan.facts["continues run"] = run_id
    if plan.objects is None:
        return
    if check_run(plan.objects, run_id, parameters_of(config), folder, asked) is None:
        plan.facts["continues run"] = f"{run_id} (unknown to this object store, so it begins anew)"


def _count_failures(plan: Plan, config: InferBatchConfig, rows: _Rows) -> None:
    """Tell how many samples will fail for their prompts, if some will; more than the run may have are a violation."""
    if plan.tokenizer is None:
        return
    found = plan.check("input.glob", lambda: try_prompts(plan.tokenizer, rows.sampled))
    if found is None:
        return
    plan.conversations("input.glob", rows.sampled)
    token_ids, refused = found
    limit = context_limit(config.backend) or plan.max_positions
    problems = [length_problem(len(ids), config.sampling.max_tokens, limit) for ids in token_ids]
    too_long = [problem for problem in problems if problem]
    _tell(plan, "prompts refused", list(refused.values()), rows)
    _tell(plan, "prompts too long", too_long, rows)
    will_fail, allowed = [*too_long, *refused.values()], config.failures.max_share
    if len(will_fail) > allowed * rows.count:
        plan.violations.append(
            f"failures.max_share: {len(will_fail)} of {rows.count} prompts will fail, more than {allowed:g} allows; "
            f"such as: {will_fail[0]}. Mend the input, or raise the limit"
        )
    elif len(will_fail) > allowed * len(rows.sampled):
        plan.facts["failures"] = (
            f"{len(will_fail)} of {len(rows.sampled)} prompts looked at: the run may fail, as failures.max_share is "
            f"{allowed:g}"
        )


def _tell(plan: Plan, what: str, problems: Sequence[str], rows: _Rows) -> None:
    if problems:
        looked_at = "" if len(rows.sampled) == rows.count else f" of {len(rows.sampled)} looked at"
        plan.facts[what] = f"{len(problems)}{looked_at}, which will fail, such as: {problems[0]}"
