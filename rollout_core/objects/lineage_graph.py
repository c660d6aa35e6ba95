"""Lineage of stages and inputs as text, as a flow chart in Mermaid's language, and as an image by graphviz."""

from __future__ import annotations

import html
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.ids import ContentId, canonical_json, named_ids
from rollout_core.base.processes import size_text
from rollout_core.objects.lineage import Lineage, by_output, maker_for
from rollout_core.objects.origins import Imported

NEAR_STAGES = 8
"""An input that is used further on than so many stages is drawn again there."""
MAX_TEXT = 44
SHOWN_IDS = 4
"""In a text, of one input that is made of many."""
DRAWING_SECONDS = 60
"""The longest that `dot` may take. A lineage of 150 stages takes it two seconds."""
OF_DOT = re.compile(r"<title>[^<]*</title>\n|<!--.*?-->\n")
NEEDS_DOT = "graphviz's dot draws the image, and this machine has no dot: install graphviz (apt-get install graphviz)"
STYLE = """
.lineage { color-scheme: light dark; }
.lineage text { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1c2430; }
.lineage .node path { fill: #f5f7fa; stroke: #8a97a8; }
.lineage .input path { fill: #e8f1fb; stroke: #5b8fc7; }
.lineage .asked path { stroke: #11683a; stroke-width: 2.5; }
.lineage .node text:first-of-type { font-weight: 600; }
.lineage .node text + text { fill: #566172; }
.lineage .edge path { stroke: #8a97a8; }
.lineage .edge polygon { fill: #8a97a8; stroke: #8a97a8; }
@media (prefers-color-scheme: dark) {
  .lineage text { fill: #e4e9f0; }
  .lineage .node path { fill: #1d232c; stroke: #7d8a9b; }
  .lineage .input path { fill: #172739; stroke: #5b9be6; }
  .lineage .asked path { stroke: #6fcf97; }
  .lineage .node text + text { fill: #a3afbf; }
}
"""


@dataclass(frozen=True)
class Node:
    """A stage that was run, or an input that no stage of the graph made."""

    name: str
    """Of the node: ``s`` and the number of its record, or ``i`` and the id's first digits."""
    title: str
    ids: tuple[ContentId, ...]
    """What the stage made; of an input its own."""
    source: str | None = None
    """Where an input came from."""

    @property
    def is_input(self) -> bool:
        return self.name.startswith("i")


@dataclass(frozen=True)
class LineageGraph:
    """Stages and inputs, and what led to what. Inputs that nothing made are files and base models, if all of a history
    is there."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]
    """From what was made to what took it, by the nodes' names."""


def lineage_graph(found: Sequence[Lineage], imports: Sequence[Imported] = ()) -> LineageGraph:
    """The graph of records as `trace_lineage` and `trace_descendants` give them, with the sources of inputs."""
    addresses = {item.outputs[0]: item.sources[0].address for item in imports}
    makers, places = by_output(found), {id(lineage): place for place, lineage in enumerate(found)}
    stages = [Node(f"s{place}", _title(lineage), lineage.outputs) for place, lineage in enumerate(found)]
    inputs: dict[ContentId, Node] = {}
    edges: dict[tuple[str, str], None] = {}
    for place, lineage in enumerate(found):
        for name, value in lineage.inputs.items():
            for named in dict.fromkeys(named_ids([canonical_json(value)])):
                maker = maker_for(lineage, named, makers.get(named, ()), are_all=False)
                if maker is not None:
                    edges[f"s{places[id(maker)]}", f"s{place}"] = None
                elif named not in lineage.outputs or named not in makers:
                    node = inputs.setdefault(named, Node(f"i{named.short}", name, (named,), addresses.get(named)))
                    edges[node.name, f"s{place}"] = None
    # What was brought in and nothing took.
    alone = {item.outputs[0] for item in imports} - inputs.keys() - makers.keys()
    lonely = [Node(f"i{one.short}", "import", (one,), addresses[one]) for one in sorted(alone)]
    return LineageGraph((*stages, *inputs.values(), *lonely), tuple(edges))


