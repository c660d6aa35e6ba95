"""Run the flow: against the Prefect server of PREFECT_API_URL, else against one that is started in data/prefect.

    python examples/make_tiny.py
    cd examples/library
    python -m best_of_n ../../data/example/model ../../data/example/prompts.jsonl

Kill it and run it again: finished stages are cached, and the interrupted one resumes from its last sample or snapshot.
"""

import sys
from pathlib import Path

from tasks.runtime.prefect_server import prefect_server

with prefect_server(Path("data/prefect")):
    # Not at the top: Prefect reads its server's address when it is imported.
    from best_of_n.flow import best_of_n

    model, prompts = sys.argv[1:]
    best_of_n(model, prompts)
