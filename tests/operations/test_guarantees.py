"""What machines that share stages may rely on, on three real workers: see ``smoke.py``, which is run once for all.

Guarantees of a lease by itself are in ``tests/store/test_leases.py``; docs/operations.md has the table.
"""

from __future__ import annotations

import time

import pytest

from tests.flows.conftest import wait_for
from tests.operations.smoke import FENCED_WITHIN_SECONDS, NUM_STAGES, WAITS, WORKERS, Made, Outcome, run, show
from tests.store.postgres import PostgresServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def outcome(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("smoke"))


def test_a_lease_has_a_single_winner(outcome: Outcome):
    assert outcome.computed() == dict.fromkeys(range(NUM_STAGES), 1)
    assert {item: len(workers) for item, workers in outcome.results().items()} == dict.fromkeys(range(NUM_STAGES), 1)


def test_the_epoch_rises_on_a_steal(outcome: Outcome):
    assert outcome.leases[outcome.killed] > 1 and outcome.leases[outcome.stolen] > 1


def test_a_restart_computes_nothing_twice(outcome: Outcome):
    """Of the worker that was killed: begun again is what it was at, by whoever came first, and nothing else."""
    begun = sorted(line["item"] for line in outcome.of("begun"))
    assert begun == sorted([*range(NUM_STAGES), outcome.killed, outcome.stolen])
    assert {line["item"] for line in outcome.of("has", "w1")} == set(range(NUM_STAGES))


def test_a_fenced_writer_ends_within_5_s_and_writes_nothing(outcome: Outcome):
    assert outcome.fenced_seconds <= FENCED_WITHIN_SECONDS
    assert outcome.before is not None and outcome.before == outcome.after
    assert "w2" not in outcome.results()[outcome.stolen]
    assert "the lease of stage share was taken by" in outcome.logs and "ROLLOUT_LEASE_SECONDS" in outcome.logs


def test_three_workers_of_which_one_is_killed_and_one_stolen_from(outcome: Outcome, capsys):
    assert list(outcome.problems()) == []
    assert WAITS in outcome.logs
    show(outcome)
    printed = capsys.readouterr().out
    assert all(f"\n{name}" in printed for name in WORKERS) and f"{NUM_STAGES} computed" in printed


def test_a_database_that_goes_away_stops_nothing(prefect_server: str, monkeypatch: pytest.MonkeyPatch, caplog):
    """Before a stage, and amid one; when it is back, leases are kept again."""
    from prefect import flow

    from tasks.runtime.stage import current_stage, stage

    postgres = PostgresServer()
    monkeypatch.setenv("ROLLOUT_DATABASE", postgres.new_database("away"))
    monkeypatch.setenv("ROLLOUT_LEASE_SECONDS", "2")

    @stage(version=1)
    def persist(number: int) -> Made:
        """Of which the first loses its database, and the second has it back."""
        if number == 1:
            postgres.kill()
            time.sleep(1.5)  # longer than until the next renewal
        if number == 2:
            postgres.start()
            wait_for(lambda: len(epochs()) == 2, "the lease that the stage began without")
        return Made(blob=current_stage().objects.put_bytes(b"%d" % number), worker="this one")

    @flow(name="away", persist_result=False)
    def away() -> list[str]:
        return [persist(number).worker for number in (1, 2, 3)]

    def epochs() -> list[str]:
        return postgres.run_sql("SELECT epoch FROM leases", "away").split()

    try:
        assert away() == ["this one"] * 3
        assert epochs() == ["1", "1", "1"]
    finally:
        postgres.close()
    said = caplog.text
    assert "stage persist continues, and another machine may do the same work" in said
    assert "so persist is computed without a lease" in said
