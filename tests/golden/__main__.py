"""``python -m tests.golden [NAME...]`` writes the golden files anew, by default all, and prints what has changed."""

from __future__ import annotations

import argparse

from tests.golden.fence import GOLDENS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    names = [golden.name for golden in GOLDENS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; default: all")
    asked = parser.parse_args().names or names
    if unknown := sorted(set(asked) - set(names)):
        parser.error(f"there is no golden file {unknown[0]!r}; expected one of {', '.join(names)}")
    for golden in GOLDENS:
        if golden.name in asked:
            found = golden.make()
            print("\n".join([f"{golden.file.name}:", *(golden.changes(found) or ["nothing has changed"])]))
            golden.write(found)


if __name__ == "__main__":
    main()
