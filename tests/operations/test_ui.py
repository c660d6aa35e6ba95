"""`rollout ui`: every page in a real browser, with texts that would like to be more than text; and who may look."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image
from starlette.routing import Route
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deployments.ui import model_pages, suite_pages
from deployments.ui.auth import guarded
from deployments.ui.mounted import PAGES as MOUNTED_PAGES
from deployments.ui.pages import Sources
from deployments.ui.rollout_pages import Wanted, _final_reward
from deployments.ui.site import application as pages_of
from deployments.ui.stored import FORGOTTEN_SECONDS, _is_there, last_sign
from rollout_core.agents.emitters import reward_attributes
from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.base.processes import ProcessName, this_machine
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.evaluation.moments import training_label
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage
from rollout_core.objects.retention.run_leases import lease
from rollout_core.objects.retention.unstored import hold_model, put_model
from rollout_core.objects.trees import TreeFile, TreeManifest
from rollout_core.promotion.history import Change, change_latest
from rollout_core.runs.evaluations import evaluations_of
from rollout_core.runs.run_records import Live, MetricsOf, Moment, RunDetail, RunHead, RunRecords, StageCall
from rollout_core.runs.run_samples import sample_sets
from rollout_core.store import InMemoryLightningStore, SqlLightningStore
from rollout_core.store.http.app import create_app
from rollout_core.store.http.program import ServeSettings, with_pages
from rollout_core.store.types import AttemptUpdate, Worker
from tests.evaluation.test_reports import report, suite_of
from tests.runs.test_run_records import evaluated
from tests.store.conftest import Make
from tests.support.pages import LIKENESS, RENAMED, TILE, chromium, difference, tile_of
from tests.support.server_logs import ServerLogs

NASTY = """<script>document.title='taken'</script><img src=x onerror="document.title='taken'">"'{{ 7*7 }}"""
KEY = "open sesame"
BEGAN = datetime(2026, 11, 25, 2, 0, tzinfo=UTC)
FIRST, SECOND, RUNNING = "11111111-aaaa", "22222222-bbbb", "33333333-cccc"
BASE, MODEL = content_id("m", ["base"]), content_id("m", ["trained"])
LEARNED = f"iteration {NASTY}"
ONE, OTHER = hash_bytes(b"one"), hash_bytes(b"other")
"""Models that suites evaluated."""
PAGES = (
    "/",
    f"/runs/{FIRST}",
    f"/runs/{RUNNING}",
    f"/runs/{FIRST}/samples",
    f"/runs/{FIRST}/samples/0",
    f"/runs/{FIRST}/samples/0?by=advantage&label={quote(LEARNED)}",
    f"/runs/{FIRST}/samples/1?by=advantage",
    f"/compare?run={FIRST}&run={SECOND}&show=all",
    "/suites",
    f"/suites/compare?model={ONE}&model={OTHER}&show=all",
    "/rollouts",
    "/models",
    f"/models/{MODEL}",
    f"/models/{BASE}?way=down",
    "/queue",
    "/storage",
    "/login",
    "/nothing",
)


def call(stage: str, number: int, **changes: Any) -> StageCall:
    ended = BEGAN.timestamp() + number
    plain = StageCall(stage=stage, label=NASTY, state="Completed", ended=ended, seconds=0.5, inputs=("a" * 64,))
    return plain.model_copy(update=changes)


def record(objects: ObjectStore, run: str, day: int, reward: float, **changes: Any) -> None:
    """A run with curves, samples and nasty texts wherever a text can be."""
    rows = "".join(json.dumps({"step": step, "loss": 1 / step, "kl": reward * step}) + "\n" for step in range(1, 30))
    metrics = MetricsOf(stage="ppo_update", label=NASTY, metrics=objects.put_bytes(rows.encode()))
    held_out = evaluated(objects, NASTY, {NASTY: (NASTY, reward), "plain": ("text", 0.5)})
    head = RunHead(
        id=run,
        name=f"night{day}",
        flow="nightly",
        flow_run_name=NASTY,
        tags=(NASTY,),
        state="completed",
        error=NASTY,
        began=BEGAN + timedelta(days=day),
        written=BEGAN + timedelta(days=day, hours=1),
        seconds=3600.0,
        model=NASTY,
        algorithm=NASTY,
        data=NASTY,
        held_out=(Moment(name="before", reward=0.1), Moment(name=NASTY, reward=reward)),
        promoted=True,
        reason=NASTY,
        suites=("sums",),
        metrics=(metrics,),
    )
    held_out = held_out.model_copy(update={"result": {**held_out.result, "model": tokenizer(objects)}})
    of = {name: held_out.result[name] for name in ("samples", "completions", "scores", "num_samples", "model")}
    kept = objects.put_bytes(b"[1.5,-0.5]\n-0.1\n")
    learned = [
        call("batch_inference", 2, label=LEARNED, kind="Completions", result=of),
        call("score_rewards", 3, label=LEARNED, kind="Scores", result={**of, "mean": reward}),
        call("ppo_update", 1, kind="Checkpoint", inputs=(of["completions"],), result={"advantages": kept}),
    ]
    calls = (call("import_model", 0), *learned, held_out, *suites_of(objects, reward))
    detail = RunDetail(config={"seed": day, "text": NASTY}, facts={"report": NASTY}, calls=calls)
    live = changes.pop("live", None)
    RunRecords(objects).write(head.model_copy(update=changes), detail.model_copy(update={"live": live}))


