"""Pages of what packages offer to Python, by their stubs (`__init__.pyi`)."""

from __future__ import annotations

import ast
from pathlib import Path

PROJECT = Path(__file__).parents[2]
FOLDER = "reference/python"
PACKAGES = {
    "rollout_core.algorithms": "losses, advantages, the training loop and the updates",
    "rollout_core.data": "rows to tokens: data sets, chats, packing, samples",
    "rollout_core.inference": "backends and what they are asked",
    "rollout_core.models": "model folders",
    "rollout_core.objects": "content, snapshots, records, lineage",
    "rollout_core.rewards": "rewards",
    "rollout_core.sandbox": "a sandbox for programs of others",
    "rollout_core.store": "the LightningStore: rollouts, attempts, spans, resources",
    "rollout_core.agents": "agents, runners, tracers, adapters, the trainer",
    "tasks": "stages: retried, cached by content",
    "flows": "flows: what deployments run",
}
"""What is on a page of its own; the models of `rollout_core.config` are in the reference of the configuration."""


def pages() -> dict[str, str]:
    """Markdown by the page's place in the site."""
    lines = ["# Python", "", "What each package offers; [From Python](../../library.md) shows it at work.", ""]
    lines += ["| package | about |", "|---|---|"]
    lines += [f"| [`{name}`]({name}.md) | {about} |" for name, about in PACKAGES.items()]
    lines.append("| [`rollout_core.config`](../configuration/index.md) | every table of the TOML files |")
    found = {f"{FOLDER}/index.md": "\n".join(lines) + "\n"}
    return found | {f"{FOLDER}/{name}.md": _page(name, about) for name, about in PACKAGES.items()}


def _page(package: str, about: str) -> str:
    stub = PROJECT / package.replace(".", "/") / "__init__.pyi"
    lines = [f"# {package}", "", f"{about[0].upper()}{about[1:]}.", ""]
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            lines += [f"## {package}.{node.module}" if node.module else f"## {package}", ""]
            for alias in node.names:
                lines += [f"::: {package}.{node.module}.{alias.name}", ""]
    return "\n".join(lines)
