"""inspect_ai without us, in a process of its own: it sets up logging, signals and event loops of the process it is in.

``python -m tests.evaluation.inspect_alone RESULTS`` reads tasks and answers by conversation as JSON, and writes what
the tasks come to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from inspect_ai import eval as inspect_eval
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import value_to_float

from rollout_core.evaluation import inspect_process


def main(results: str) -> None:
    given = json.load(sys.stdin)

    def answer(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        body = inspect_process._body(messages, [], "none", GenerateConfig())
        [(text, reason), *_] = given["answers"][json.dumps(body["messages"], sort_keys=True)]
        output = ModelOutput.from_content("mockllm", text, "stop" if reason == "stop" else "max_tokens")
        output.usage = ModelUsage()  # or it is counted by a tokenizer from the network
        return output

    model = get_model("mockllm/model", custom_outputs=answer, memoize=False)
    options: dict[str, Any] = {"display": "none", "ctl_server": False, "log_realtime": False}
    options["log_dir"] = str(Path(results).parent)
    logs = [inspect_eval(task, model=model, **options)[0] for task in given["tasks"]]
    found = []
    for log in logs:
        assert log.status == "success" and log.results is not None, log.error
        [reduction, *_] = log.reductions or ()
        values = {str(each.sample_id): each.value for each in reduction.samples if not isinstance(each.value, dict)}
        found.append(
            {
                "figures": [
                    [score.name, name, metric.value]
                    for score in log.results.scores
                    for name, metric in score.metrics.items()
                ],
                "values": {name: value_to_float()(value) for name, value in values.items()},
            }
        )
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
