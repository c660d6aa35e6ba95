"""Rewards that verify: mathematics, patterns, JSON Schemas, SQL, IFEval's instructions; and that a hostile answer costs
its own sample alone."""

from __future__ import annotations

import json
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config.rewards import RewardSpec
from rollout_core.config.verifiers import Extraction
from rollout_core.rewards import RewardInput, load_reward, score, source_id
from rollout_core.rewards.scoring import judge
from rollout_core.rewards.verifiers.extraction import boxed, code_blocks, code_or_all, extract
from rollout_core.rewards.verifiers.instructions import CHECKS, count_sentences
from rollout_core.rewards.verifiers.process import verifier_of
from rollout_core.rewards.verifiers.texts import normalised, word_f1
from rollout_core.rewards.votes import read_answers

SPECS: TypeAdapter[Any] = TypeAdapter(RewardSpec)


def spec_of(kind: str, **keys: Any) -> Any:
    return SPECS.validate_python({"kind": kind, **keys})


def verified(
    completion: str, kind: str, base: Path = Path(), extras: dict[str, Any] | None = None, **keys: Any
) -> float:
    """By the verifier itself, in this process."""
    return verifier_of(spec_of(kind, **keys), base)(completion, extras or {})


# -- where the answer stands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "wanted", "answer"),
    [
        (" 42 \n", {}, "42"),
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}.", {"take": "boxed"}, r"\frac{1}{2}"),
        (r"so \boxed{1}, no: \boxed{2}.", {"take": "boxed", "which": "first"}, "1"),
        (r"\boxed{never closed", {"take": "boxed"}, None),
        (r"\boxed{ a \} b }", {"take": "boxed"}, r"a \} b"),
        ("because\n#### 12\nand #### 13 \nend", {"take": "after", "marker": "####"}, "13"),
        ("no marker", {"take": "after", "marker": "####"}, None),
        ("<answer>a<answer>b</answer> c</answer>", {"take": "between", "start": "<answer>", "end": "</answer>"}, "b"),
        ("a </answer>", {"take": "between", "start": "<answer>", "end": "</answer>"}, None),
        ("x\n```python\nprint(1)\n```\ny\n~~~\nz\n~~~\n", {"take": "code"}, "z"),
        ("x\n```python\nprint(1)\n```\ny\n```js\nz\n```\n", {"take": "code", "language": "Python"}, "print(1)"),
        ("```py\r\na\r\n  b\r\n```", {"take": "code", "language": "python"}, "a\n  b"),
        ("<think>```cpp\nx\n```", {"take": "code", "language": "c++"}, "x"),
        ("1.\n   ```python3\n   if x:\n     y\n   ```", {"take": "code", "language": "python"}, "if x:\n  y"),
        ("```python\nnever closed", {"take": "code"}, None),
        ("    ```\n", {"take": "pattern", "pattern": r"^(a|aa)+$"}, None),
        ("````\n```\ninner\n```\n````", {"take": "code"}, "```\ninner\n```"),
        ("A: 1\nA: 2", {"take": "pattern", "pattern": r"A: (\d)"}, "2"),
        ("A: 1\nB", {"take": "pattern", "pattern": "A.*B"}, "A: 1\nB"),
    ],
)
def test_the_answer_is_taken_from_where_it_stands(completion: str, wanted: dict[str, Any], answer: str | None):
    assert extract(completion, Extraction(**wanted)) == answer


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"take": "after"}, 'take = "after" needs marker'),
        ({"take": "between", "start": "<a>"}, 'take = "between" needs end'),
        ({"take": "boxed", "marker": "x"}, "has no use for marker"),
        ({"take": "pattern", "pattern": "("}, "is no regular expression"),
        ({"take": "all", "language": "sql"}, "has no use for language"),
    ],
)
def test_an_extraction_that_means_nothing_is_refused(wanted: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        Extraction(**wanted)


def test_boxes_and_fences_are_found_in_linear_time():
    assert code_or_all("`" * 50_000 + "\n" * 50_000, None) is not None
    assert list(code_blocks("```\n" * 100_001)) == [""] * 50_000
    assert boxed(r"\boxed{" * 50_000) == boxed("{" * 10**6) == []


def test_without_a_wish_a_fenced_block_is_taken_where_there_is_one():
    assert code_or_all("text\n```sql\nselect 1\n```", None, "sql") == "select 1"
    assert code_or_all("text\n```sqlite\nselect 1\n```", None, "sql") == "select 1"
    assert code_or_all("text\n```text\nselect 1\n```", None, "sql") == "select 1"
    assert code_or_all("\nselect 1\n", None, "sql") == "select 1"


# -- mathematics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("42", "The answer is 42.", 1),
        ("42", "It is 41, no, 43", 0),
        (42, r"\boxed{42}", 1),
        (42.0, r"\boxed{42}", 1),
        ("1/2", r"so \boxed{\frac{1}{2}}", 1),
        ("0.5", r"so \boxed{\frac12}", 1),
        (r"\frac{\sqrt{2}}{2}", r"$\frac{1}{\sqrt{2}}$", 1),
        (r"\{1,2,3\}", r"\boxed{\{3, 1, 2\}}", 1),
        ("(1, 2]", r"\boxed{(1,2]}", 1),
        ("(1, 2]", r"\boxed{(1,2)}", 0),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^2}", 1),
        ("1,000", r"\boxed{1000}", 1),
        ("10", r"\boxed{10\text{ cm}}", 1),
        ("50", r"\boxed{50\%}", 1),
        (["3", "7"], r"\boxed{7}", 1),
        ("2", r"\boxed{1} and then \boxed{2}", 1),
        ("1", r"\boxed{1} and then \boxed{2}", 0),
        (2.5e-05, r"\boxed{0.000025}", 1),
        (2.5e-05, r"\boxed{-5+2.5e}", 0),
        (1e22, r"\boxed{10000000000000000000000}", 1),
        ("1e3", r"\boxed{1000}", 1),
        ("1000", r"\boxed{1e3}", 1),
        ("12 dollars", "It costs 12.", 1),
        (r"10\text{ meters}", r"\boxed{10}", 1),
        (r"\text{(B)}", r"\boxed{B}", 1),
        ("-1", "It is \N{MINUS SIGN}1.", 1),
        ("5", "It is \N{FULLWIDTH DIGIT FIVE}.", 1),
        (r"\frac{3\pi}{4}", r"\boxed{0.75\pi}", 1),
        ("sqrt(2)", r"\boxed{\sqrt{2}}", 1),
        ("3", "", 0),
        ("3", "no number at all", 0),
    ],
)
def test_answers_are_compared_as_mathematics(answer: Any, completion: str, reward: float):
    assert verified(completion, "math", extras={"answer": answer}) == reward


