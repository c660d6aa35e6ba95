"""Cost of the tools of an environment: opening and closing a toolbox, the first call of Python, calls after it, and
episodes a second, many at a time.

Run: python benchmarks/tools.py [--quick]
"""

import asyncio
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from harness import Figures, quick_asked

EPISODES_AT_A_TIME = 50


async def median_ms(call: Callable[[], Awaitable[object]], rounds: int) -> float:
    """Of so many calls, one after another."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


async def measure(figures: Figures, base: Path, *, rounds: int) -> None:
    """All rows."""
    from rollout_core.config.tools import FilesTool, HttpTool, PythonTool, SearchTool, ShellTool, SqlTool
    from rollout_core.environments.tools.toolbox import Toolbox, ToolResources

    (base / "corpus.txt").write_text(
        "\n\n".join(f"Paragraph {number} is about word{number % 997}." for number in range(20_000))
    )
    with sqlite3.connect(base / "shop.db") as connection:
        connection.execute("create table items (price)")
        connection.executemany("insert into items values (?)", [(number,) for number in range(1000)])
    connection.close()
    light = (
        FilesTool(),
        HttpTool(hosts=("example.org",)),
        SearchTool(corpus=("corpus.txt",)),
        SqlTool(database="shop.db"),
    )
    tools = (*light, PythonTool(), PythonTool(name="fresh", keeps_state=False), ShellTool(commands="any"))
    folder = base / "episode"
    folder.mkdir()
    resources = {one: ToolResources(one, index_folder=base, base=base) for one in (light, tools)}

    async def opened() -> None:
        async with Toolbox(light, folder, resources=resources[light]):
            pass

    async def started() -> None:
        async with Toolbox(tools, folder, resources=resources[tools]) as box:
            await box.call("python", {"code": "1"})

    figures.add("open and close a toolbox without programs", f"{await median_ms(opened, 20 * rounds):.2f} ms")
    await started()
    figures.add("open, python's first call, close", f"{await median_ms(started, rounds):.0f} ms")
    async with Toolbox(tools, folder, resources=resources[tools]) as box:
        calls = {
            "python, a call after it": ("python", {"code": "1 + 1"}),
            "python without state, a call": ("fresh", {"code": "1 + 1"}),
            "shell, a call": ("shell", {"command": "echo 1"}),
            "files, a read": ("files", {"action": "read", "path": "a"}),
            "search in 20,000 paragraphs": ("search", {"query": "word17"}),
            "sql, a sum of 1,000 rows": ("sql", {"query": "select sum(price) from items"}),
        }
        await box.call("files", {"action": "write", "path": "a", "content": "text"})
        for what, (name, arguments) in calls.items():
            await box.call(name, arguments)
            taken = await median_ms(lambda name=name, arguments=arguments: box.call(name, arguments), rounds)
            figures.add(what, f"{taken:.1f} ms")

    async def episode(number: int) -> None:
        own = base / f"episode-{number}"
        own.mkdir()
        async with Toolbox(tools, own, resources=resources[tools]) as box:
            for step in range(4):
                await box.call("python", {"code": f"x = {step}\nopen('x', 'w').write(str(x))"})

    began = time.perf_counter()
    await asyncio.gather(*map(episode, range(EPISODES_AT_A_TIME)))
    seconds = time.perf_counter() - began
    figures.add(
        f"episodes a second, {EPISODES_AT_A_TIME} at a time, of 4 calls of python each",
        f"{EPISODES_AT_A_TIME / seconds:.0f}",
    )
    for one in resources.values():
        one.close()


def main() -> None:
    """Measure and print."""
    rounds = 3 if quick_asked(__doc__) else 30
    figures = Figures("tools of an environment")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(figures, Path(folder), rounds=rounds))
    figures.show()


if __name__ == "__main__":
    main()
