"""Episodes as lines of a file: what was said, and what it earned, in the order of the rows that they began with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from rollout_core.agents.adapters.ended import CHUNK, EndedRollout, as_they_were, ended_rollouts, read_rollouts
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.stopping import run_async
from rollout_core.config import InferBatchConfig, identity
from rollout_core.environments.transcripts import turns_of
from rollout_core.inference.folders import OutputFolder
from rollout_core.inference.output import OutputFile, write_known
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentRollouts, AgentTasks
from rollout_core.store import Span
from rollout_core.store.codec import ordered_json
from rollout_core.store.reachable import OpenStore
from rollout_core.store.semconv import AGL_EXCEPTION, LLM_CALL, LlmCallAttributes

EPISODES_FILE = "episodes.jsonl"
"""Name of the file in the output folder."""


def write_episodes(
    objects: ObjectStore,
    folder: OutputFolder,
    config: InferBatchConfig,
    episodes: AgentTasks,
    played: AgentRollouts,
    open_store: OpenStore,
    run_id: str,
) -> OutputFile:
    """Write what came of all episodes, unless it is there. Raises Fatal, and writes nothing, where more of them failed
    than may."""
    ended = ended_rollouts(objects, played)
    failed = [row for row in ended if row.reward is None]
    if len(failed) > config.failures.max_share * len(ended):
        [(_, spans)] = run_async(_spans(failed[:1], open_store))
        raise Fatal(
            f"{len(failed)} of {len(ended)} episodes failed, more than failures.max_share = "
            f"{config.failures.max_share:g} allows; such as: {_problem(failed[0], spans)}. What is complete is kept: "
            "mend the environment and run again, with run.refresh to try these again, or raise the limit"
        )
    form = [config.output.token_ids, config.output.logprobs, config.model.uri, identity(config.sampling)]
    known = content_id("episodes-file/1", [*form, episodes.rollouts, played.rollouts])
    write_known(objects, folder, EPISODES_FILE, known, lambda: _chunks(objects, config, episodes, played, open_store))
    return OutputFile(path=folder.where(EPISODES_FILE), num_rows=len(ended), num_failed=len(failed), run_id=run_id)


def _chunks(
    objects: ObjectStore,
    config: InferBatchConfig,
    episodes: AgentTasks,
    played: AgentRollouts,
    open_store: OpenStore,
) -> Iterator[bytes]:
    rows = [orjson.loads(line)["task"] for line in objects.get_bytes(episodes.rollouts).splitlines()]
    ended = ended_rollouts(objects, played)
    for start in range(0, len(ended), CHUNK):
        found = run_async(_spans(ended[start : start + CHUNK], open_store))
        lines = [
            _line(config, played.model, rows[number], number, episode, spans)
            for number, (episode, spans) in enumerate(found, start=start)
        ]
        yield b"".join(lines)


async def _spans(ended: Sequence[EndedRollout], open_store: OpenStore) -> list[tuple[EndedRollout, list[Span]]]:
    """Each episode with the spans that it had when it ended. Raises Fatal where the database has lost them."""
    then = {row.rollout_id: row for row in ended}
    async with open_store() as store:
        return [
            (then[rollout_id], as_they_were(then[rollout_id], spans))
            async for rollout_id, _, spans in read_rollouts(store, list(then))
        ]


def _line(
    config: InferBatchConfig,
    model: ContentId,
    row: Mapping[str, Any],
    number: int,
    episode: EndedRollout,
    spans: Sequence[Span],
) -> bytes:
    turns = turns_of(spans)
    tools = next((span.attributes.get(LlmCallAttributes.TOOLS.value) for span in spans if span.name == LLM_CALL), None)
    document: dict[str, Any] = {
        "id": episode.rollout_id if row.get("id") is None else str(row["id"]),
        "messages": [message for turn in turns for message in (*turn.messages, turn.message)],
        "reward": episode.reward,
        "turns": len(turns),
        "finish_reason": "length" if any(turn.finish_reason == "length" for turn in turns) else "stop",
        "num_tokens": sum(len(turn.token_ids) for turn in turns),
        "sampling_params": config.sampling.model_dump(mode="json"),
        "model_uri": config.model.uri,
        "model_content_id": model,
        "rollout_id": episode.rollout_id,
    }
    if tools is not None:
        document["tools"] = json.loads(str(tools))
    if any(turn.reward is not None for turn in turns):
        document["turn_rewards"] = [turn.reward for turn in turns]
    if config.sampling.n > 1:
        document["index"] = number % config.sampling.n
    if config.output.token_ids:
        document["token_ids"] = [turn.token_ids for turn in turns]
    if config.output.logprobs:
        document["logprobs"] = [turn.logprobs for turn in turns]
    if episode.reward is None:
        document |= {"finish_reason": "error", "error": _problem(episode, spans)}
    for key, value in row.items():
        document.setdefault(key, value)
    try:
        return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError:  # an integer beyond 64 bits
        return ordered_json(document) + b"\n"


def _problem(episode: EndedRollout, spans: Sequence[Span]) -> str:
    """Why its last attempt failed."""
    said = [span.attributes.get("exception.message") for span in spans if span.name == AGL_EXCEPTION]
    return str(said[-1]) if said else f"it ended {episode.status}"