def as_text(found: Sequence[Lineage], imports: Sequence[Imported] = (), *, asked: ContentId, down: bool = False) -> str:
    """For a terminal: a paragraph for each stage in the order of ``found``, with what it made, what it took and where
    that came from; then what was brought in. ``*`` marks what was asked for."""
    makers = by_output(found)
    sources = {item.outputs[0]: item.sources[0].address for item in imports}
    count = f"{'led to' if down else 'was made by'} {len(found)} stage{'s' * (len(found) != 1)}"
    lines = [f"{asked.short}* {count if found else 'was brought in'}"]
    if len(alike := makers.get(asked, ())) > 1 and not down:
        lines.append(f"  the same content was made {len(alike)} times: {', '.join(map(_title, alike))}")
    for lineage in found:
        lines += ["", f"{_title(lineage)}  {lineage.created_at:%Y-%m-%d %H:%M} UTC"]
        lines.append("  made " + " ".join(_marked(output, asked) for output in lineage.outputs))
        for name, value in lineage.inputs.items():
            ids = list(dict.fromkeys(named_ids([canonical_json(value)])))
            for number, named in enumerate(ids[:SHOWN_IDS]):
                maker = maker_for(lineage, named, makers.get(named, ()), are_all=False)
                origin = _title(maker) if maker is not None else sources.get(named, "")
                lines.append(
                    f"  {'from' if number == 0 else '':4} {name:12} {_marked(named, asked):13} {origin}".rstrip()
                )
            if len(ids) > SHOWN_IDS:
                lines.append(f"       and {len(ids) - SHOWN_IDS} more")
        lines += _settings_line(lineage)
    if imports:
        lines += ["", "brought in"]
        lines += [line for item in imports for line in _import_lines(item, asked)]
    # Labels and addresses may hold anything, and a terminal obeys some of it.
    return "\n".join("".join(letter if letter.isprintable() else "?" for letter in line) for line in lines)


def _title(lineage: Lineage) -> str:
    return f"{lineage.stage} {lineage.inputs.get('label') or ''}".strip()


def _settings_line(lineage: Lineage) -> list[str]:
    """Settings that are one word or number; the whole of them is in the record."""
    simple = {
        name: value
        for name, value in lineage.inputs.items()
        if isinstance(value, str | int | float) and name != "label" and value != ""
    }
    simple = {name: value for name, value in simple.items() if not list(named_ids([canonical_json(value)]))}
    return [f"  with {', '.join(f'{name} {value}' for name, value in simple.items())}"] if simple else []


def _marked(named: ContentId, asked: ContentId) -> str:
    return f"{named.short}{'*' if named == asked else ''}"


def _import_lines(item: Imported, asked: ContentId) -> list[str]:
    """The id, and each source with all that is known of where it was."""
    lines = []
    for number, source in enumerate(item.sources):
        named = _marked(item.outputs[0], asked) if number == 0 else ""
        files = f" in {source.num_files} files" if source.num_files > 1 else ""
        size = f", {size_text(source.size_bytes)}{files}" if source.num_files else ""
        lines.append(
            f"  {named:13} {source.kind} {source.address}{size}, first {source.imported_at:%Y-%m-%d %H:%M} UTC"
        )
        hub = " ".join(filter(None, [source.hub_id, source.revision, source.commit]))
        lines += [f"  {'':13} {place}" for place in (source.place, hub) if place and place != source.address]
    return lines


def as_mermaid(graph: LineageGraph) -> str:
    """A flow chart: a box for each stage, inputs round."""
    lines = ["flowchart TD"]
    for node in graph.nodes:
        ids = " ".join(output.short for output in node.ids)
        if node.is_input:
            text = html.escape(f"{node.title} {ids}") + (f"<br>{_escaped(node.source)}" if node.source else "")
            lines.append(f'    {node.name}(["{text}"])')
        else:
            lines.append(f'    {node.name}["{_escaped(node.title)}<br>{ids}"]')
    return "\n".join([*lines, *(f"    {start} --> {end}" for start, end in graph.edges)])


def _escaped(text: str) -> str:
    return html.escape(text).replace("&", "#")


