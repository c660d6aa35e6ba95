"""Samples page by page, however many a run made.

A page is read from the place where it begins: lines are found by where they end, and only those that are shown are
decoded. So a page of a million samples costs as much as one of a hundred, after the file that holds it was read once.
A search looks through lines for as long as it may, and says where it stopped.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import orjson

from rollout_core.base.errors import ConfigError, MissingObject, NotFound, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.data.samples import Sample, SampledCompletion
from rollout_core.inference.shards import shard_row
from rollout_core.objects import ObjectStore
from rollout_core.runs.run_records import RunDetail
from rollout_core.runs.run_samples import final_evaluation, sample_sets, shown_prompt

KEPT_BYTES = 256 << 20
"""Of files that were read and may be wanted again; more only where one page needs more."""
_LOOK_AT_CLOCK = 256
"""Lines between two looks at the clock."""


@dataclass(frozen=True)
class SampleFile:
    """Samples that are filed together, by content ids."""

    prompts: ContentId
    completions: ContentId
    num_samples: int
    scores: ContentId | None = None
    parts: ContentId | None = None
    """Of the rewards of a composite, as of `Scores`."""
    judged: ContentId | None = None
    """What judges said, as of `Scores`."""
    is_shard: bool = False
    """``prompts`` are rows of a batch, each of which has the same number of completions."""

    @property
    def blobs(self) -> tuple[ContentId | None, ...]:
        """What is read to show it."""
        return self.prompts, self.completions, self.scores


@dataclass(frozen=True)
class SampleList:
    """Samples of a run that belong together."""

    label: str
    is_held_out: bool
    files: tuple[SampleFile, ...]
    num_samples: int
    mean: float | None
    """Reward; None where nothing was scored."""
    model: ContentId | None
    """That made them."""

    def file_of(self, number: int) -> tuple[SampleFile, int]:
        """The file of a sample, and its place there. Raises NotFound."""
        place = number
        for file in self.files:
            if 0 <= place < file.num_samples:
                return file, place
            place -= file.num_samples
        raise NotFound(f"{self.label!r} has no sample {number}; expected 0 to {self.num_samples - 1}")


@dataclass(frozen=True)
class SampleView:
    """One sample as it is shown. Its prompt is text."""

    number: int
    """Its place in the list, from 0."""
    id: ContentId
    """Also of its rollout."""
    prompt: str
    completion: str
    reward: float
    """NaN where there is none."""
    finish_reason: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    written: Sequence[Sequence[int]] | None = None
    model_ids: Sequence[str] = ()
    """Of each range of ``written``, the weights that drew it, where these differ among samples."""
    error: str | None = None
    prompt_token_ids: Sequence[int] = ()

    @property
    def drawn_by(self) -> list[tuple[int, int, str]]:
        """First and last token and the weights that drew them, where the sample itself names any."""
        parts = zip(self.written or (), self.model_ids, strict=False)
        return [(first, end - 1, model) for (first, end), model in parts]


@dataclass(frozen=True)
class Search:
    """What samples are to be like."""

    text: str = ""
    """In prompt or completion, case and all."""
    below: float | None = None
    """Their reward."""
    finish_reason: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether all are."""
        return not self.text and self.below is None and not self.finish_reason


@dataclass(frozen=True)
class SamplePage:
    """Some samples in order."""

    rows: tuple[SampleView, ...]
    next: int | None
    """Where to go on; None at the end."""


def sample_lists(objects: ObjectStore, detail: RunDetail) -> list[SampleList]:
    """All samples that the record of a run names: its `sample_sets`, then the completions of a batch."""
    lists = [
        SampleList(
            each.label,
            each.is_held_out,
            (SampleFile(each.samples, each.completions, each.num_samples, each.scores, each.parts, each.judged),),
            each.num_samples,
            each.mean,
            each.model,
        )
        for each in sample_sets(detail)
    ]
    # A shard that was done again stands in the place of the one before.
    shards = {result["rows"]: result for _, result in detail.results("ShardCompletions")}
    if shards:
        order = _order_of_shards(objects, detail)
        files = tuple(
            SampleFile(ContentId(rows), ContentId(each["completions"]), each["num_samples"], is_shard=True)
            for rows, each in sorted(shards.items(), key=lambda item: order.get(item[0], len(order)))
        )
        model = ContentId(next(iter(shards.values()))["model"])
        lists.append(SampleList("batch", False, files, sum(each.num_samples for each in files), None, model))
    return lists


def _order_of_shards(objects: ObjectStore, detail: RunDetail) -> dict[str, int]:
    """Places of the shards of a batch; none where they are not kept any more."""
    for _, result in detail.results("PromptShards"):
        try:
            return {shard: place for place, shard in enumerate(objects.get_json(result["index"])["shards"])}
        except RolloutError:
            return {}
    return {}


