"""Cost of a stage beyond its work.

A stage is a Prefect task run (server calls, events), a content key, a lock, a result record written and read back, and
lineage; this shows what that adds up to on an otherwise idle machine, computed and cached, beside a bare Prefect task
of the same body. For whole runs in which every stage is cached see ``cached.py``.

Run: python benchmarks/stages.py [--quick]
"""

import time
from collections.abc import Callable

from harness import Figures, own_place, own_server, percentile, quick_asked


def measure_stages(figures: Figures, *, calls: int, rounds: int) -> None:
    """Rows of the cost of one stage."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    from rollout_core.base.ids import ContentId
    from rollout_core.objects.records import Dataset
    from tasks.runtime.stage import current_stage, stage

    @stage(version=1)
    def store_number(number: int) -> Dataset:
        """Store a number."""
        return Dataset(data=current_stage().objects.put_bytes(b"%d" % number), num_rows=number)

    @task(cache_policy=NO_CACHE)
    def bare_task(number: int) -> int:
        return number

    def seconds_of_each(call: Callable[[int], object], first: int) -> list[float]:
        @flow
        def run() -> list[float]:
            seconds = []
            for number in range(first, first + calls):
                started = time.perf_counter()
                call(number)
                seconds.append(time.perf_counter() - started)
            return seconds

        return run()

    def place(number: int) -> ContentId:
        return store_number(number).data

    computed: list[float] = []
    cached: list[float] = []
    bare: list[float] = []
    seconds_of_each(bare_task, 0)
    seconds_of_each(place, 0)
    for number in range(1, rounds + 1):
        bare += seconds_of_each(bare_task, number * calls)
        computed += seconds_of_each(place, number * calls)
        cached += seconds_of_each(place, number * calls)
    for name, seconds in (("computed", computed), ("cached", cached)):
        figures.compare(f"stage {name} / bare Prefect task, a call", seconds, bare, form="{:.4f} s")
        figures.add(f"  95th percentile of a {name} stage", f"{percentile(seconds, 0.95) * 1e3:.1f} ms", rounds=rounds)


def main() -> None:
    quick = quick_asked(__doc__)
    figures = Figures("Stages beyond their work")
    with own_place() as folder, own_server(folder):
        measure_stages(figures, calls=20 if quick else 100, rounds=2 if quick else 5)
    figures.show("Stages that are never cached (import, promote) are computed in every run.")


if __name__ == "__main__":
    main()