def test_a_last_box_that_is_wrong_is_not_made_up_for_by_a_number_elsewhere():
    assert verified(r"42 \boxed{nothing}", "math", extras={"answer": "42"}) == 0


def test_the_extraction_decides_what_is_compared():
    tags = {"take": "between", "start": "<answer>", "end": "</answer>"}
    assert verified(r"\boxed{1} <answer>2</answer>", "math", extras={"answer": 2}, extract=tags) == 1
    assert verified("2", "math", extras={"answer": 2}, extract=tags) == 0


@pytest.mark.parametrize("said", ["72", "72.", "**72**", "72 clips", "The answer is 72", "$72$", r"\(72\)"])
def test_an_answer_after_a_marker_is_read_however_it_is_dressed(said: str):
    marker = {"take": "after", "marker": "####"}
    assert verified(f"So 70 + 2.\n#### {said}", "math", extras={"answer": "72"}, extract=marker) == 1
    assert verified(f"So 70 + 2.\n#### {said}", "math", extras={"answer": "73"}, extract=marker) == 0


@pytest.mark.parametrize("answer", ["east", "no", "AB", "cm", r"\text{east}", None, True, {"a": 1}, "", float("nan")])
def test_a_row_whose_answer_is_no_mathematics_is_named(answer: Any):
    with pytest.raises(ConfigError, match="the row's 'answer'"):
        verified("1", "math", extras={"answer": answer})