def suites_of(objects: ObjectStore, share: float) -> list[StageCall]:
    """Calls that evaluated two models by a suite: the one has the first of four questions right, the other a share."""
    found = []
    for number, (model, moment, right) in enumerate((("one", "before", 1), ("other", "after PPO", int(4 * share)))):
        answers = [[(NASTY, float(place >= 4 - right if number else place < right))] for place in range(4)]
        filed = report(objects, suite_of(1, name="sums"), *answers, model=model)
        label = training_label("sums", moment)
        of = {name: getattr(filed, name) for name in ("samples", "completions", "scores", "num_samples", "model")}
        found += [
            call("batch_inference", 4, label=label, kind="Completions", result=of),
            call("score_rewards", 4, label=label, kind="Scores", result={**of, "mean": right / 4}),
            call("report_suite", 4, label=label, kind="SuiteReport", result=filed.model_dump(mode="json")),
        ]
    return found


def tokenizer(objects: ObjectStore) -> ContentId:
    """A model's folder, whose tokens are as nasty as any text."""
    with TemporaryDirectory() as folder:
        Tokenizer(WordLevel(vocab={NASTY: 5, "</pre><h1>": 6}, unk_token=NASTY)).save(f"{folder}/tokenizer.json")
        return objects.put_tree(Path(folder))


async def fill(objects: ObjectStore, store: SqlLightningStore) -> None:
    record(objects, FIRST, 0, 0.25)
    record(objects, SECOND, 1, 0.75)
    live = Live(
        title="ppo_update iteration 1", num_steps=9, rows=({"step": 1.0, "loss": 2.0}, {"step": 2.0, "loss": 1.0})
    )
    record(objects, RUNNING, 2, 0.5, state="running", held_out=(), suites=(), promoted=None, live=live)
    inputs = {"model": BASE, "label": NASTY}
    lineage = Lineage(stage=NASTY, version=1, key=MODEL, inputs=inputs, outputs=(MODEL,), created_at=BEGAN, software={})
    record_lineage(objects, lineage)
    await change_latest(store, objects, Change("promote", "policy", MODEL, NASTY, NASTY))
    rollout = await store.start_rollout({"question": NASTY}, metadata={"note": NASTY})
    place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    await store.add_span(Make.span(rollout, name="agentlightning.annotation", attributes=reward_attributes(0.25)))
    await store.add_span(Make.span(rollout, name=NASTY, attributes={"gen_ai.prompt.0.content": NASTY}))
    await store.update_many_attempts([AttemptUpdate(**place, status="succeeded", worker_id=NASTY)])
    await store.update_worker(NASTY, {})


@pytest.fixture
async def filled(tmp_path: Path) -> Any:
    """Object store and database with three runs, a rollout, a worker and a promotion."""
    objects = ObjectStore.from_url(f"{tmp_path}/objects")
    async with SqlLightningStore.from_url(f"sqlite:///{tmp_path}/rollout.db") as store:
        await fill(objects, store)
    return objects


@pytest.fixture
def client(filled: ObjectStore) -> TestClient:
    return TestClient(application(filled), base_url="http://localhost")


def application(objects: ObjectStore, api_key: str | None = None) -> Any:
    """Without a database, which needs a loop of its own."""
    return guarded(pages_of(Sources(objects, RunRecords(objects), None, lambda: None)), api_key)


