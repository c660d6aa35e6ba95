"""Lineage of stages and inputs as text, as a flow chart in Mermaid's language, and drawn as an SVG image."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree

from rollout_core.base.ids import ContentId, canonical_json, named_ids
from rollout_core.base.processes import size_text
from rollout_core.objects.imports import Imported
from rollout_core.objects.layered import lay_out, layers_of
from rollout_core.objects.lineage import Lineage, by_output, maker_for

NEAR_LAYERS = 4
"""An input that is used further away than so many layers is drawn again there."""
MAX_TEXT = 44
SHOWN_IDS = 4
"""In a text, of one input that is made of many."""
LETTER, MARGIN, BOX_HEIGHT, LAYER_HEIGHT, CORNER = 7.3, 16.0, 44.0, 86.0, 6.0
STYLE = """
.lineage { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; color-scheme: light dark; }
.lineage rect { fill: #f5f7fa; stroke: #8a97a8; }
.lineage .input rect { fill: #e8f1fb; stroke: #5b8fc7; }
.lineage .asked rect { stroke: #11683a; stroke-width: 2.5; }
.lineage text { fill: #1c2430; text-anchor: middle; }
.lineage .title { font-weight: 600; }
.lineage .ids { fill: #566172; }
.lineage path.arrow { fill: none; stroke: #8a97a8; stroke-width: 1.3; }
.lineage marker path { fill: #8a97a8; }
@media (prefers-color-scheme: dark) {
  .lineage rect { fill: #1d232c; stroke: #7d8a9b; }
  .lineage .input rect { fill: #172739; stroke: #5b9be6; }
  .lineage .asked rect { stroke: #6fcf97; }
  .lineage text { fill: #e4e9f0; }
  .lineage .ids { fill: #a3afbf; }
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


def as_svg(
    graph: LineageGraph,
    *,
    asked: ContentId | None = None,
    link: Callable[[ContentId], str | None] | None = None,
    styled: bool = True,
) -> str:
    """An image that needs nothing else, for a page or a file: first inputs above, the last results below.

    Whole ids are in each box's tooltip. ``asked`` marks the box that made an id, or is it; ``link`` gives the address
    that a box leads to, by its last id. Colours follow the reader's choice of light or dark. Without ``styled`` it is
    for a page that has `STYLE` among its style sheets.
    """
    graph = _near_inputs(graph)
    texts = {node.name: _texts(node) for node in graph.nodes}
    widths = {name: LETTER * max(map(len, lines)) + MARGIN for name, lines in texts.items()}
    layout = lay_out(widths, graph.edges)
    height = LAYER_HEIGHT * max(layout.layers.values(), default=0) + BOX_HEIGHT + 2 * MARGIN
    width = layout.width + 2 * MARGIN
    size = {"width": _number(width), "height": _number(height), "viewBox": f"0 0 {_number(width)} {_number(height)}"}
    # What is an image to screen readers has nothing within that can be chosen.
    label = {"role": "img" if link is None else "group", "aria-label": f"Lineage: {len(graph.nodes)} stages and inputs"}
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "lineage", **size, **label})
    if styled:
        ElementTree.SubElement(svg, "style").text = STYLE
    marker = {"id": "lineage-arrow", "viewBox": "0 0 8 8", "refX": "7", "refY": "4", "orient": "auto"}
    head = ElementTree.SubElement(
        ElementTree.SubElement(svg, "defs"), "marker", {**marker, "markerWidth": "8", "markerHeight": "8"}
    )
    ElementTree.SubElement(head, "path", {"d": "M0 0L8 4L0 8z"})
    tops = {name: MARGIN + LAYER_HEIGHT * layer for name, layer in layout.layers.items()}
    for (start, end), way in layout.ways.items():
        line = _line([MARGIN + x for x in way], tops[start] + BOX_HEIGHT, tops[end])
        ElementTree.SubElement(svg, "path", {"class": "arrow", "d": line, "marker-end": "url(#lineage-arrow)"})
    for node in graph.nodes:
        place = (MARGIN + layout.centres[node.name], tops[node.name])
        address = link(node.ids[-1]) if link is not None and node.ids else None
        into = svg if address is None else ElementTree.SubElement(svg, "a", {"href": address})
        _draw(into, node, texts[node.name], place, widths[node.name], asked in node.ids)
    return ElementTree.tostring(svg, encoding="unicode")


def _near_inputs(graph: LineageGraph) -> LineageGraph:
    """``graph`` with inputs next to what takes them: one that many stages far from each other take is there more than
    once, so that no arrow runs along all of the image."""
    layers = layers_of((node.name for node in graph.nodes), graph.edges)
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
        for user in sorted(users[node.name], key=layers.__getitem__):
            if first is None or layers[user] > layers[first] + NEAR_LAYERS:
                first = user
                nodes.append(Node(f"{node.name}-{first}", node.title, node.ids, node.source))
            edges.append((nodes[-1].name, user))
    return LineageGraph(tuple(nodes), tuple(edges))


def _texts(node: Node) -> tuple[str, str]:
    if node.is_input:
        return _cut(f"{node.title} {node.ids[0].short}"), _cut(node.source or "")
    more = f" +{len(node.ids) - 2}" if len(node.ids) > 2 else ""
    return _cut(node.title), " ".join(output.short for output in node.ids[:2]) + more


def _cut(text: str) -> str:
    """Of an address the end says most."""
    return text if len(text) <= MAX_TEXT else f"…{text[1 - MAX_TEXT :]}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _line(way: Sequence[float], top: float, bottom: float) -> str:
    """A smooth line from under a box to above another, straight down past the boxes of layers between."""
    step = BOX_HEIGHT if bottom > top else 0.0
    parts, y = [f"M{_number(way[0])} {_number(top)}"], top
    for number, (x, next_x) in enumerate(pairwise(way), 1):
        is_last = number == len(way) - 1
        target = bottom if is_last else y + LAYER_HEIGHT - BOX_HEIGHT
        middle = (y + target) / 2
        parts.append(
            f"C{_number(x)} {_number(middle)} {_number(next_x)} {_number(middle)} {_number(next_x)} {_number(target)}"
        )
        y = target
        if not is_last:
            y += step
            parts.append(f"V{_number(y)}")
    return "".join(parts)


def _draw(
    into: ElementTree.Element, node: Node, lines: Sequence[str], place: tuple[float, float], width: float, asked: bool
) -> None:
    kinds = ["node", *(["input"] if node.is_input else []), *(["asked"] if asked else [])]
    group = ElementTree.SubElement(into, "g", {"class": " ".join(kinds)})
    full = [node.title, *([node.source] if node.source else []), *node.ids]
    ElementTree.SubElement(group, "title").text = "\n".join(full)
    x, y = place
    box: Mapping[str, float] = {"x": x - width / 2, "y": y, "width": width, "height": BOX_HEIGHT}
    corner = BOX_HEIGHT / 2 if node.is_input else CORNER
    ElementTree.SubElement(group, "rect", {name: _number(value) for name, value in {**box, "rx": corner}.items()})
    heights = [y + 18, y + 34] if lines[1] else [y + 26]
    for kind, line, at in zip(("title", "ids"), lines, heights, strict=False):
        attributes = {"class": kind, "x": _number(x), "y": _number(at)}
        ElementTree.SubElement(group, "text", attributes).text = line
