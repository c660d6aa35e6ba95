"""Tasks of lm-evaluation-harness on rows of a test's own folder: one file a task."""

from __future__ import annotations

import json
from pathlib import Path

ROWS = [
    {"question": f"sort {n} 1", "answer": f"1 {n}", "choices": [f"1 {n}", f"{n} 1", "2"], "gold": 0, "any": ["2", "1"]}
    for n in range(2, 8)
]
HEAD = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{train: "{folder}/rows.jsonl", test: "{folder}/rows.jsonl"}}
training_split: train
test_split: test
fewshot_split: train
doc_to_text: "{{{{question}}}} ="
metadata: {{version: 1.0}}
"""
TASKS = {
    "sums": """
output_type: generate_until
doc_to_target: "{{answer}}"
num_fewshot: 2
fewshot_delimiter: " "
generation_kwargs: {until: [","], max_gen_toks: 8}
filter_list:
  - name: strict
    filter: [{function: regex, regex_pattern: "^ *([0-9 ]+)$"}, {function: take_first}]
  - name: flexible
    filter: [{function: regex, regex_pattern: "([0-9])", group_select: -1}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}
""",
    "repeated": """
output_type: generate_until
doc_to_target: "{{answer}}"
repeats: 3
generation_kwargs: {do_sample: true, temperature: 0.8, top_p: 0.9, max_gen_toks: 4, until: []}
filter_list:
  - name: majority
    filter: [{function: majority_vote}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "translated": """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list:
  - {metric: bleu, aggregation: bleu, higher_is_better: true}
  - {metric: chrf, aggregation: chrf, higher_is_better: true}
""",
    "several": """
output_type: generate_until
doc_to_target: any
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "chosen": """
output_type: multiple_choice
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "told": """
output_type: loglikelihood
doc_to_target: " {{answer}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} = {{answer}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
}
GROUP = """
group: all_sums
task: [sums, several]
aggregate_metric_list:
  - {metric: exact_match, aggregation: mean, weight_by_size: true, filter_list: [strict, none]}
"""


def write_tasks(folder: Path) -> Path:
    """The rows, and a file for each task and the group."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in TASKS.items():
        head = HEAD.format(name=name, folder=folder)
        own = {line.partition(":")[0] for line in text.splitlines()}
        kept = [line for line in head.splitlines() if line.partition(":")[0] not in own]
        (folder / f"{name}.yaml").write_text("\n".join(kept) + text)
    (folder / "all_sums.yaml").write_text(GROUP)
    return folder