# -- patterns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "completion", "extras", "reward"),
    [
        ({"pattern": r"^<think>.*</think>"}, "<think>a</think> b", {}, 1),
        ({"pattern": r"\d+", "match": "full"}, "12", {}, 1),
        ({"pattern": r"\d+", "match": "full"}, "a 12", {}, 0),
        ({"pattern": r"answer: (\w+)", "answer_key": "answer"}, "answer: no, answer: Yes", {"answer": "Yes"}, 1),
        ({"pattern": r"answer: (\w+)", "answer_key": "answer"}, "answer: Yes, answer: no", {"answer": "Yes"}, 0),
        ({"pattern": r"ANSWER: (\w+)", "answer_key": "a", "ignore_case": True}, "answer: yes", {"a": "YES"}, 1),
        ({"pattern": "x", "extract": {"take": "boxed"}}, "x", {}, 0),
        ({"pattern": r"(\d+)", "answer_key": "a"}, "it is 12", {"a": 12.0}, 1),
    ],
)
def test_a_pattern_is_looked_for(keys: dict[str, Any], completion: str, extras: dict[str, Any], reward: float):
    assert verified(completion, "regex", extras=extras, **keys) == reward


def test_a_pattern_without_a_group_has_nothing_to_compare():
    with pytest.raises(ValidationError, match="has no group"):
        spec_of("regex", pattern="x", answer_key="answer")


# -- JSON Schema -----------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "reward", "shared"),
    [
        ('{"name": "Ada", "age": 36}', 1, 1),
        ('Here:\n```json\n{"name": "Ada", "age": 36}\n```', 1, 1),
        ('{"name": "Ada", "age": -1}', 0, 0.25),
        ('{"name": "Ada"}', 0, 0.25),
        ('{"name": "Ada", "age": NaN}', 0, 0),
        ("[1]", 0, 0),
        ("{" * 100_000, 0, 0),
        ("[" * 3_000 + "]" * 3_000, 0, 0),
        ("not JSON", 0, 0),
    ],
)
def test_json_is_held_against_its_schema(completion: str, reward: float, shared: float):
    assert verified(completion, "schema", json_schema=PERSON) == reward
    assert verified(completion, "schema", json_schema=PERSON, share=True) == shared
    for given in (PERSON, json.dumps(PERSON)):
        assert verified(completion, "schema", extras={"schema": given}) == reward


def test_a_reference_to_an_address_is_never_fetched_and_bad_schemas_are_named():
    with pytest.raises(Exception, match=r"example\.invalid"):
        verified("1", "schema", json_schema={"$ref": "http://example.invalid/schema.json"})
    with pytest.raises(ValidationError, match="is no JSON Schema"):
        spec_of("schema", json_schema={"type": "nothing"})
    for given in ({"type": "nothing"}, "{", 3):
        with pytest.raises(ConfigError, match="the row's 'schema'"):
            verified("1", "schema", extras={"schema": given})


# -- SQL -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("create table sales (item text, price real)")
        connection.executemany("insert into sales values (?, ?)", [("tea", 3.0), ("cake", 4.5), ("tea", 3.5)])
        connection.commit()
    return tmp_path


