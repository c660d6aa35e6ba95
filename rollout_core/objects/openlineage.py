"""Lineage as events of OpenLineage, which data catalogues read; made by its own library, an extra.

https://openlineage.io/docs/spec/object-model
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from uuid import UUID

from rollout_core import DISTRIBUTION, __version__
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.objects.lineage import Lineage, by_output, maker_for
from rollout_core.objects.origins import Imported, Source

try:
    from openlineage.client import facet_v2 as facets
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.serde import Serde
except ImportError as error:
    raise ConfigError(f"OpenLineage needs a package: pip install '{DISTRIBUTION}[openlineage]'") from error

NAMESPACE = "rollout"
"""Of stages, and of content: an id names the same bytes wherever they are stored."""
PRODUCER = f"urn:{DISTRIBUTION}:{__version__}"
facets.set_producer(PRODUCER)  # of all facets


def events(found: Sequence[Lineage], imports: Sequence[Imported] = ()) -> Iterator[str]:
    """A line of JSON for each stage, the oldest first: that it completed, what it took and what it made.

    Data sets are content ids. Of content that several of these stages made, they are the id and the beginning of the
    key of the stage's call, as catalogues draw a line from all that made a data set to all that took it. What was
    brought in from elsewhere has its addresses as symbolic links. Settings of a stage are parameters of its run, whose
    id is made of the stage's key and time: the same record gives the same run.
    """
    sources = {item.outputs[0]: item.sources for item in imports}
    makers = by_output(found)
    for lineage in sorted(found, key=lambda one: (one.created_at, one.stage)):
        yield Serde.to_json(_event(lineage, sources, makers))


def _event(
    lineage: Lineage,
    sources: Mapping[ContentId, tuple[Source, ...]],
    makers: Mapping[ContentId, Sequence[Lineage]],
) -> RunEvent:
    def name_of(content: ContentId, maker: Lineage | None) -> str:
        if maker is None or len(makers.get(content, ())) == 1:
            return content
        return f"{content}/{maker.key.short}"

    taken = {
        one: name_of(one, maker_for(lineage, one, makers.get(one, ()), are_all=False)) for one in lineage.inputs_named()
    }
    made = {one: taken.get(one) or name_of(one, lineage) for one in lineage.outputs}
    kind = facets.job_type_job.JobTypeJobFacet("BATCH", "ROLLOUT", "STAGE")
    moment = int(lineage.created_at.timestamp() * 1e6).to_bytes(8, "big")
    return RunEvent(
        eventType=RunState.COMPLETE,
        eventTime=lineage.created_at.isoformat(),
        producer=PRODUCER,
        # As random as a UUID of version 4 has to be, and the same each time.
        run=Run(str(UUID(bytes=bytes.fromhex(lineage.key)[:8] + moment, version=4)), _about_run(lineage)),
        job=Job(NAMESPACE, f"{lineage.stage}/{lineage.version}", {"jobType": kind}),
        inputs=[InputDataset(NAMESPACE, name, facets=_about(one, sources.get(one, ()))) for one, name in taken.items()],
        outputs=[OutputDataset(NAMESPACE, name, facets=_about(one, ())) for one, name in made.items()],
    )


def _about_run(lineage: Lineage) -> dict[str, facets.RunFacet]:
    facts = {**lineage.inputs, **{f"arithmetic.{name}": value for name, value in lineage.arithmetic.items()}}
    facts |= {f"software.{name}": value for name, value in lineage.software.items()}
    parameter = facets.execution_parameters_run.ExecutionParameter
    values = [
        parameter(name, name, value=value if isinstance(value, str) else json.dumps(value, sort_keys=True))
        for name, value in facts.items()
    ]
    engine = facets.processing_engine_run.ProcessingEngineRunFacet(
        lineage.software.get(DISTRIBUTION, __version__), NAMESPACE
    )
    parameters = facets.execution_parameters_run.ExecutionParametersRunFacet(values)
    return {"processing_engine": engine, "executionParameters": parameters}


def _about(content: ContentId, sources: Sequence[Source]) -> dict[str, facets.DatasetFacet]:
    about: dict[str, facets.DatasetFacet] = {
        "version": facets.dataset_version_dataset.DatasetVersionDatasetFacet(content)
    }
    if sources:
        links = [facets.symlinks_dataset.Identifier(*_named(source), source.kind.upper()) for source in sources]
        about["symlinks"] = facets.symlinks_dataset.SymlinksDatasetFacet(links)
    return about


def _named(source: Source) -> tuple[str, str]:
    """Namespace and name of a place, as OpenLineage has them: ``s3://bucket`` and a path, ``file`` and a path."""
    address = source.place or source.address
    scheme, separator, rest = address.partition("://")
    if separator:
        host, _, path = rest.partition("/")
        return (f"{scheme}://{host}", path) if host else ("file", f"/{path}")
    return ("huggingface", source.hub_id) if source.hub_id and not address.startswith("/") else ("file", address)
