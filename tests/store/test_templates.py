"""Prompt templates that a model has written: what they may use, and that none takes the program's time or memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.base.templates import MAX_CHARACTERS
from rollout_core.store import PromptTemplate

TASK = {"question": "Why?", "hints": ["a", "b"], "count": 2}


def jinja(template: str, **values):
    return PromptTemplate(template=template, engine="jinja").format(**values)


def f_string(template: str, **values):
    return PromptTemplate(template=template, engine="f-string").format(**values)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ task.question }} {{ task['count'] + 1 }}\n", "Why? 3\n"),
        (
            "{% for hint in task.hints %}{{ loop.index }}. {{ hint }}{% if not loop.last %}, {% endif %}{% endfor %}",
            "1. a, 2. b",
        ),
        ("{% for key, value in task.items() %}{{ key }};{% endfor %}", "question;hints;count;"),
        ("{{ task.hints | join(', ') | upper }} {{ task.missing | default('-') }}", "A, B -"),
        ("{% set q = task.question %}{{ q | replace('?', '!') }}{% for n in range(3) %}{{ n }}{% endfor %}", "Why!012"),
        ("{{ 'yes' if task.count in [1, 2] else 'no' }} {{ task.hints | length }} {{ task.question[:2] }}", "yes 2 Wh"),
        ("{{ task.question ~ ' ' ~ task.count }}{{ '|' + task.question }}", "Why? 2|Why?"),
        ("{{ task | tojson }}{# unseen #}", '{"count": 2, "hints": ["a", "b"], "question": "Why?"}'),
    ],
)
def test_what_prompts_need_of_jinja_works(template, rendered):
    assert jinja(template, task=TASK) == rendered


BOMBS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in task %}{% for b in task %}{% for c in task %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 'x' * 1000000000 }}",
    "{{ 10 ** 1000000000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ task | center(1000000000) }}",
    "{{ lipsum(n=1000000) }}",
    "{% set y = task %}" + "{% set y = y ~ y %}" * 30,
    "{% set y = task %}" + "{% set y = y + y %}" * 30,
    "{% set y = task | replace('x', task) %}" + "".join(f"{{% set y{n} = y | upper %}}" for n in range(100)),
    "{{ 'x' + 1 }}",
    "{{ task | join(task) | join(task) | join(task) }}",
    "{{ task | replace('x', task) | replace('x', task) }}",
    "{% set y = task | replace('x', task) %}" * 3 + "{{ y | replace('x', y) }}",
    "{% set x = [task, task] %}{{ x }}",
    "{% set x %}{{ task }}{{ task }}{% endset %}{{ x }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in task recursive %}{{ loop(task) }}{% endfor %}",
    "{{ task | map('center', 1000000000) | list }}",
    "{{ [1, 2] | tojson(indent=1000000000) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ 1.5 | round(1000 * 1000000, 'ceil') }}",
    "{% include 'x' %}",
    "{{ cycler(1) }}{{ namespace() }}",
    "{{ task }}" * 9_000,
    "{{ " + "(" * 50_000 + "1",
    "{% for i in range(99999) %}{{ task | upper | lower | title }}{% endfor %}",
]


@pytest.mark.parametrize("template", BOMBS, ids=range(len(BOMBS)))
def test_no_jinja_template_takes_the_time_or_memory_of_the_program(template):
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(ConfigError, match="template"):
            jinja(template, task="x" * 5_000)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_CHARACTERS
    finally:
        tracemalloc.stop()
    assert time.thread_time() - started < 60


@pytest.mark.parametrize(
    "template",
    ["{task:>1000000000}", "{task:.999999999}", "{task:{width}}", "{task.__class__}", "{task[0]}", "{task}" * 9_000],
)
def test_no_f_string_takes_the_memory_of_the_program(template):
    with pytest.raises(ConfigError, match="template"):
        f_string(template, task="x" * 5_000, width=1_000_000_000)


@pytest.mark.parametrize(
    ("render", "template"),
    [
        (jinja, "{{ task | truncate(1) }}"),
        (jinja, "{{ task | round }}"),
        (f_string, "{hints:5}"),
        (f_string, "{task:d}"),
    ],
)
def test_values_that_a_template_cannot_write_as_it_says_are_its_fault(render, template):
    with pytest.raises(ConfigError, match="the template cannot be rendered"):
        render(template, task="Why so long?", hints=["a"])


def test_formats_of_f_strings_work():
    assert f_string("{score:.2f} {name:>5} {name!r}", score=0.123, name="ann") == "0.12   ann 'ann'"
    assert len(f_string("{task}", task="x" * 20_000_000)) == 20_000_000, "a large prompt is no fault"
