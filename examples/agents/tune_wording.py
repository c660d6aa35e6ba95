"""Tune the wording of the look-up agent's question, with a stand-in for the critic's endpoint.

The agent, its model and its rewards are real: the model was taught one wording and answers others badly, so templates
earn what they deserve. What is made up is who rewrites them. A search like this is run with a strong model as critic
and editor; here a small server speaks for both, so that the example needs no key. It reads nothing of what agents said
and only tries other words, so all that is learnt is learnt from the rewards. Put your own endpoint into [critic] of
tune-wording.toml, and run `rollout agent tune --config examples/agents/tune-wording.toml` without this script.

Run: python examples/agents/make_lookup.py && python examples/agents/tune_wording.py [OPTIONS OF rollout agent tune]
"""

from __future__ import annotations

import http.server
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from make_lookup import make_tasks

CONFIG = Path(__file__).with_name("tune-wording.toml")
TASKS = Path("data/wording")
PORT = 8973
"""That of the configuration: it is part of what cached answers are known by."""
SEED = 29
NUM_TASKS, NUM_HELD_OUT = 128, 128
WORDS = (
    ("Tell me the", "Give me the", "Look up the", "What is the"),
    ("} that belongs to {", "} for {", "} of {"),
    ("}.", "}?"),
)
"""A template has one of each, around and between its placeholders."""


def make_wording_tasks(folder: Path) -> None:
    """Questions about a person's own records, as parts to be worded, for the search and held out from it."""
    rows = [
        {"name": asked[-1].rstrip("?"), "field": asked[3], "records": task["records"], "answer": task["answer"]}
        for task in make_tasks(4 * (NUM_TASKS + NUM_HELD_OUT), random.Random(SEED))
        if "friend" not in (asked := task["question"].split())
    ]
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train.jsonl": rows[:NUM_TASKS], "held-out.jsonl": rows[NUM_TASKS:][:NUM_HELD_OUT]}
    for name, part in parts.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def stand_in_answer(request: dict[str, Any]) -> str:
    """What the stand-in says: a critique that is always the same, or the template with one of its words exchanged, by
    the seed that the search sends."""
    if request["model"] == "stand-in-critic":
        return "The wording may be one that the model does not know. Try another."
    asked = next(message["content"] for message in request["messages"] if message["role"] == "user")
    template = re.search(r"<template>\n(.*?)\n</template>", asked, re.DOTALL)
    assert template is not None, "the search sends one"
    draw = random.Random(request["seed"])
    words = draw.choice(WORDS)
    old = next(word for word in words if word in template[1])
    new = draw.choice([word for word in words if word != old])
    return f"<template>\n{template[1].replace(old, new)}\n</template>"


class _StandIn(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": stand_in_answer(request)}
        answer = {"id": "stand-in", "object": "chat.completion", "created": 0, "model": request["model"]}
        body = json.dumps({**answer, "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def stand_in_critic(port: int = PORT) -> Iterator[str]:
    """The base URL of the stand-in, while the block runs."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _StandIn)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    make_wording_tasks(TASKS)
    rollout = Path(sys.executable).with_name("rollout")
    with stand_in_critic():
        command = [rollout, "agent", "tune", "--config", CONFIG, *sys.argv[1:]]
        sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
