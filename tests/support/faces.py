"""What packages offer, by their stubs (`__init__.pyi`). ``python -m tests.support.faces`` finds names that moved."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.structure import PACKAGES, PROJECT


def stubs() -> list[Path]:
    """The stub of every package that has one."""
    return [stub for package in PACKAGES for stub in sorted((PROJECT / package).rglob("__init__.pyi"))]


def offered(stub: Path) -> dict[str, str]:
    """Module of each name, relative to the package."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def definitions(package: Path) -> dict[str, list[str]]:
    """Modules of a package, by the names they define at their top."""
    found: dict[str, list[str]] = {}
    for file in sorted(package.rglob("*.py")):
        if file.stem != "__init__":
            module = ".".join(file.relative_to(package).with_suffix("").parts)
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                for name in _defined(node):
                    found.setdefault(name, []).append(module)
    return found


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def relocated(stub: Path) -> str:
    """The stub with every name where it is defined now; one that is defined in several places or none stays."""
    known = definitions(stub.parent)
    modules: dict[str, list[str]] = {}
    for name, module in offered(stub).items():
        places = known.get(name, [])
        modules.setdefault(places[0] if len(places) == 1 else module, []).append(name)
    return "".join(
        f"from .{module} import (\n{''.join(f'    {name} as {name},{chr(10)}' for name in names)})\n"
        for module, names in sorted(modules.items())
    )


def main() -> None:
    """Rewrite all stubs."""
    for stub in stubs():
        stub.write_text(relocated(stub), encoding="utf-8")


if __name__ == "__main__":
    main()