@pytest.mark.parametrize(
    ("query", "completion", "reward"),
    [
        ("select item from sales", "```sql\nselect item from sales order by price\n```", 1),
        ("select item from sales order by price", "select item from sales order by price desc", 0),
        ("select item from sales order by price", "select item from sales order by price", 1),
        ("select sum(price) from sales", "select 11", 1),
        ("select sum(price) from sales", "select sum(price) from sales where item = 'tea'", 0),
        ("select item from (select item, price from sales order by price)", "select item from sales", 1),
        ([["tea", 2], ["cake", 1]], "select item, count(*) from sales group by item", 1),
        ("select 1", "drop table sales", 0),
        ("select value from json_each('[1, 2]')", "select 1 union all select 2", 1),
        ("select 1", "select 1; drop table sales", 0),
        ("select 1", "attach database '/etc/passwd' as p", 0),
        ("select 1", "pragma writable_schema = 1", 0),
        ("select 1", "select load_extension('x')", 0),
        ("select 1", "select zeroblob(1000000000)", 0),
        ("select 1", "with recursive n(i) as (select 1 union all select i + 1 from n) select i from n", 0),
        ("select 1", "nonsense", 0),
        ("select 1", "", 0),
    ],
)
def test_queries_are_compared_by_their_rows_and_change_nothing(shop: Path, query: Any, completion: str, reward: float):
    before = (shop / "shop.db").read_bytes()
    assert verified(completion, "sql", shop, {"query": query}, database="shop.db") == reward
    assert (shop / "shop.db").read_bytes() == before and [file.name for file in shop.iterdir()] == ["shop.db"]


def test_a_rows_own_query_that_fails_is_named(shop: Path):
    with pytest.raises(ConfigError, match=r"'query', 'select nothing_there', fails: no such column: nothing"):
        verified("select 1", "sql", shop, {"query": "select nothing_there"}, database="shop.db")
    with pytest.raises(ConfigError, match="cannot be"):
        verified("select 1", "sql", shop, {"query": "select 1"}, database="none.db")


def test_the_databases_content_is_part_of_the_id_and_a_change_is_noticed(shop: Path):
    spec = spec_of("sql", database="shop.db")
    before = source_id(spec, base=shop)
    (shop / "copy.db").write_bytes((shop / "shop.db").read_bytes())
    assert source_id(spec_of("sql", database="copy.db"), base=shop) == before
    reward = load_reward(spec, base=shop)
    sample = RewardInput("q", "select 1", {"query": "select 1"})
    try:
        assert score(reward, [sample]) == [1]
        with closing(sqlite3.connect(shop / "shop.db")) as connection:
            connection.execute("insert into sales values ('pie', 2)")
            connection.commit()
        assert source_id(spec, base=shop) != before
        with pytest.raises(Fatal, match=r"shop\.db was changed since the run began"):
            score(reward, [sample])
    finally:
        reward.close()
    with pytest.raises(ConfigError, match=r"none\.db"):
        source_id(spec_of("sql", database="none.db"), base=shop)


# -- instructions ----------------------------------------------------------------------------------------------------

FOLLOWED: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["Tea", "cake"]}, "cake and tea", "tea"),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"}, "tea, Tea", "tea"),
    ("keywords:forbidden_words", {"forbidden_words": ["tea"]}, "teapot", "a tea"),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "less than"}, "tea", "eE"),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein schöner Satz in deutscher Sprache.",
        "This is a nice sentence in the English language.",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "A cat. Dogs!", "A cat."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "tea"},
        'a\n\n"Tea", he said',
        "tea\n\nb",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] and [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi\nP. S. more", "PS more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "maybe"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Tea>>\ntext", "<< >>\ntext"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi!"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So. "The end."', "The end. Or not"),
    ("startend:quotation", {}, '"all of it"', '"not all" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "GOOD TEA here",
        "GOOD tea",
    ),
    ("change_case:english_capital", {}, "THIS IS A SENTENCE IN THE ENGLISH LANGUAGE", "This is one"),
    ("change_case:english_lowercase", {}, "this is a sentence in the english language", "This is one"),
    ("punctuation:no_comma", {}, "no such mark", "one, two"),
]


