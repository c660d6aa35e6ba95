"""The plan of the house: what imports what. ``python -m tests.structure`` prints it as a table.

Counted are the modules of the five packages. An import inside a function is an arrow like any other; one for the eyes
of type checkers alone (under ``TYPE_CHECKING``) is none, as nothing runs along it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("rollout_core", "blocks", "tasks", "flows", "deployments")
OWN_ROOMS = ("flows.cli", "tasks.runtime")
"""Packages within others that are rooms, too."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Import:
    """One module names another."""

    importer: str
    imported: str
    function: str | None
    """In which it stands, if in one."""


@dataclass(frozen=True)
class House:
    """Modules with their lines and functions, and the imports between them."""

    lines: Mapping[str, int]
    imports: frozenset[Import]
    functions: Mapping[str, int] = field(default_factory=dict)
    """Lines of each, by its module and name."""

    def circle(self) -> list[str]:
        """Modules that import each other in a loop, if any do."""
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for item in self.imports:
            sorter.add(item.importer, item.imported)
        try:
            sorter.prepare()
        except CycleError as error:
            return error.args[1]
        return []

    def floors(self) -> dict[str, int]:
        """Of rooms, which are the packages of ``rollout_core`` and the others: one above the highest they import."""
        below: dict[str, set[str]] = {room_of(module): set() for module in self.lines}
        for item in self.imports:
            below[room_of(item.importer)].add(room_of(item.imported))
        floors: dict[str, int] = {}
        for room in TopologicalSorter({room: rooms - {room} for room, rooms in below.items()}).static_order():
            floors[room] = 1 + max((floors[other] for other in below[room] - {room}), default=0)
        return floors

    def inside_functions(self) -> list[Import]:
        """Imports that are not at the top of their file."""
        return sorted((item for item in self.imports if item.function), key=lambda item: (item.importer, item.imported))


def room_of(module: str) -> str:
    """``rollout_core.store`` of ``rollout_core.store.sql.sql_queue``, ``flows`` of ``flows.train``, ``flows.cli`` of
    ``flows.cli.plan``."""
    parts = module.split(".")
    inner = ".".join(parts[:2])
    return inner if inner in OWN_ROOMS or (parts[0] == "rollout_core" and len(parts) > 1) else parts[0]


def read_house(project: Path = PROJECT) -> House:
    """Of the files as they are now."""
    found = (file for package in PACKAGES for file in (project / package).rglob("*.py"))
    files = {_name(file.relative_to(project)): file for file in found}
    faces = {name: _handed_on(name, file, files) for name, file in files.items() if file.name == "__init__.py"}
    lines, functions, imports = {}, {}, set()
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines[name] = len(text.splitlines())
        functions |= {f"{name}:{node.name}": _num_lines(node) for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}
        for node, function in _imports(tree, None):
            for imported in _targets(node, files, faces):
                if imported != name and imported not in faces:
                    imports.add(Import(name, imported, function))
    return House(lines, frozenset(imports), functions)


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _name(file: Path) -> str:
    return ".".join(file.parent.parts if file.stem == "__init__" else file.with_suffix("").parts)


def _handed_on(name: str, face: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Of the names that a package hands on, from its stub if it has one: the modules where they are."""
    text = face.with_suffix(".pyi" if face.with_suffix(".pyi").exists() else ".py").read_text(encoding="utf-8")
    names = {}
    for node, _ in _imports(ast.parse(text), None):
        if isinstance(node, ast.ImportFrom):
            module = f"{name}.{node.module}" if node.level else str(node.module)
            names |= {alias.name: module for alias in node.names if module in files}
    return names


def _imports(node: ast.AST, function: str | None) -> Iterator[tuple[ast.Import | ast.ImportFrom, str | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, function
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        else:
            yield from _imports(child, child.name if isinstance(child, FUNCTIONS) and function is None else function)


def _targets(
    node: ast.Import | ast.ImportFrom, files: Mapping[str, Path], faces: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in files)
    elif node.module is not None and node.module in files:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in files else faces.get(node.module, {}).get(alias.name, node.module)


def measures(project: Path = PROJECT) -> dict[str, str]:
    """Figures by which one sees whether the house is still the one that was planned; none of them is a limit."""
    house = read_house(project)
    files = {
        file: file.read_text(encoding="utf-8") for package in PACKAGES for file in (project / package).rglob("*.py")
    }
    stages = [file for file in files if file.parent == project / "tasks"]
    flows = {file.name: len(files[file].splitlines()) for file in files if file.parent == project / "flows"}
    inside = sum(_lines_of_stages(files[file]) for file in stages)
    whole = sum(len(files[file].splitlines()) for file in stages)
    stems = Counter(file.stem for file in {(file.parent, file.stem): file for file in files}.values())
    shared = sum(number > 1 for stem, number in stems.items() if stem != "__init__")
    statements = {(item.importer, item.imported, item.function) for item in house.inside_functions()}
    loose = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (project / "tests").glob("*.py"))
    return {
        "product lines": f"{sum(house.lines.values()):,} in {len(house.lines)} files",
        "share of the files of tasks/ inside stages": f"{inside / whole:.0%} of {whole:,} lines",
        "files of flows/": f"{sum(flows.values()):,} lines, the longest {max(flows.values())}",
        "imports inside functions": str(len(statements)),
        "circles": " -> ".join(house.circle()) or "none",
        "file names in several folders": str(shared),
        "files that speak of promotion": str(
            sum("promot" in text.lower().replace("promote_types", "") for text in files.values())
        ),
        "lines of tests in no folder": f"{loose:,}",
    }


def _lines_of_stages(text: str) -> int:
    """Of functions under ``@stage``, decorators included."""
    found = 0
    for node in ast.parse(text).body:
        if isinstance(node, FUNCTIONS) and any("stage(" in ast.unparse(one) for one in node.decorator_list):
            found += (node.end_lineno or node.lineno) - node.decorator_list[0].lineno + 1
    return found


def main() -> None:
    """Print the plan and the measures."""
    house = read_house()
    for what, sizes in (("files", house.lines), ("functions", house.functions)):
        longest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        print(f"longest {what}: {', '.join(f'{name} {sizes[name]}' for name in longest)}")
    for room, floor in sorted(house.floors().items(), key=lambda item: (-item[1], item[0])):
        num_lines = sum(lines for module, lines in house.lines.items() if room_of(module) == room)
        print(f"floor {floor:2}  {room:26} {num_lines:6,} lines")
    for name, value in measures().items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