def find_list(lists: Sequence[SampleList], detail: RunDetail, label: str | None) -> SampleList:
    """Of the `sample_lists` of a run the one of this label; without a label that of its final evaluation, else the
    last. Raises ConfigError."""
    if not lists:
        raise ConfigError("the record of this run names no samples; expected a run that generates or evaluates")
    final = final_evaluation(detail)
    label = label or (lists[-1].label if final is None else final.label)
    found = [each for each in lists if each.label == label]
    if not found:
        raise ConfigError(f"no samples are labelled {label!r}; expected one of {[each.label for each in lists]}")
    return found[-1]


class Lines:
    """Lines of a file by number."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        self._ends = ends if not data or data.endswith(b"\n") else np.append(ends, len(data))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> bytes:
        begin = int(self._ends[number - 1]) + 1 if number else 0
        return self._data[begin : int(self._ends[number])]

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return len(self._data) + self._ends.nbytes


@dataclass
class _Known:
    """What was read of a file, and may be wanted again."""

    value: Any
    size: int


@dataclass(frozen=True)
class _OpenFile:
    """A file of samples, read."""

    of: SampleFile
    completions: Lines
    prompts: Lines
    scores: np.ndarray | None
    """[samples] float64; NaN where there is none."""
    place_of: dict[str, int] = field(default_factory=dict)
    """Of prompts by their samples' ids, where samples were left out, and so the places differ."""

    def prompt_line(self, number: int, sample: str) -> bytes:
        """Of the sample of this id, whose completion has that number."""
        if self.of.is_shard:
            return self.prompts[number * len(self.prompts) // len(self.completions)]
        place = self.place_of.get(sample, -1) if self.place_of else number
        return self.prompts[place] if 0 <= place < len(self.prompts) else b""


class SampleBrowser:
    """Reads the samples of an object store. For any number of threads; files are read one at a time."""

    def __init__(self, objects: ObjectStore, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._objects, self._kept_bytes = objects, kept_bytes
        self._known: OrderedDict[tuple[str, ContentId], _Known] = OrderedDict()
        self._reading = Lock()

    def page(self, of: SampleList, search: Search, *, start: int, limit: int, seconds: float) -> SamplePage:
        """Samples from number ``start`` on that are as ``search`` says: at most ``limit``, and those that were found
        within ``seconds``. Raises NotFound where they are not kept any more."""
        deadline, rows = time.monotonic() + seconds, []
        for number, view in self._matches(of, search, start):
            if view is not None:
                rows.append(view)
            if len(rows) == limit or time.monotonic() > deadline:
                return SamplePage(tuple(rows), number + 1 if number + 1 < of.num_samples else None)
        return SamplePage(tuple(rows), None)

    def sample(self, of: SampleList, number: int) -> SampleView:
        """One sample, with the parts of its reward. Raises NotFound."""
        page = self.page(of, Search(), start=number, limit=1, seconds=0)
        if not page.rows:
            of.file_of(number)  # which says what there is
            raise NotFound(f"{of.label!r} has no sample {number} any more")
        return page.rows[0]

    def ids(self, blob: ContentId, key: str = "id", *, needed_with: SampleFile | None = None) -> list[str]:
        """What stands under ``key`` in each line of a file, in order; of samples, rollout ids. ``needed_with``
        are samples that the same page needs."""
        in_use = () if needed_with is None else needed_with.blobs
        return self.read(
            blob, f"ids {key}", lambda data: [orjson.loads(line)[key] for line in data.splitlines()], in_use
        )

    def rewards(self, of: SampleFile) -> dict[str, float]:
        """By id; without those that are none."""
        scores = self._scores(of)
        if scores is None:
            return {}
        pairs = zip(self.ids(of.completions, needed_with=of), scores.tolist(), strict=False)
        return {sample: score for sample, score in pairs if score == score}

    def _matches(self, of: SampleList, search: Search, start: int) -> Iterator[tuple[int, SampleView | None]]:
        """Numbers that were looked at, with what matches; now and then one with nothing."""
        first = 0
        for each in of.files:
            if first + each.num_samples > start:
                try:
                    opened = self._open(each)
                except MissingObject as error:
                    raise NotFound(
                        f"the samples {of.label!r} are not in {self._objects.url} any more (object "
                        f"{error.content_id[:12]} is gone): housekeeping keeps them for `result_days` after their last "
                        "use"
                    ) from error
                for local, view in _looked_through(opened, search, max(0, start - first), first):
                    yield first + local, view
                if len(opened.completions):
                    yield first + len(opened.completions) - 1, None
            first += each.num_samples

    def _open(self, of: SampleFile) -> _OpenFile:
        completions = self.read(of.completions, "lines", Lines, of.blobs)
        prompts = self.read(of.prompts, "lines", Lines, of.blobs)
        places: dict[str, int] = {}
        if not of.is_shard and len(prompts) != len(completions):
            places = self.read(of.prompts, "places", _places, of.blobs)
        return _OpenFile(of, completions, prompts, self._scores(of), places)

    def _scores(self, of: SampleFile) -> np.ndarray | None:
        return None if of.scores is None else self.read(of.scores, "scores", _scores, of.blobs)

    def read(
        self, blob: ContentId, form: str, make: Callable[[bytes], Any], in_use: Collection[ContentId | None] = ()
    ) -> Any:
        """What ``make`` makes of a file, kept for the next page; ``in_use`` are files that this one needs too."""
        with self._reading:
            key = form, blob
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key].value
            data = self._objects.get_bytes(blob)
            value = make(data)
            self._known[key] = _Known(value, _size_of(value, data))
            surplus = sum(each.size for each in self._known.values()) - self._kept_bytes
            for old in [old for old in self._known if old[1] != blob and old[1] not in in_use]:
                if surplus <= 0:
                    break
                surplus -= self._known.pop(old).size
            return value

    def reward_parts(self, of: SampleList, number: int) -> tuple[tuple[str, float, float | None], ...]:
        """Name, weight and value of the parts of a sample's reward; none where it has none, or they are gone."""
        file, place = of.file_of(number)
        if file.parts is None:
            return ()
        try:
            found = self.read(file.parts, "parts", orjson.loads, file.blobs)
        except MissingObject:
            return ()
        values = found["values"][place] or [None] * len(found["names"])
        return tuple(zip(found["names"], found["weights"], values, strict=True))

    def verdicts(self, of: SampleList, number: int) -> tuple[tuple[str, float | None, str], ...]:
        """Judge, value and reasoning of each answer about a sample, and what a person says of it; none where no judge
        was asked, or they are gone."""
        file, place = of.file_of(number)
        if file.judged is None:
            return ()
        try:
            found = self.read(file.judged, "verdicts", orjson.loads, file.blobs)
        except MissingObject:
            return ()
        given = [verdict for judgement in found for verdict in judgement["verdicts"][place]]
        people = [human[place] for judgement in found if (human := judgement.get("human")) is not None]
        return (
            *((verdict["judge"], verdict["value"], verdict["reasoning"]) for verdict in given),
            *(("a person", value, "") for value in people if value is not None),
        )

    def matching(self, of: SampleList, search: Search, *, start: int = 0) -> Iterator[SampleView]:
        """All samples from number ``start`` on that are as ``search`` says, read file by file. Raises NotFound where
        they are not kept any more."""
        return (view for _, view in self._matches(of, search, start) if view is not None)


def _size_of(value: Any, data: bytes) -> int:
    """Bytes of memory, roughly; ids in a list have some 120 each."""
    return 120 * len(value) if isinstance(value, list) else getattr(value, "num_bytes", len(data))


def _places(data: bytes) -> dict[str, int]:
    return {orjson.loads(line)["id"]: place for place, line in enumerate(data.splitlines())}


def _scores(data: bytes) -> np.ndarray:
    return np.array(json.loads(data), dtype=np.float64)


def _looked_through(
    opened: _OpenFile, search: Search, start: int, first: int
) -> Iterator[tuple[int, SampleView | None]]:
    """Local numbers with what matches."""
    count, scores = len(opened.completions), opened.scores
    places: Any = range(start, count)
    if search.below is not None:
        places = [] if scores is None else start + np.flatnonzero(scores[start:] < search.below)
    needles = _needles(search.text)
    reason = b'"finish_reason":%s' % orjson.dumps(search.finish_reason) if search.finish_reason else b""
    for looked, place in enumerate(map(int, places)):
        if needles or reason:
            if looked % _LOOK_AT_CLOCK == _LOOK_AT_CLOCK - 1:
                yield place - 1, None
            line = opened.completions[place]
            if reason not in line:
                continue
            if needles and not any(needle in line for needle in needles):
                # The id is only needed where places differ.
                sample = orjson.loads(line)["id"] if opened.place_of else ""
                prompt = opened.prompt_line(place, sample)
                if not any(needle in prompt for needle in needles):
                    continue
        view = _view(opened, place, first)
        is_like_that = not search.text or search.text in view.prompt or search.text in view.completion
        yield place, view if is_like_that else None


def _needles(text: str) -> tuple[bytes, ...]:
    """How a text may stand in JSON."""
    if not text:
        return ()
    return tuple({orjson.dumps(text)[1:-1], json.dumps(text)[1:-1].encode()})


def _view(opened: _OpenFile, place: int, first: int) -> SampleView:
    row = orjson.loads(opened.completions[place])
    known = {name: row[name] for name in SampledCompletion.__dataclass_fields__ if name in row}
    completion = SampledCompletion(**known)
    line = opened.prompt_line(place, completion.id)
    prompt_token_ids: Sequence[int] = ()
    if opened.of.is_shard:
        given = shard_row(line).row
        prompt = given.prompt if given.prompt is not None else [each.document() for each in given.messages or ()]
    else:
        sample = Sample(**orjson.loads(line)) if line else None
        prompt = ""
        if sample is not None and sample.id == completion.id:
            prompt, prompt_token_ids = sample.prompt, sample.prompt_token_ids
    score = float("nan") if opened.scores is None else float(opened.scores[place])
    return SampleView(
        number=first + place,
        id=completion.id,
        prompt=shown_prompt(prompt),
        completion=completion.text,
        reward=score,
        finish_reason=completion.finish_reason,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        top_logprobs=completion.top_logprobs or (),
        written=completion.written,
        model_ids=completion.model_ids or (),
        error=completion.error,
        prompt_token_ids=prompt_token_ids,
    )