def test_every_instruction_of_ifeval_has_a_case():
    assert sorted(name for name, *_ in FOLLOWED) == sorted(CHECKS) and len(CHECKS) == 25


@pytest.mark.parametrize(("name", "kwargs", "followed", "broken"), FOLLOWED, ids=[row[0] for row in FOLLOWED])
def test_an_instruction_is_followed_or_not(name: str, kwargs: dict[str, Any], followed: str, broken: str):
    others = {"language": None, "num_words": None} | kwargs  # the rows of the data set have all keys
    row = {"instruction_id_list": [name], "kwargs": [others]}
    assert verified(followed, "instructions", extras=row) == 1
    assert verified(broken, "instructions", extras=row) == 0
    assert verified(" ", "instructions", extras=row) == 0, "an empty answer follows nothing"


def test_several_instructions_count_together_or_by_their_share():
    row = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    assert verified("plain", "instructions", extras=row) == 0
    assert verified("plain", "instructions", extras=row, value="share") == 0.5
    assert verified('"plain"', "instructions", extras=row) == 1


def test_a_loose_check_forgives_a_first_line_and_asterisks():
    row = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    text = 'Sure, here it is:\n*"all of it"*'
    assert verified(text, "instructions", extras=row) == 0
    assert verified(text, "instructions", extras=row, loose=True) == 1


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        (["punctuation:no_commas"], [{}], "did you mean 'punctuation:no_comma'"),
        (["startend:end_checker"], [{}], "needs end_phrase"),
        (["startend:end_checker"], [["x"]], "expected a table"),
        (["punctuation:no_comma"], [], "expected a list of 1 tables"),
        ("punctuation:no_comma", [{}], "expected a list of instruction ids"),
        (["length_constraints:number_words"], [{"num_words": 1, "relation": "about"}], "'less than' or 'at least'"),
    ],
)
def test_a_row_with_other_instructions_is_named(ids: Any, kwargs: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        verified("text", "instructions", extras={"instruction_id_list": ids, "kwargs": kwargs})


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("One", 1), ("One. Two", 2), ("Mr. Tea came. He sat.", 2), ("Pi is 3.14. Yes!", 2), ("What?! No...", 2)],
)
def test_sentences_are_counted(text: str, count: int):
    assert count_sentences(text) == count


# -- in processes of their own ---------------------------------------------------------------------------------------


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def slow_pattern(lines: list[str]) -> Iterator[Any]:
    """A pattern that takes time without end on `HOSTILE`."""
    spec = spec_of("regex", pattern=r"^(a|aa)+\1{3}c$|fine", timeout_seconds=1.0)
    reward = load_reward(spec, on_line=lines.append)
    yield reward
    reward.close()


HOSTILE = "a" * 200


def test_an_answer_that_takes_time_without_end_costs_its_own_sample(slow_pattern: Any, lines: list[str]):
    texts = ["fine"] * 50
    texts[3] = texts[40] = HOSTILE
    assert score(slow_pattern, [RewardInput("p", text) for text in texts]) == [float(text == "fine") for text in texts]
    assert any("2 of 50 answers could not be verified and earn 0" in line for line in lines)


def test_a_tower_of_powers_costs_its_own_sample():
    reward = load_reward(spec_of("math", timeout_seconds=3.0))
    texts = [r"\boxed{4}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2^2}"]
    try:
        assert score(reward, [RewardInput("p", text, {"answer": 4}) for text in texts]) == [1, 0, 1]
    finally:
        reward.close()


def test_they_count_in_a_composite_with_weights():
    parts = [
        {"weight": 1.0, "reward": {"kind": "math"}},
        {"weight": 0.5, "reward": {"kind": "regex", "pattern": "^<think>"}},
    ]
    reward = load_reward(spec_of("composite", parts=parts))
    texts = [r"<think>x \boxed{2}", r"\boxed{2}", "<think>3"]
    try:
        assert score(reward, [RewardInput("p", text, {"answer": 2}) for text in texts]) == [1.5, 1.0, 0.5]
    finally:
        reward.close()