def as_dot(
    graph: LineageGraph, *, asked: ContentId | None = None, link: Callable[[ContentId], str | None] | None = None
) -> str:
    """The graph in graphviz's language: inputs above, the last results below. Whole ids are in each box's tooltip."""
    graph = _near_inputs(graph)
    lines = [
        "digraph lineage {",
        '    graph [bgcolor="transparent", ranksep=0.4, nodesep=0.25]',
        # CSS chooses the font. Courier is as wide as it, and `dot` knows its widths without its file.
        '    node [shape=box, style="rounded", fontname="Courier", fontsize=12, height=0.55, margin="0.11,0.06"]',
        "    edge [arrowsize=0.6]",
    ]
    for node in graph.nodes:
        kinds = ["input"] * node.is_input + ["asked"] * (asked in node.ids)
        full = [node.title, *([node.source] if node.source else []), *node.ids]
        attributes = {"label": _texts(node), "tooltip": full, "class": [" ".join(kinds)]}
        address = link(node.ids[-1]) if link is not None and node.ids else None
        attributes |= {"href": [address]} if address is not None else {}
        listed = ", ".join(f"{name}={_quoted(values)}" for name, values in attributes.items())
        lines.append(f'    "{node.name}" [{listed}]')
    for start, end in graph.edges:
        # Stages below each other, with their inputs aside.
        weight = 8 if start.startswith("s") else 1
        lines.append(f'    "{start}" -> "{end}" [weight={weight}]')
    return "\n".join([*lines, "}"])


def as_svg(
    graph: LineageGraph,
    *,
    asked: ContentId | None = None,
    link: Callable[[ContentId], str | None] | None = None,
    styled: bool = True,
) -> str:
    """An image that needs nothing else, for a page or a file, drawn by graphviz's `dot`.

    ``asked`` marks the box that made an id, or is it; ``link`` gives the address that a box leads to, by its last id.
    Colours follow the reader's choice of light or dark. Without ``styled`` it is for a page that has `STYLE` among its
    style sheets. Raises ConfigError where there is no `dot`.
    """
    source = as_dot(graph, asked=asked, link=link)
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"], input=source, capture_output=True, encoding="utf-8", timeout=DRAWING_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError(NEEDS_DOT) from None
    except OSError as error:
        raise RolloutError(f"dot cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired:
        raise RolloutError(
            f"dot drew for more than {DRAWING_SECONDS} s: {len(graph.nodes)} boxes are too many"
        ) from None
    if done.returncode:
        raise RolloutError(f"dot ended with {done.returncode}: {' '.join(done.stderr.split())[:400]}")
    # What is an image to screen readers has nothing within that can be chosen.
    role = "img" if link is None else "group"
    label = f"Lineage: {len(graph.nodes)} stages and inputs"
    # Names that only `dot` needs would be tooltips, and points are larger on a page than its text.
    opening, _, drawing = OF_DOT.sub("", done.stdout[done.stdout.index("<svg") :]).partition(">")
    opening = opening.replace("<svg", f'<svg class="lineage" role="{role}" aria-label="{label}"', 1).replace('pt"', '"')
    return f"{opening}>{f'<style>{STYLE}</style>' if styled else ''}{drawing}"


def _near_inputs(graph: LineageGraph) -> LineageGraph:
    """``graph`` with inputs next to what takes them: one that many stages far from each other take is there more than
    once, so that no arrow runs along all of the image."""
    places = {node.name: place for place, node in enumerate(graph.nodes)}
    users: dict[str, list[str]] = defaultdict(list)
    for start, end in graph.edges:
        users[start].append(end)
    nodes: list[Node] = []
    edges = [edge for edge in graph.edges if not edge[0].startswith("i")]
    for node in graph.nodes:
        if not node.is_input or not users[node.name]:
            nodes.append(node)
            continue
        first = None
        for user in sorted(users[node.name], key=places.__getitem__):
            if first is None or places[user] > places[first] + NEAR_STAGES:
                first = user
                nodes.append(Node(f"{node.name}-{first}", node.title, node.ids, node.source))
            edges.append((nodes[-1].name, user))
    return LineageGraph(tuple(nodes), tuple(edges))


def _texts(node: Node) -> list[str]:
    if node.is_input:
        return [_cut(f"{node.title} {node.ids[0].short}"), *([_cut(node.source)] if node.source else [])]
    more = f" +{len(node.ids) - 2}" if len(node.ids) > 2 else ""
    return [_cut(node.title), " ".join(output.short for output in node.ids[:2]) + more]


def _cut(text: str) -> str:
    """Of an address the end says most."""
    return text if len(text) <= MAX_TEXT else f"…{text[1 - MAX_TEXT :]}"


def _quoted(lines: Sequence[str]) -> str:
    """A string of graphviz's, which reads HTML's names of characters. A backslash has a meaning there that depends on
    the attribute, so it is shown as ``?``."""
    shown = ("".join(letter if letter.isprintable() and letter != "\\" else "?" for letter in line) for line in lines)
    return '"' + "\\n".join(map(html.escape, shown)) + '"'
