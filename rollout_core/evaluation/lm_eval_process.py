"""What lm-evaluation-harness does for a suite: it makes the requests of tasks, and metrics of the answers to them.

It runs in a process of its own (`rollout_core.base.isolation`), by any Python that has lm_eval: so nothing is imported
here that such a Python may lack.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import json
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import handle_non_serializable

from rollout_core.base.errors import ConfigError

RANDOM_SEED, NUMPY_SEED = 0, 1234
"""As lm_eval's own command sets them."""
MOST_CHARACTERS = 500
"""Of what an error says."""
ROW_KEYS = ("dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset")
"""Where a task's rows are: requests have their content."""
FILE_KEY = "config_source"
"""Of a task's metadata: its file."""


def handle(given: dict[str, Any], report: Callable[[int], None]) -> dict[str, Any]:
    """The requests of the tasks; where ``given`` has ``answers`` to them, what these come to. Raises ConfigError."""
    os.chdir(given["folder"])
    loaded = _loaded(given)
    source = _source(loaded)
    ledger = _Ledger(given["requests"], given["answers"])
    if given["answers"] is None:
        for task in loaded["tasks"].values():
            task.apply_filters = _stop
    random.seed(RANDOM_SEED)
    numpy.random.seed(NUMPY_SEED)
    options = ("limit", "bootstrap_iters", "system_instruction", "apply_chat_template", "fewshot_as_multiturn")
    chosen = {name: given[name] for name in (*options, "confirm_run_unsafe_code")}
    try:
        found = evaluator.evaluate(ledger, loaded, log_samples=True, **chosen)
    except _AllAsked:
        about = {"metrics": _metrics(loaded), "groups": _groups(loaded)}
        return {"version": version("lm_eval"), "requests": ledger.requests, "source": source, **about}
    except ConfigError:
        raise
    except Exception as error:  # whatever a task's own code raises
        raise ConfigError(f"lm_eval: {_line(error)}") from error
    assert found is not None, "this is rank 0"
    samples = found.pop("samples")
    del found["configs"]  # which hold functions
    return {"questions": _questions(samples), "found": _plain(found), "source": source}


class _AllAsked(Exception):
    """Every request was noted, and nothing is to be scored."""


def _stop() -> None:
    raise _AllAsked


def _loaded(given: dict[str, Any]) -> Any:
    """The tasks, changed as lm_eval's own command does it."""
    names: list[str] = given["tasks"]
    try:
        options = {"include_path": given["include_path"], "metadata": given["metadata"]}
        manager = TaskManager(include_defaults=False, **options)
        if not _knows_all(manager, names):
            manager = TaskManager(**options)  # which reads some ten thousand files
        unknown = [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]
        loaded = None if unknown else manager.load(names)
    except Exception as error:  # whatever a task's file, its code or its data set raise
        raise ConfigError(f"tasks cannot be loaded: {_line(error)}") from error
    if loaded is None:
        close = difflib.get_close_matches(unknown[0], manager.all_tasks, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "`lm_eval ls tasks` lists those that it knows"
        raise ConfigError(f"task {unknown[0]!r} is neither known to lm_eval nor a file; {hint}")
    for task in loaded["tasks"].values():
        if given["gen_kwargs"] and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value=given["gen_kwargs"], update=True)
        own = task.get_config("num_fewshot")
        if own is None or (given["num_fewshot"] is not None and own != 0):
            task.set_config(key="num_fewshot", value=given["num_fewshot"] or 0)
        task.set_fewshot_seed(seed=given["fewshot_random_seed"])
    return loaded


def _metrics(loaded: Any) -> dict[str, list[str]]:
    """Of tasks: the metrics with their filters, as in results."""
    return {
        name: [f"{metric},{each.name}" for metric in task.higher_is_better() for each in task._filters]
        for name, task in loaded["tasks"].items()
    }


def _groups(loaded: Any) -> dict[str, list[dict[str, Any]]]:
    """Of groups: the metrics with their filters, the tasks whose figures each is the mean of, and whether tasks weigh
    by their questions."""
    metrics, found = _metrics(loaded), {}
    for name, group in loaded["groups"].items():
        tasks = [task.task_name for task in group.get_all_tasks()]
        found[name] = [
            {"metric": metric, "tasks": of, "by_size": entry.weight_by_size}
            for entry in group.aggregate_metric_list or ()
            for metric in dict.fromkeys(metric for task in tasks for metric in metrics[task])
            if metric.rpartition(",")[0] == entry.metric
            and (entry.filter_list is None or metric.rpartition(",")[2] in entry.filter_list)
            and (of := [task for task in tasks if metric in metrics[task]])
        ]
    return found


def _source(loaded: Any) -> str:
    """A hash of what defines tasks and groups: their settings, whichever files these come from, and the text of the
    code that they name."""
    code: set[str] = set()
    tasks = {
        name: [_told(type(task), code), _told(task.config, code, without=ROW_KEYS)]
        for name, task in loaded["tasks"].items()
    }
    groups = {
        name: [group.child_names, _told(group.aggregate_metric_list, code)] for name, group in loaded["groups"].items()
    }
    texts = sorted(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in code)
    return hashlib.sha256(json.dumps([tasks, groups, texts], sort_keys=True).encode()).hexdigest()