def test_numbers_beyond_floats_and_values_nested_without_end_cost_their_own_sample():
    tree = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    deep = "[" * 400 + "]" * 400
    reward = load_reward(spec_of("schema", schema_key="s"))
    rows = [("1e400", {"type": "number", "multipleOf": 0.1}), (deep, tree), ("[]", tree), ("1", {"$ref": "#/nothing"})]
    try:
        found = judge(reward, [RewardInput("p", text, {"s": schema}) for text, schema in rows])
    finally:
        reward.close()
    assert found[:3] == [0, 0, 1] and isinstance(found[3], Fatal) and "failed on sample 3" in str(found[3])


def test_a_database_whose_rows_stand_in_a_log_is_refused(shop: Path):
    with closing(sqlite3.connect(shop / "shop.db")) as connection:
        connection.execute("pragma journal_mode = wal")
        connection.execute("insert into sales values ('pie', 2)")
        connection.commit()
        with pytest.raises(ConfigError, match="wal_checkpoint"):
            verified("select 1", "sql", shop, {"query": "select 1"}, database="shop.db")


def test_a_large_sort_writes_no_file(shop: Path):
    query = (
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 300000) "
        "select i from n order by -i limit -1 offset 299990"
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))  # of the file that SQLite sorts in by itself
    try:
        with closing(sqlite3.connect(":memory:")) as other, pytest.raises(sqlite3.Error, match=r"full|I/O"):
            other.execute(query).fetchall()
        assert verified(query, "sql", shop, {"query": query}, database="shop.db") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_without_the_answer_is_named():
    reward = load_reward(spec_of("math"))
    try:
        with pytest.raises(Fatal, match="failed on sample 0: the prompt's row has no 'answer'; did you mean 'answr'"):
            score(reward, [RewardInput("p", "1", {"answr": 1})])
    finally:
        reward.close()


# -- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compare", "answer", "completion", "reward"),
    [
        ("exact", "Paris", " Paris\n", 1),
        ("exact", "Paris", "paris", 0),
        ("exact", "e\u0301", "\u00e9", 1),
        ("exact", 42.0, "42", 1),
        ("exact", ["Rome", "Paris"], "Paris", 1),
        ("normalised", "The Eiffel Tower", "eiffel tower!", 1),
        ("normalised", "Eiffel Tower", "in the Eiffel Tower", 0),
        ("normalised", "the", "", 1),
        ("numeric", 1000, "It is $1,000.", 1),
        ("numeric", "0.5", "first 3, then .5", 1),
        ("numeric", 3, "5-3", 1),
        ("numeric", -3, "so x = -3", 1),
        ("numeric", "1e3", "1000.0000001", 1),
        ("numeric", 7, "seven", 0),
        ("contains", "Paris", "It is Paris, of course", 1),
        ("contains", "Paris", "It is paris", 0),
        ("f1", "the cat sat", "a cat sat down", 2 * 2 / (2 + 3)),
        ("f1", "cat", "dog", 0),
        ("f1", "the", "an", 1),
        ("f1", ["dog", "cat sat"], "cat sat", 1),
        ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1),
        ("chrf", "the cat sat on the mat", "the cat sat on the mat", 1),
        ("rouge", "the cat sat on the mat", "the cat on mat", 2 * (4 / 4) * (4 / 6) / (4 / 4 + 4 / 6)),
        ("rouge", ["dogs", "the cat"], "the cat", 1),
        ("bleu", "the cat", "", 0),
        ("chrf", "the cat", "xyz", 0),
    ],
)
def test_answers_are_compared_as_text(compare: str, answer: Any, completion: str, reward: float):
    found = verified(completion, "text", compare=compare, extras={"answer": answer})
    assert found == pytest.approx(reward)


