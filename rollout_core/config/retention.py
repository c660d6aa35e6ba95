"""What housekeeping keeps of an object store in addition to what is in use."""

from __future__ import annotations

from pydantic import Field

from rollout_core.config.base import Settings


class Retention(Settings):
    """What stays. Whatever a run under way has used or made stays in any case, and so do labels given by hand."""

    keep_states: int = Field(default=1, ge=0)
    """Training states: the newest ones of each run name and algorithm, from which training can go on."""
    state_days: float = Field(default=3.0, ge=0)
    """The last training state of each run (of its last update) stays for so long, also where newer runs have others.
    Earlier states of a run go once it has ended."""
    keep_promoted: int = Field(default=5, ge=1)
    """Models: the newest different ones in the history of each resource, with their training states. What was promoted
    before them stays in the history, without its weights."""
    result_days: float = Field(default=14.0, ge=1)
    """Results of stages, with their models and data, stay until no run has used them for so long. A result that is gone
    is computed again by the run that needs it."""
    note_days: float = Field(default=30.0, ge=1)
    """Days for which notes stay that only save work or describe a run, such as the shards of an input; and the lineage
    of what is gone."""
    run_days: float = Field(default=365.0, ge=1)
    """Days for which the records of runs stay, which `rollout runs` and `rollout ui` show, with the figures of their
    steps."""
    completion_days: float = Field(default=14.0, ge=0)
    """Completions that the database names stay for so long after their sample ended."""
    weights_of_inputs: bool = False
    """Keep the weights of every model that something live was made from. Without it such a model keeps its record and
    its data; its weights can be made again from the first inputs, which stay."""
    grace_hours: float = Field(default=24.0, ge=0)
    """Bytes that nothing names stay for so long after they were last written, for whoever is about to name them; at
    least 7, or 0, for when nothing runs: with 0 everything goes at once."""