def _told(value: Any, code: set[str], without: Sequence[str] = ()) -> Any:
    """Settings as JSON, the same in every process; files of code that they name are added to ``code``."""
    if isinstance(value, type) or inspect.isroutine(value):
        module = inspect.getmodule(value)
        if module is not None and module.__name__ in sys.modules:
            _add_code(module, Path(getattr(module, "__file__", None) or "").parent, code)
        return ["code", value.__qualname__]
    if isinstance(value, functools.partial):
        return [_told(part, code) for part in (value.func, value.args, value.keywords)]
    if is_dataclass(value):  # before mappings: TaskConfig is an empty one, too
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _told(item, code) for key, item in value.items() if key not in (*without, FILE_KEY)}
    if isinstance(value, list | tuple):
        return [_told(item, code) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_told(item, code) for item in value), key=json.dumps)
    if type(value).__repr__ is object.__repr__:  # which has an address
        return _told(type(value), code)
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


def _add_code(module: ModuleType, folder: Path, code: set[str]) -> None:
    """The module's file, and those that it uses of the same folder; what is installed elsewhere has a version."""
    file = getattr(module, "__file__", None)
    if file is None or file in code or not Path(file).is_relative_to(folder):
        return
    if "site-packages" in Path(file).relative_to(folder).parts or not file.endswith(".py"):
        return
    code.add(file)
    for used in list(vars(module).values()):
        if isinstance(used, type) or inspect.isroutine(used):
            used = sys.modules.get(used.__module__ or "")
        if isinstance(used, ModuleType):
            _add_code(used, folder, code)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_CHARACTERS]}"


def _knows_all(manager: TaskManager, names: list[str]) -> bool:
    """Whether these tasks, and those that groups name, are all among one's own."""
    files = [load_yaml(name, resolve_func=False) for name in names if Path(name).is_file()]
    groups = [*files, *(entry.cfg or {} for entry in manager.task_index.values())]
    children = [child for group in groups if isinstance(group.get("task"), list) for child in group["task"]]
    asked = [name for name in names if not Path(name).is_file()]
    asked += [child if isinstance(child, str) else child.get("task", "") for child in children]
    return all(name in manager.task_index for name in asked if isinstance(name, str))


class _Ledger(LM):
    """A model whose answers are there already; without answers it notes what is asked."""

    def __init__(self, requests: list[dict[str, Any]] | None, answers: list[list[Any]] | None) -> None:
        super().__init__()
        self.requests: list[dict[str, Any]] = []
        self._expected, self._answers = requests, answers

    @property
    def tokenizer_name(self) -> str:
        """Of no model: prompts are the same for each."""
        return ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation itself, which is rendered where the model is."""
        return json.dumps(chat_history)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts."""
        return self._answered("generate_until", requests, "")

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of continuations."""
        return [tuple(answer) for answer in self._answered("loglikelihood", requests, (0.0, False))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts."""
        return self._answered("loglikelihood_rolling", requests, 0.0)

    def _answered(self, kind: str, instances: Sequence[Instance], nothing: Any) -> list[Any]:
        found: list[Any] = []
        for _, same in groupby(instances, key=id):  # copies of one stand side by side
            copies = list(same)
            noted = _noted(kind, copies[0], len(copies))
            place = len(self.requests)
            self.requests.append(noted)
            if self._answers is None or self._expected is None:
                found += [nothing] * len(copies)
            elif place >= len(self._expected) or self._expected[place] != noted:
                raise ConfigError("the tasks ask something else than when their prompts were made; start the run again")
            else:
                found += self._answers[place]
        return found


def _noted(kind: str, instance: Instance, copies: int) -> dict[str, Any]:
    arguments: tuple[Any, ...] = instance.args
    document = json.dumps(instance.doc, sort_keys=True, default=handle_non_serializable)
    noted = {
        "kind": kind,
        "task": instance.task_name,
        "doc": instance.doc_id,
        "doc_hash": hashlib.sha256(document.encode()).hexdigest(),
        "index": instance.idx,
        "samples": copies,
        "context": arguments[0],
    }
    if kind == "generate_until":
        return noted | {"generation": _plain(normalize_gen_kwargs(arguments[1]))}
    return noted | ({"continuation": arguments[1]} if kind == "loglikelihood" else {})


def _questions(samples: Any) -> list[dict[str, Any]]:
    """What each question came to, by metric and filter."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for task, examples in samples.items():
        for example in examples:
            values = found.setdefault((task, example["doc_id"]), {})
            for metric in example["metrics"]:
                value = example[metric]
                if isinstance(value, int | float | numpy.number | numpy.bool_) and math.isfinite(value):
                    values[f"{metric},{example['filter']}"] = float(value)
    return [{"task": task, "doc": doc, "values": values} for (task, doc), values in found.items()]


def _plain(value: Any) -> Any:
    """As JSON has it, without numbers that it has not."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