@hypothesis.given(st.text(max_size=30), st.text(max_size=30))
def test_the_words_of_two_texts_overlap_alike_from_both_sides(one: str, other: str):
    assert word_f1(one, other) == word_f1(other, one)
    assert 0 <= word_f1(one, other) <= 1
    assert word_f1(one, one) == 1
    assert normalised(normalised(one)) == normalised(one)


@pytest.mark.parametrize(
    ("compare", "answer", "message"),
    [
        ("numeric", "seven", "expected a number in it"),
        ("contains", " ", "every completion contains"),
        ("exact", {"a": 1}, "expected a text or a number"),
        ("f1", True, "expected a text or a number"),
        ("bleu", None, "expected a text or a number"),
    ],
)
def test_a_rows_text_that_cannot_be_compared_is_named(compare: str, answer: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        verified("x", "text", compare=compare, extras={"answer": answer})


def test_case_is_ignored_only_where_no_rule_says_so_already():
    assert verified("PARIS", "text", compare="exact", ignore_case=True, extras={"answer": "Paris"}) == 1
    with pytest.raises(ValidationError, match="has a rule of its own for case"):
        spec_of("text", compare="f1", ignore_case=True)


def test_a_text_that_is_extracted_is_compared_in_a_process_of_its_own():
    spec = spec_of("text", compare="exact", extract={"take": "after", "marker": "####"})
    reward = load_reward(spec)
    try:
        inputs = [RewardInput("q", text, {"answer": "4"}) for text in ("2+2\n#### 4", "4", "#### 5")]
        assert score(reward, inputs) == [1, 0, 0]
    finally:
        reward.close()


# -- the answers that are voted on -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "completions", "answers"),
    [
        ({"kind": "exact_match", "ignore_case": True}, [" A ", "a", "b", " "], ["a", "a", "b", None]),
        ({"kind": "math"}, [r"\boxed{1/2}", r"so $\frac{1}{2}$", "none"], ["1/2", "1/2", None]),
        ({"kind": "text"}, ["The cat.", "cat", "dog", "the!"], ["cat", "cat", "dog", None]),
        ({"kind": "text", "compare": "numeric"}, ["so 1,000", "1000.0", "x"], ["1000.0", "1000.0", None]),
        ({"kind": "text", "compare": "numeric"}, ["-0", "0", "-0.0"], ["0.0", "0.0", "0.0"]),
        ({"kind": "math"}, [r"\boxed{-0}", r"\boxed{0}"], ["0", "0"]),
        ({"kind": "text", "compare": "exact", "extract": {"take": "boxed"}}, [r"\boxed{B}", "B"], ["B", None]),
        (
            {"kind": "regex", "pattern": r"A: (\w+)", "answer_key": "answer"},
            ["A: x", "A: y A: x ", "x"],
            ["x", "x", None],
        ),
    ],
)
def test_equal_answers_are_read_as_equal(spec: dict[str, Any], completions: list[str], answers: list[str | None]):
    assert read_answers(SPECS.validate_python(spec), completions, print) == answers


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "schema"},
        {"kind": "instructions"},
        {"kind": "regex", "pattern": "x"},
        {"kind": "text", "compare": "bleu"},
        {"kind": "function", "callable": "a:b"},
        {"kind": "expression", "expression": "num_tokens"},
    ],
)
def test_a_reward_that_reads_no_answers_is_refused(spec: dict[str, Any]):
    with pytest.raises(ConfigError, match="reads no answers"):
        read_answers(SPECS.validate_python(spec), ["x"], print)


def test_an_answer_that_takes_for_ever_to_read_is_none_and_costs_no_other():
    spec = spec_of("regex", pattern=r"^(a|aa)+\1{3}c$|(fine)", answer_key="answer", timeout_seconds=1.0)
    lines: list[str] = []
    assert read_answers(spec, ["x", HOSTILE, "x"], lines.append) == [None, None, None]
    assert any("1 of 3 answers could not be verified and have no answer" in line for line in lines)