def test_without_graphviz_the_page_has_the_flow_chart_as_text(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    model_pages._drawn.cache_clear()
    page = client.get(f"/models/{MODEL}").text
    assert "No image: graphviz&#39;s dot draws the image" in page and "flowchart TD" in page
    assert 'class="lineage"' not in page


def test_a_sample_names_the_weights_that_drew_each_part_of_it(filled: ObjectStore, client: TestClient) -> None:
    cut = Completion("a" * 64, [5, 6, 5], [-0.5] * 3, "x", "stop", written=[(0, 2), (2, 3)], model_ids=[BASE, MODEL])
    result = {
        "samples": filled.put_bytes(encode_samples([Sample(ContentId("a" * 64), "p", [5], 0, None, {})])),
        "completions": filled.put_bytes(encode_completion(cut)),
        "num_samples": 1,
        "model": MODEL,
    }
    head = RunHead(id="44444444-dddd", name="cut", flow="train-grpo", state="completed", began=BEGAN, written=BEGAN)
    drawn = call("batch_inference", 1, label="cut", kind="Completions", result=result)
    scored = {**result, "scores": filled.put_bytes(b"[0.5]"), "mean": 0.5}
    calls = (drawn, call("score_rewards", 2, label="cut", kind="Scores", result=scored))
    RunRecords(filled).write(head, RunDetail(config={}, facts={}, calls=calls))
    page = client.get(f"/runs/{head.id}/samples/0?label=cut").text
    parts = re.findall(r"<dt>(Tokens \d to \d)</dt><dd>drawn by <a href=\"/models/(\w+)\"", page)
    assert parts == [("Tokens 0 to 1", BASE), ("Tokens 2 to 2", MODEL)]
    assert "<dt>Model</dt>" not in page and "given to the model" not in page
    plain = client.get(f"/runs/{FIRST}/samples/0").text
    assert "<dt>Model</dt>" in plain and "drawn by" not in plain


def test_a_model_without_its_weights_is_told_as_that_and_offers_nothing_that_needs_them(
    filled: ObjectStore, client: TestClient, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    manifest = TreeManifest(
        files=tuple(
            TreeFile(path=file.name, size=len(file.name), content_id=hash_bytes(file.name.encode()))
            for file in sorted(folder.iterdir())
        )
    )
    made_by = {"run_id": "run", "step": 7, "algorithm": "ppo"}
    model = hold_model(filled, manifest, folder, tmp_path / "cache", **made_by)
    for is_stored in (False, True):
        page = client.get(f"/models/{model}").text
        assert ("in 2 files, not all of them in this storage" in page) == (not is_stored)
        assert (f"rollout export {model}" in page, f"rollout promote {model}" in page) == (is_stored, is_stored)
        assert f"rollout reproduce {model}" in page
        put_model(filled, manifest, folder)


async def test_the_reward_of_a_long_trace_is_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout({"question": "?"})
    for reward in (0.25, None, None, 0.75, None):
        attributes = {} if reward is None else reward_attributes(reward)
        await store.add_span(Make.span(rollout, name="agentlightning.annotation", attributes=attributes))
    attempt = rollout.attempt.attempt_id
    for limit in (2, 5):
        begin = await store.query_spans(rollout.rollout_id, attempt_id=attempt, limit=limit)
        assert await _final_reward(store, begin, rollout.rollout_id, attempt) == 0.75


async def test_a_text_is_found_within_a_run_as_it_is_among_all_rollouts() -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout({"question": 'say "no"\n', "number": 1})
    await store.enqueue_rollout("Grüße")
    for text in ('say "no"', "\n", '"number":1', '"number": 1', "üß", "no\\", "nowhere"):
        wanted = Wanted(None, text, None)
        found = [each.rollout_id for each in (await store.browse_rollouts(text=wanted.in_json)).items]
        assert found == [each.rollout_id for each in reversed(await store.query_rollouts()) if wanted.fits(each)], text


def test_what_does_not_exist_has_a_page_that_says_so(client: TestClient) -> None:
    for path, status, text in (
        ("/nothing", 404, "there is no page /nothing"),
        ("/runs/9999", 404, "no run is recorded under"),
        ("/rollouts", 400, "no database could be read"),
        (f"/compare?run={FIRST}", 400, "got 1 runs to compare"),
        (f"/runs/{FIRST}/samples?label=no", 400, "no samples are labelled"),
        (f"/runs/{FIRST}?x=%00", 200, "night0"),
        (f"/runs/{FIRST}/samples/{'9' * 6000}", 404, "expected a number"),
        (f"/runs/{FIRST}/samples/2", 404, "expected 0 to 1"),
        ("/models/..%2f..%2fetc", 404, "there is no page"),
        ("/?offset=99999999999999999999&sort=no&state=no", 200, "No run is like that"),
        (f"/runs/{FIRST}/logs", 200, "no Prefect server is known"),
    ):
        answer = client.get(path)
        assert (answer.status_code, text in answer.text) == (status, True), path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"


def test_every_page_that_there_is_is_looked_at_in_a_browser(filled: ObjectStore) -> None:
    tried = [page.partition("?")[0] for page in PAGES] + ["/rollouts/one"]
    parts = re.compile(r"\.(json|csv|css)$|/logs$|^/static$")  # of pages, which fetch them
    routes = pages_of(Sources(filled, RunRecords(filled), None, lambda: None)).routes
    shown = [route for route in routes if isinstance(route, Route) and not parts.search(route.path)]
    untried = [route.path for route in shown if not any(route.path_regex.match(page) for page in tried)]
    assert untried == [] and len(shown) > 9


def test_pages_are_only_read_and_only_from_here(client: TestClient) -> None:
    assert client.post("/").status_code == 405
    assert client.get("/", headers={"host": "rebound.example"}).status_code == 403
    assert client.get("/", headers={"origin": "http://elsewhere.example"}).status_code == 403
    assert client.get("/static/../app.py").status_code == 404


@pytest.mark.parametrize("address", ["/?q=", "/?flow=", "/nothing/", "/runs/", f"/runs/{FIRST}/samples?q=", "/models/"])
def test_what_an_address_holds_is_shown_as_text(client: TestClient, address: str) -> None:
    page = client.get(address + quote(NASTY, safe=""))
    assert (
        "<script>document" not in page.text and "<img" not in page.text and "49" not in page.text.partition("main")[0]
    )


def test_a_run_that_was_killed_is_lost_until_it_is_tried_again(filled: ObjectStore, client: TestClient) -> None:
    record(filled, RUNNING, 2, 0.5, state="running", tries=1, error=None)
    page = client.get(f"/runs/{RUNNING}").text
    assert 'class="state lost"' in page and "start the run again (by the same command;" in page
    assert "data-every" not in page
    assert RUNNING in client.get("/?state=lost").text and RUNNING not in client.get("/?state=running").text
    record(filled, RUNNING, 2, 0.5, state="running", tries=2, error=None)
    with lease(filled, f"night2 (flow run {RUNNING})"):
        page = client.get(f"/runs/{RUNNING}").text
        assert 'class="state running"' in page and "try 2" in page and "data-every" in page
    record(filled, RUNNING, 2, 0.5, state="completed", tries=2, error=None)
    page = client.get(f"/runs/{RUNNING}").text
    assert 'class="state completed"' in page and "in all tries" in page and "Run the same" not in page


def test_a_key_is_asked_for_once(filled: ObjectStore) -> None:
    client = TestClient(application(filled, api_key=KEY), base_url="http://team.example")
    assert client.get("/").status_code == 401
    assert client.get("/", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    page = client.get("/", headers={"accept": "text/html"})
    assert (page.url.path, "file://" in page.text) == ("/login", False)
    assert "file://" not in client.get("/static/nothing").text
    refused = client.post("/login", data={"key": "guess"})
    assert (refused.url.path, len(client.cookies)) == ("/login", 0)
    for wanted, shown in (
        (f"/runs/{FIRST}", f"/runs/{FIRST}"),
        ("//elsewhere.example/", "/"),
        ("https://x.example", "/"),
    ):
        entered = client.post("/login", data={"key": KEY, "next": wanted})
        assert (entered.url.host, entered.url.path, entered.status_code) == ("team.example", shown, 200)
    assert KEY not in str(dict(client.cookies))
    assert client.get(f"/runs/{FIRST}").status_code == 200
    assert client.post("/login", content=b"key=" + b"x" * 5000).status_code == 413


def test_runs_are_compared_without_samples_that_are_gone(filled: ObjectStore, client: TestClient) -> None:
    records = RunRecords(filled)
    _, detail = records.detail(records.find(FIRST))
    filled.delete(sample_sets(detail)[0].scores)
    page = client.get(f"/compare?run={SECOND}&run={FIRST}")
    assert page.status_code == 200
    assert "any more" in page.text and "seed" in page.text


def test_models_are_shown_by_suites_and_compared_question_by_question(client: TestClient) -> None:
    page = client.get("/suites").text
    assert page.count('name="model"') == 2
    label = quote("suite sums, after PPO")
    assert re.search(rf'<a href="/runs/{SECOND}/samples\?label={label}">\s*0.750 <small>accuracy, 0.301 to 0.954', page)
    assert "No model is like that" in client.get("/suites?q=nothing").text
    assert client.get(f"/runs/{SECOND}/samples?label={label}").status_code == 200

    compare = f"/suites/compare?model={ONE}&model={OTHER}"
    flipped = client.get(compare).text
    assert "Flipped (4)" in flipped and "Lost (1)" in flipped and "Gained (3)" in flipped and "All (4)" in flipped
    assert "+0.5000" in flipped and flipped.count("<small>id-") == 4
    lost = client.get(f"{compare}&show=lost").text
    assert lost.count("<small>id-") == 1 and f'href="/runs/{RUNNING}/samples/0?label=' not in lost
    assert re.search(rf'href="/runs/{SECOND}/samples/0\?label={quote("suite sums, before")}" aria-label="right: ', lost)
    swapped = client.get(f"/suites/compare?model={OTHER}&model={ONE}").text
    assert "Lost (3)" in swapped and "-0.5000" in swapped
    for path, status, text in (
        (f"/suites/compare?model={ONE}", 400, "got 1 models to compare"),
        (f"/suites/compare?model={ONE}&model={BASE}", 404, "no evaluation of"),
        (f"{compare}&suite=other", 400, "evaluated both"),
    ):
        answer = client.get(path)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text


def test_further_pages_of_a_comparison_are_not_computed_again(client: TestClient, filled: ObjectStore) -> None:
    compared = f"/suites/compare?model={ONE}&model={OTHER}"
    first, swapped = client.get(compared).text, f"/suites/compare?model={OTHER}&model={ONE}"
    records = RunRecords(filled)
    _, detail = records.detail(records.find(SECOND))
    for each in evaluations_of(detail):
        filled.delete(each.report.questions)
    assert client.get(compared).text == first and client.get(f"{compared}&show=lost").status_code == 200
    assert client.get(swapped).status_code == 404, "another comparison reads what is gone"


def test_no_more_questions_are_kept_than_there_is_room_for(
    client: TestClient, filled: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_pages, "QUESTIONS_KEPT", 7)
    pages = [f"/suites/compare?model={one}&model={other}" for one, other in ((ONE, OTHER), (OTHER, ONE))]
    assert [client.get(page).status_code for page in pages] == [200, 200]
    records = RunRecords(filled)
    _, detail = records.detail(records.find(SECOND))
    for each in evaluations_of(detail):
        filled.delete(each.report.questions)
    assert [client.get(page).status_code for page in reversed(pages)] == [200, 404]


def test_answers_without_a_score_are_counted_and_named(client: TestClient, filled: ObjectStore) -> None:
    compare = f"/suites/compare?model={ONE}&model={OTHER}"
    assert "Without a score" not in client.get(compare).text
    records = RunRecords(filled)
    head, detail = records.detail(records.find(SECOND))
    lacks = {"num_abstained": 1, "num_score_failed": 1, "unscored": ["q<1>"]}
    calls = [
        each.model_copy(update={"result": {**each.result, **lacks}}) if each.kind == "SuiteReport" else each
        for each in detail.calls
    ]
    records.write(head, detail.model_copy(update={"calls": tuple(calls)}))
    page = client.get(compare).text
    assert page.count("<td>2 <small>q&lt;1&gt;</small></td>") == 2 and "<th>Without a score</th>" in page
    assert "<th>Failed</th>" not in page


def test_a_figure_that_is_no_mean_over_questions_is_shown_without_a_gain(
    client: TestClient, filled: ObjectStore
) -> None:
    records = RunRecords(filled)
    head, detail = records.detail(records.find(SECOND))
    more = [{"name": "perplexity", "value": value, "num_questions": 4} for value in (5.0, 4.5)]

    def with_more(each: StageCall) -> StageCall:
        if each.kind != "SuiteReport":
            return each
        return each.model_copy(update={"result": {**each.result, "metrics": [*each.result["metrics"], more.pop(0)]}})

    records.write(head, detail.model_copy(update={"calls": tuple(map(with_more, detail.calls))}))
    page = client.get(f"/suites/compare?model={ONE}&model={OTHER}").text
    expected = (
        '<th class="long">perplexity</th><td>5.0000</td><td>4.5000</td><td colspan="2"><small>not paired by question'
    )
    assert expected in page and "+0.5000" in page


def test_a_run_shows_its_suites_beside_the_held_out_reward(client: TestClient) -> None:
    page = client.get(f"/runs/{SECOND}").text
    assert re.search(r"<th>Suite</th><th>before</th><th>after PPO</th>", page)
    assert "0.250 <small>accuracy, 0.046 to 0.699" in page
    curves = {curve["name"]: curve for curve in client.get(f"/runs/{SECOND}/curves.json").json()["curves"]}
    found = curves["suite sums: accuracy"]
    assert (found["x"], found["y"], found["labels"]) == ([1, 2], [0.25, 0.75], ["before", "after PPO"])
    assert found["lower"][0] < 0.25 < found["upper"][0] and "lower" not in curves["ppo_update: loss"]


def test_curves_as_a_table(client: TestClient) -> None:
    lines = client.get(f"/runs/{FIRST}/curves.csv").text.splitlines()
    assert lines[0] == "curve,step,value"
    assert lines[3:5] == ["suite sums: accuracy,1,0.25", "suite sums: accuracy,2,0.25"]
    assert lines[5:7] == ["ppo_update: loss,1,1.0", "ppo_update: loss,2,0.5"]
    assert len(lines) == 1 + 2 * 2 + 2 * 29


def test_a_table_is_saved_whatever_the_name_of_its_run(filled: ObjectStore, client: TestClient) -> None:
    record(filled, "44444444-dddd", 3, 0.5, name='n\u20ac"\r\nx-own: 1')
    answer = client.get("/runs/44444444-dddd/curves.csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="n-x-own-1-44444444.csv"'


@pytest.fixture
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def serve(filled: ObjectStore, tmp_path: Path, start_process, server_logs: ServerLogs) -> Callable[..., str]:
    """Starts a command that serves what was filled; its address."""

    def start(*command: str) -> str:
        log = server_logs.watch(tmp_path / f"{command[0]}.log")
        settings = {
            "ROLLOUT_STORAGE": filled.url,
            "ROLLOUT_DATABASE": f"sqlite:///{tmp_path}/rollout.db",
            "PREFECT_API_URL": "http://127.0.0.1:9/api",
            "STORE_KEY": KEY,
        }
        program = "from deployments.cli import app; app()"
        with log.open("w") as output:
            process = start_process("-c", program, *command, "--port", "0", env=settings, stdout=output)
        from tests.flows.conftest import wait_for

        found = wait_for(lambda: re.search(r"serving at (\S+)", log.read_text()), "the server", process=None)
        assert process.poll() is None
        return found[1]

    return start


@pytest.fixture
def address(serve: Callable[..., str]) -> str:
    """Of `rollout ui`."""
    return serve("ui")


PICTURES = Path(__file__).with_name("pages.png")
"""What each page looks like, wide and light beside narrow and dark, in the order of `PAGES`."""
COLUMNS = {(1280, "light"): 0, (390, "light"): None, (1280, "dark"): None, (390, "dark"): 1}
"""The widths and colours that every page is looked at in, and which column of the pictures shows it."""


def same_address(page: Any, objects: ObjectStore) -> None:
    """The temporary folder's name is longer or shorter from run to run, and with it the lines that a page is moved
    by."""
    page.evaluate(RENAMED, [objects.url, "file:///tmp/a-test/of-every-page/objects"])


def test_every_page_in_a_browser(filled: ObjectStore, address: str, browser: Any, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    with lease(filled, f"night2 (flow run {RUNNING})"):
        page.goto(f"{address}/rollouts")
        paths = (*PAGES, page.locator("tbody a").first.get_attribute("href"))
        shown = Image.new("L", (2 * TILE[0], len(paths) * TILE[1]))
        for (width, scheme), column in COLUMNS.items():
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            for row, path in enumerate(paths):
                page.goto(address + path)
                page.wait_for_load_state("networkidle")
                where = f"{path}, {width} wide and {scheme}"
                assert page.title().endswith("rollout"), f"{where}: {page.title()}"
                assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{where}, is wider"
                assert page.locator("main img").count() == 0, f"{where}, shows a text as HTML"
                violations = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]}).response["violations"]
                assert [(each["id"], each["nodes"][0]["html"]) for each in violations] == [], where
                if column is not None:
                    same_address(page, filled)
                    shown.paste(tile_of(page.screenshot()), (column * TILE[0], row * TILE[1]))
    # Of the page that is none.
    assert [each for each in problems if "404" not in each] == [] and len(problems) == len(COLUMNS)
    shown.save(tmp_path / "pages.png")
    known = Image.open(PICTURES)
    assert known.size == shown.size, f"there are other pages; if that is meant, {tmp_path}/pages.png is {PICTURES}"
    for row, path in enumerate(paths):
        for column, what in enumerate(("wide and light", "narrow and dark")):
            corner = (column * TILE[0], row * TILE[1])
            box = (*corner, corner[0] + TILE[0], corner[1] + TILE[1])
            differs = difference(shown.crop(box), known.crop(box))
            assert differs < LIKENESS, (
                f"{path}, {what}, looks other than before ({differs:.0%}); if that is meant, {tmp_path}/pages.png is "
                f"the new {PICTURES}"
            )


def test_pictures_of_pages_that_lost_their_style_or_colours_differ(
    filled: ObjectStore, address: str, browser: Any
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.goto(address)

    def seen() -> Image.Image:
        same_address(page, filled)
        return tile_of(page.screenshot())

    plain = seen()
    page.emulate_media(color_scheme="dark")
    assert difference(plain, seen()) > 0.9
    page.emulate_media(color_scheme="light")
    page.route("**/ui.css*", lambda route: route.abort())
    page.goto(address)
    assert difference(plain, seen()) > LIKENESS
    page.unroute("**/ui.css*")
    page.goto(address)
    page.evaluate("document.body.style.fontFamily = 'serif'")
    assert difference(plain, seen()) < LIKENESS, "another font is the same page"


def test_the_picture_of_the_documents_looks_like_the_page_of_a_run(
    filled: ObjectStore, address: str, browser: Any, tmp_path: Path
) -> None:
    """It was taken of the nightly example; here is a record like the one that leaves."""
    calls, blob = [], content_id("s", [])
    for number in range(1, 17):
        of = {"samples": blob, "completions": content_id("c", [number]), "scores": blob, "num_samples": 256}
        label = f"iteration {number}"
        calls += [
            call("batch_inference", number, label=label, kind="Completions", result={**of, "model": MODEL}),
            call("score_rewards", number, label=label, kind="Scores", result={**of, "mean": number**2 / 1600}),
        ]
    moments = (
        Moment(name="before", reward=0.0),
        Moment(name="after SFT", reward=0.307),
        Moment(name="after PPO", reward=0.678),
    )
    rows = "".join(json.dumps({"step": n, "loss": 0.2 * (-1) ** n}) + "\n" for n in range(1, 97))
    metrics = MetricsOf(stage="ppo_update", label="", metrics=filled.put_bytes(rows.encode()))
    head = RunHead(
        id="414c7564-0000",
        name="nightly-tiny",
        flow="nightly",
        tags=("example",),
        state="completed",
        began=BEGAN,
        written=BEGAN,
        seconds=212.0,
        model="data/example/model",
        algorithm="SFT, PPO",
        data="data/example/prompts.jsonl",
        held_out=moments,
        promoted=True,
        reason="held-out reward 0.0000 -> 0.6777",
        metrics=(metrics,),
    )
    facts = {"checkpoint": MODEL, "report": "data/report"}
    RunRecords(filled).write(head, RunDetail(config={}, facts=facts, calls=tuple(calls)))
    known = Path(__file__).parents[2] / "docs" / "images" / "run.png"
    width, height = Image.open(known).size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    page.goto(f"{address}/runs/{head.id}")
    page.wait_for_selector(".chart canvas")
    taken = page.screenshot(path=str(tmp_path / "run.png"))
    differs = difference(tile_of(taken), tile_of(known.read_bytes()))
    assert differs < LIKENESS, f"{known} shows what a run's page was ({differs:.0%}); take one of the nightly example"
    page.goto(f"{address}/")
    assert difference(tile_of(page.screenshot()), tile_of(known.read_bytes())) > LIKENESS, "another page"


def test_runs_are_searched_compared_and_looked_into(filled: ObjectStore, address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/?q=night1")
    assert page.locator("tbody tr").count() == 1
    page.goto(address)
    page.get_by_label("Sort by").select_option("gain")
    page.get_by_role("button", name="Apply").click()
    names = page.locator("tbody tr td:nth-child(2) a").all_inner_texts()
    assert names[:2] == ["night1", "night0"]
    for box in page.get_by_role("checkbox").all()[:2]:
        box.check()
    page.get_by_role("button", name="Compare the chosen runs").click()
    page.wait_for_selector(".chart canvas")
    assert page.get_by_text("seed", exact=True).count() == 1
    assert page.get_by_text("gain of night1 22222222 over night0 11111111").count() == 1
    assert page.get_by_text("+0.250").count() == 1
    page.get_by_role("link", name="Got worse").click()
    assert page.get_by_text("No sample is like that").count() == 1
    page.get_by_role("link", name="Got better").click()
    assert page.locator(".texts tbody tr").count() == 1
    page.goto(f"{address}/runs/{FIRST}")
    page.get_by_label("Lay over").select_option(SECOND)
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector(".chart canvas")
    series = [chart.locator(".u-series").count() for chart in page.locator(".chart").all()]
    assert series[0] == 7, "moment, and of both runs the figure with both ends of its interval"
    assert series[2] == 3, "step and both runs"
    page.goto(f"{address}/runs/{FIRST}")
    page.wait_for_selector(".chart canvas")
    assert page.locator(".chart h3 span").all_inner_texts() == [
        "suite sums: accuracy",
        "suite sums: mean",
        "ppo_update: loss",
        "ppo_update: kl",
    ]
    with page.expect_download() as download:
        page.get_by_label("Save ppo_update: loss as PNG").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    page.get_by_text("Log, its last lines").click()
    page.wait_for_selector("text=gave no log")


def test_the_same_moment_of_compared_runs_stands_at_the_same_place(address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/runs/{FIRST}")
    first = ["before", "after SFT", "after iteration 2", "after iteration 10", "after PPO"]
    second = ["before", "after iteration 5", "after iteration 10", "after GRPO"]
    curves = [{"x": [1, 2, 3, 4, 5], "labels": first}, {"x": [1, 2, 3, 4], "labels": second}, {"x": [3, 7]}]
    placed = page.evaluate("curves => aligned(curves).map((curve) => curve.x)", curves)
    assert placed == [[1, 2, 3, 5, 6], [1, 4, 5, 7], [3, 7]]

    ticks = "([width, last]) => spaced({bbox: {width: width * devicePixelRatio}}, 1, last, 100)"
    assert page.evaluate(ticks, [1000, 5]) == [1, 2, 3, 4, 5]
    assert page.evaluate(ticks, [300, 9]) == [1, 4, 7], "names do not overlap"


def test_samples_and_rollouts_are_looked_for(filled: ObjectStore, address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/runs/{FIRST}")
    page.locator("#samples").get_by_role("link").first.click()
    assert page.locator(".texts tbody tr").count() == 2
    page.get_by_label("Reward below").fill("0.5")
    page.get_by_label("Text").fill("<script>")
    page.get_by_role("button", name="Apply").click()
    assert page.locator(".texts tbody tr").count() == 1
    page.get_by_role("link", name="Sample 0").click()
    tokens = page.locator("pre.tokens span")
    assert tokens.all_inner_texts() == [NASTY, " </pre><h1>"]
    assert "log-probability -0.5000, 60.7 %" in (tokens.first.get_attribute("title") or "")
    assert tokens.first.evaluate("each => getComputedStyle(each).textDecorationStyle") == "dotted", (
        "by more than colour"
    )
    page.get_by_role("link", name="advantage", exact=True).press("Enter")
    page.get_by_text("are not known: it is held out").wait_for()  # a key that is pressed waits for no page
    page.goto(f"{address}/runs/{FIRST}/samples/0?label={quote(LEARNED)}")
    page.get_by_role("link", name="advantage", exact=True).click()
    styles = [each.evaluate("each => getComputedStyle(each).textDecorationStyle") for each in tokens.all()]
    assert styles == ["double", "dotted"] and page.get_by_text("As the loss of ppo_update").count() == 1
    assert ", advantage +1.5" in (tokens.first.get_attribute("title") or "")
    page.get_by_role("link", name="Next").click()
    assert "by=advantage" in page.url and page.get_by_text("-0.100").count() == 1, "the switch stays"
    page.get_by_role("link", name="log-probability").click()
    assert "by=logprob" in page.url and page.get_by_label("Probability of each token").count() == 1
    page.goto(f"{address}/runs/{FIRST}/samples/0")
    page.get_by_role("link", name="Next").click()
    assert page.get_by_role("heading", level=1).inner_text().startswith("Sample 1")
    for asked, found in (
        ("q=%3Cscript%3E", 1),
        ("q=%22%27%7B", 1),
        ("status=succeeded", 1),
        ("status=failed", 0),
        ("below=0.5", 1),
        ("below=0.25", 0),
        (f"run={FIRST}", 0),
    ):
        page.goto(f"{address}/rollouts?{asked}")
        assert page.locator("tbody tr:not(:has(.empty))").count() == found, asked


def test_a_run_under_way_shows_what_comes_without_a_reload(filled: ObjectStore, address: str, browser: Any) -> None:
    page = browser.new_page()
    with lease(filled, f"night2 (flow run {RUNNING})"):
        page.goto(f"{address}/runs/{RUNNING}")
        assert page.locator("#facts .state").inner_text() == "running"
        page.evaluate("window.same = true")
        rows = tuple({"step": float(step), "loss": 1.0} for step in range(500, 1500))
        record(filled, RUNNING, 2, 0.5, state="running", live=Live(title="ppo_update 1", num_steps=9999, rows=rows))
        page.wait_for_selector("text=step 1499 of 9999", timeout=20_000)
        record(filled, RUNNING, 2, 0.5, state="completed")
        page.wait_for_selector("#facts .state.completed", timeout=20_000)
        assert page.evaluate("window.same")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_server_has_the_same_pages_below_ui(
    serve: Callable[..., str], tmp_path: Path, browser: Any, workers: int
) -> None:
    database = f"sqlite:///{tmp_path}/rollout.db"
    address = serve("store", "serve", "--database", database, "--workers", str(workers), "--api-key-env", "STORE_KEY")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("response", lambda answer: problems.append(answer.url) if answer.status >= 400 else None)
    page.goto(f"{address}/ui")
    assert page.url == f"{address}/ui/login?next=%2Fui%2F"
    page.get_by_label("Key").fill(KEY)
    page.get_by_role("button", name="Look").click()
    assert page.url == f"{address}/ui/"
    page.wait_for_load_state()  # the address changes before there is anything of the page
    assert page.locator("header").evaluate("each => getComputedStyle(each).display") == "flex", "no style was loaded"
    links = page.locator("a, form, link, script").evaluate_all(
        "all => all.map(each => each.href || each.action || each.src || '')"
    )
    own = [link for link in links if link.startswith(address)]
    assert len(own) > 10 and all(link.startswith(f"{address}/ui/") for link in own)
    page.get_by_role("link", name="night1").click()
    page.wait_for_selector(".chart canvas")
    page.get_by_text("Log, its last lines").click()
    page.wait_for_selector("text=gave no log")
    page.goto(f"{address}/ui/rollouts")
    page.locator("tbody a").first.click()
    assert page.get_by_role("heading", name="Attempts").count() == 1
    assert problems == []
    # The store's own routes are as they were; who may look at pages may not change anything.
    assert page.request.get(f"{address}/v1/agl/health").ok
    assert page.request.get(f"{address}/v1/agl/statistics").status == 401
    assert page.request.get(f"{address}/v1/agl/statistics", headers={"authorization": f"Bearer {KEY}"}).ok
    assert page.request.post(f"{address}/ui/").status == 405
    assert page.request.get(f"{address}/uix").status == 401


def test_a_store_server_without_its_storage_serves_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_STORAGE", "ftp://nowhere")
    store = SqlLightningStore.from_url(f"sqlite:///{tmp_path}/rollout.db")
    settings = ServeSettings(
        store.url, "127.0.0.1", 0, pages=MOUNTED_PAGES, cors_allow_origins=["http://other.example"]
    )
    app = with_pages(create_app(store, settings.app_settings()), store, settings)
    client = TestClient(app, base_url="http://localhost")
    assert client.get("/v1/agl/statistics").json()["total_rollouts"] == 0
    assert client.get("/ui/").status_code == 503 and "ftp" in client.get("/ui/").text
    # An origin that may use the store may not read pages.
    elsewhere = {"origin": "http://other.example"}
    assert client.get("/v1/agl/statistics", headers=elsewhere).headers["access-control-allow-origin"]
    assert client.get("/ui/", headers=elsewhere).status_code == 403


def test_workers_of_runs_that_ended_are_not_shown_in_the_queue() -> None:
    now, gone = 1e9, ProcessName(this_machine(), 2**22 - 1, 1)
    claimed = Worker(worker_id="host:elsewhere:1:2", last_dequeue_time=now - 60, last_idle_time=now - 30)
    assert _is_there(claimed, now) and last_sign(claimed) == now - 30
    assert not _is_there(claimed, now + FORGOTTEN_SECONDS), "its last sign of life is too long ago"
    assert not _is_there(claimed.model_copy(update={"worker_id": f"host:{gone}"}), now), "its process has ended"
    assert not _is_there(Worker(worker_id="never"), now)
