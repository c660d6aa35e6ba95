"""Messages of SQS (moto) and Pub/Sub (the stand-in) become rollouts, exactly one each, whatever is killed or away."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from botocore.session import get_session

from rollout_core.base.errors import ConfigError, Recoverable, Stopped
from rollout_core.base.queue_settings import QueueSettings, queue_settings
from rollout_core.store import EnqueueRolloutRequest, InMemoryLightningStore, Rollout, SqlLightningStore
from rollout_core.store.bridge.bridge import Bridge, rollout_request
from rollout_core.store.bridge.bridge_program import look_at_queue, open_queue
from rollout_core.store.bridge.queues import Message
from rollout_core.store.bridge.sqs import SQSQueue
from tests.store.patience import FOREVER, LONG
from tests.store.ports import own_port
from tests.support.gcp_server import GoogleCloud, service_account

PROJECT = "tests"


class Cloud(Protocol):
    """A queue with its dead letters, as a producer and an operator see them."""

    address: str
    dead_letter: str

    def send(self, bodies: Sequence[str]) -> None: ...

    def left(self) -> int:
        """Messages that were not acknowledged."""
        ...

    def dead(self) -> list[str]: ...

    def limit_dead_letters(self, most_bytes: int) -> None:
        """Larger ones are not taken."""
        ...


@dataclass
class SQS:
    client: Any
    address: str
    dead_letter: str

    def send(self, bodies: Sequence[str]) -> None:
        for start in range(0, len(bodies), 10):
            entries = [{"Id": str(n), "MessageBody": body} for n, body in enumerate(bodies[start : start + 10])]
            self.client.send_message_batch(QueueUrl=self.address, Entries=entries)

    def left(self) -> int:
        wanted = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        told = self.client.get_queue_attributes(QueueUrl=self.address, AttributeNames=wanted)["Attributes"]
        return sum(int(value) for value in told.values())

    def dead(self) -> list[str]:
        got = self.client.receive_message(QueueUrl=self.dead_letter, MaxNumberOfMessages=10, VisibilityTimeout=0)
        return sorted(found["Body"] for found in got.get("Messages", ()))

    def limit_dead_letters(self, most_bytes: int) -> None:
        self.client.set_queue_attributes(QueueUrl=self.dead_letter, Attributes={"MaximumMessageSize": str(most_bytes)})


@dataclass
class PubSub:
    google: GoogleCloud
    address: str
    dead_letter: str

    def send(self, bodies: Sequence[str]) -> None:
        for body in bodies:
            self.google.pubsub.publish(self.address.replace("subscriptions", "topics"), body.encode())

    def left(self) -> int:
        return len(self.google.pubsub.bodies(self.address))

    def dead(self) -> list[str]:
        return sorted(
            body.decode() for body in self.google.pubsub.bodies(self.dead_letter.replace("topics", "subscriptions"))
        )

    def limit_dead_letters(self, most_bytes: int) -> None:
        self.google.pubsub.most_bytes = most_bytes


def on_sqs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, receives: int | None) -> SQS:
    options = request.getfixturevalue("s3")
    monkeypatch.setattr("rollout_core.store.bridge.sqs.WAIT_SECONDS", 1)
    for key, value in {
        "AWS_ENDPOINT_URL": options["endpoint_url"],
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(key, value)
    client = get_session().create_client("sqs")
    dead = client.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    arn = client.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": receives})
    attributes = {} if receives is None else {"RedrivePolicy": policy}
    return SQS(client, client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"], dead)


def on_pubsub(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, receives: int | None
) -> PubSub:
    google: GoogleCloud = request.getfixturevalue("google")
    monkeypatch.setattr(google.pubsub, "most_bytes", google.pubsub.most_bytes)  # which a test may lower
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", google.url.removeprefix("http://"))
    dead = google.pubsub.add(PROJECT, f"{name}-dead").replace("subscriptions", "topics")
    return PubSub(google, google.pubsub.add(PROJECT, name, None if receives is None else (dead, receives)), dead)


Make = Callable[..., Cloud]


@pytest.fixture(params=["sqs", "pubsub"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Makes a queue of a kind; ``receives`` is after how many its own policy takes a message to the dead letters."""
    build = on_sqs if request.param == "sqs" else on_pubsub
    return lambda receives=None: build(request, monkeypatch, tmp_path.name.strip("_")[-40:], receives)


def settings(cloud: Cloud, lease: int = 20, *, bury: bool = True) -> QueueSettings:
    kind = "pubsub" if cloud.address.startswith("projects/") else "sqs"
    return QueueSettings(kind, cloud.address, lease, cloud.dead_letter if bury else None)


class Flaky(InMemoryLightningStore):
    """Away for so long from the first time that it is asked; then it stores, and loses so many answers."""

    def __init__(self, *, away_seconds: float = 0.0, lost_answers: int = 0) -> None:
        super().__init__()
        self.away_seconds, self.lost_answers = away_seconds, lost_answers
        self.asked_at: float | None = None

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        self.asked_at = time.monotonic() if self.asked_at is None else self.asked_at
        if time.monotonic() - self.asked_at < self.away_seconds:
            raise Recoverable("the store is away")
        stored = await super().enqueue_many_rollouts(rollouts)
        if self.lost_answers:
            self.lost_answers -= 1
            raise Recoverable("the answer was lost")
        return stored


async def carried(of: QueueSettings, store: Any, until: Callable[[], bool]) -> Bridge:
    """A bridge that has run until something holds, and was then stopped."""
    queue, stop = open_queue(of), asyncio.Event()
    bridge = Bridge(queue, store, stop)
    running = asyncio.create_task(bridge.run())
    end = time.monotonic() + LONG
    try:
        while not running.done() and not await asyncio.to_thread(until):
            assert time.monotonic() < end, f"it did not come to that: {bridge.tally}"
            await asyncio.sleep(0.05)
        stop.set()
        await running
    finally:
        await queue.close()
    return bridge


async def inputs_of(store: Any) -> Counter[Any]:
    return Counter(json.dumps(rollout.input) for rollout in await store.query_rollouts())


def rows(numbers: range) -> list[str]:
    return [json.dumps({"input": {"number": number}, "metadata": {"of": "test"}}) for number in numbers]


def as_inputs(numbers: range) -> Counter[str]:
    return Counter(json.dumps({"number": number}) for number in numbers)


async def test_each_message_is_one_rollout_whose_metadata_name_it(make: Make) -> None:
    cloud, store = make(), Flaky(lost_answers=2)
    cloud.send(
        [
            *rows(range(40)),
            json.dumps({"input": None, "mode": "val", "rollout_id": "mine", "config": {"max_attempts": 3}}),
        ]
    )
    bridge = await carried(settings(cloud), store, lambda: cloud.left() == 0)
    assert (bridge.tally.stored, bridge.tally.refused) == (41, 0)
    assert await inputs_of(store) == as_inputs(range(40)) + Counter(["null"])
    mine = await store.get_rollout_by_id("mine")
    assert mine is not None and (mine.mode, mine.config.max_attempts) == ("val", 3)
    others = [rollout for rollout in await store.query_rollouts() if rollout.rollout_id != "mine"]
    assert {(rollout.metadata or {})["queue"] for rollout in others} == {cloud.address}
    assert {(rollout.metadata or {})["of"] for rollout in others} == {"test"}
    assert len({(rollout.metadata or {})["message"] for rollout in others}) == 40


async def test_leases_are_renewed_while_the_store_is_away(make: Make) -> None:
    # They are renewed two seconds or a little more after the last time; a machine may be late by as many.
    cloud, store = make(), Flaky(away_seconds=6.0)
    cloud.send(rows(range(25)))
    bridge = await carried(settings(cloud, lease=5), store, lambda: cloud.left() == 0)
    assert await inputs_of(store) == as_inputs(range(25))
    assert bridge.tally.received == bridge.tally.stored == 25, "no lease ended meanwhile"


async def test_what_no_rollout_can_be_made_of_goes_to_the_dead_letters(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    cloud, store = make(), InMemoryLightningStore()
    await store.enqueue_rollout("another input", rollout_id="taken")
    bad = [
        "not JSON",
        '{"input": 1, "a\\u0000": 2}',
        '{"inputs": 1}',
        '{"input": NaN}',
        '{"input": 1, "rollout_id": "taken"}',
        "[]",
    ]
    cloud.send([*rows(range(5)), *bad])
    bridge = await carried(settings(cloud), store, lambda: cloud.left() == 0)
    assert (bridge.tally.stored, bridge.tally.refused) == (5, 6)
    assert cloud.dead() == sorted(bad)
    assert "a?" in caplog.text and "\0" not in caplog.text, "services take no control characters"
    assert await inputs_of(store) == as_inputs(range(5)) + Counter(['"another input"'])


async def test_without_dead_letters_of_the_settings_the_queues_own_policy_takes_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_core.store.bridge.bridge.REFUSED_SECONDS", 0)
    cloud, store = make(receives=3), InMemoryLightningStore()
    cloud.send(["not JSON", *rows(range(3))])
    bridge = await carried(settings(cloud, bury=False), store, lambda: cloud.dead() == ["not JSON"])
    assert (bridge.tally.stored, bridge.tally.refused) == (3, 3)


async def test_what_the_dead_letters_do_not_take_is_left_to_the_queues_own_policy(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout_core.store.bridge.bridge.REFUSED_SECONDS", 0)
    cloud, store, large = make(receives=2), InMemoryLightningStore(), "not JSON" + "x" * 2000
    cloud.limit_dead_letters(1024)
    cloud.send([large, *rows(range(3))])
    bridge = await carried(settings(cloud), store, lambda: cloud.dead() == [large])
    assert (bridge.tally.stored, bridge.tally.refused) == (3, 2)
    assert caplog.text.count("the dead letters do not take message") == 2


async def test_a_pull_is_empty_only_where_a_service_was_asked_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(f"rollout_core.store.bridge.pubsub.{name}_SECONDS", value)

    wait_for(PULL=0.3, CONNECT=LONG, CALL=LONG)
    said = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(said)
        await reader.read()
        writer.close()

    async def received(port: int) -> Sequence[Message]:
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", f"127.0.0.1:{port}")
        queue = open_queue(QueueSettings("pubsub", "projects/tests/subscriptions/x", 20))
        try:
            return await queue.receive()
        finally:
            await queue.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await received(port) == []
        wait_for(PULL=LONG, CALL=0.3)
        said = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
        with pytest.raises(Recoverable, match="does not answer in time"):
            await received(port)
    wait_for(CONNECT=0.3, CALL=LONG)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        with pytest.raises(Recoverable, match="does not answer in time: Connection timeout"):
            await received(full.getsockname()[1])


async def test_a_stopped_bridge_gives_back_what_it_could_not_store(make: Make) -> None:
    cloud = make()
    cloud.send(rows(range(10)))
    stopped = await carried(
        settings(cloud, lease=int(FOREVER)), Flaky(away_seconds=FOREVER), lambda: cloud.left() == 10 and wait(1.0)
    )
    assert stopped.tally.stored == 0 and cloud.left() == 10
    store = InMemoryLightningStore()
    await carried(settings(cloud), store, lambda: cloud.left() == 0)
    assert await inputs_of(store) == as_inputs(range(10))


def wait(seconds: float) -> bool:
    time.sleep(seconds)
    return True


async def test_a_store_that_refuses_everybody_costs_no_message(make: Make) -> None:
    class Locked(InMemoryLightningStore):
        async def enqueue_many_rollouts(self, rollouts: Any) -> Any:
            raise ConfigError("wrong key")

        async def query_rollouts(self, *_: Any, **__: Any) -> Any:
            raise ConfigError("wrong key")

    cloud = make()
    cloud.send(rows(range(3)))
    with pytest.raises(ConfigError, match="wrong key"):
        await carried(settings(cloud), Locked(), lambda: False)
    assert cloud.left() == 3 and cloud.dead() == []


async def test_what_a_bridge_cannot_do_is_said_before_it_starts(make: Make, google: GoogleCloud) -> None:
    cloud = make()
    assert "refused" in await look_at_queue(settings(cloud))
    with pytest.raises(ConfigError, match="has no dead letters, so a message that is refused would come back for ever"):
        await look_at_queue(settings(cloud, bury=False))
    there = settings(cloud)
    with pytest.raises(ConfigError, match=r"there is no .*no-such"):
        await look_at_queue(QueueSettings(there.kind, cloud.address + "-no-such", 20))
    with pytest.raises(ConfigError, match=r"there is no .*no-such"):
        await look_at_queue(QueueSettings(there.kind, cloud.address, 20, cloud.dead_letter + "-no-such"))


async def test_a_bridge_waits_for_a_queue_and_a_store_that_start_later(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cloud, queue, asked = make(), open_queue(settings(make())), Counter[str]()
    look = queue.look

    async def starting(name: str, times: int) -> None:
        asked[name] += 1
        if asked[name] <= times:
            raise Recoverable(f"{name} starts")

    async def slow_look() -> str:
        await starting("the queue", 2)
        return await look()

    class Starting(InMemoryLightningStore):
        async def query_rollouts(self, *_: Any, **__: Any) -> Any:
            await starting("the store", 3)

    monkeypatch.setattr(queue, "look", slow_look)
    bridge = Bridge(queue, Starting(), asyncio.Event())
    assert "refused" in await bridge.begin(60.0)
    assert asked == {"the queue": 3, "the store": 4}
    assert caplog.text.count("the queue starts; trying again until it answers, for 60 s at most") == 1
    asked.clear()
    with monkeypatch.context() as patch:
        # Of a clock that this machine does not hold up: 0.1 s have passed at the second try.
        moments = itertools.count()
        patch.setattr("rollout_core.store.bridge.bridge.time", SimpleNamespace(monotonic=lambda: 0.06 * next(moments)))
        with pytest.raises(Recoverable, match=r"has not answered for 0 s: the queue starts"):
            await bridge.begin(0.1)
    asked.clear()
    bridge = Bridge(queue, Starting(), stop := asyncio.Event())
    stop.set()
    with pytest.raises(Stopped):
        await bridge.begin(60.0)

    class Silent(InMemoryLightningStore):
        async def query_rollouts(self, *_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

    asked["the queue"] = 2  # it answers from now on
    monkeypatch.setattr("rollout_core.store.bridge.bridge.LAST_CALL_SECONDS", 0.1)
    with pytest.raises(Recoverable, match="or the store has not answered within 1 s"):
        await Bridge(queue, Silent(), asyncio.Event()).begin(0.9)
    bridge = Bridge(queue, Silent(), stop := asyncio.Event())
    asyncio.get_running_loop().call_later(0.2, stop.set)
    with pytest.raises(Stopped):
        await bridge.begin(60.0)
    missing = open_queue(QueueSettings(settings(cloud).kind, cloud.address + "-no-such", 20))
    with pytest.raises(ConfigError, match=r"there is no .*no-such"):
        await Bridge(missing, Starting(), asyncio.Event()).begin(60.0)
    await queue.close()
    await missing.close()


async def test_pubsub_logs_in_by_an_accounts_key(
    google: GoogleCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = google.pubsub.add(PROJECT, "with-login", ("projects/tests/topics/x", 5))
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    monkeypatch.setattr("rollout_core.store.bridge.pubsub.SERVICE", google.url)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(service_account(tmp_path, google)))
    monkeypatch.setattr(google, "token", "right")
    about = QueueSettings("pubsub", address, 20, topic="projects/tests/topics/with-login")
    assert "of projects/tests/topics/with-login" in await look_at_queue(about)
    with pytest.raises(ConfigError, match="and the settings say projects/tests/topics/other"):
        await look_at_queue(QueueSettings("pubsub", address, 20, topic="projects/tests/topics/other"))
    monkeypatch.setattr(google, "denied", {"pubsub"})
    with pytest.raises(ConfigError, match=r"may not be used .*grant roles/pubsub.subscriber"):
        await look_at_queue(about)


async def test_the_region_in_a_queues_address_counts_before_that_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for host, region in (("sqs.eu-west-1.amazonaws.com", "eu-west-1"), ("sqs.example", "us-east-1")):
        queue = open_queue(QueueSettings("sqs", f"https://{host}/1/q", 20))
        assert isinstance(queue, SQSQueue)
        assert (await queue._opened()).meta.region_name == region
        await queue.close()


def test_a_message_is_the_same_rollout_each_time_it_comes() -> None:
    of = QueueSettings("sqs", "http://sqs/1/queue", 20)
    first = rollout_request(Message("a", b'{"input": 1}', "handle", 1), of)
    assert first == rollout_request(Message("a", b'{"input": 1}', "another handle", 2), of)
    assert first.rollout_id is not None and first.rollout_id.startswith("sqs-")
    assert first.rollout_id != rollout_request(Message("b", b'{"input": 1}', "handle"), of).rollout_id
    with pytest.raises(
        ConfigError, match=r"metadata: Input should be a valid dictionary.*expected an object with input"
    ):
        rollout_request(Message("a", b'{"input": 1, "metadata": 3}', "handle"), of)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            {"ROLLOUT_QUEUE": "my-queue"},
            "the queue is 'my-queue'; expected the URL of an SQS queue or",
        ),
        (
            {"ROLLOUT_QUEUE_LEASE_SECONDS": "5"},
            "LEASE_SECONDS is '5'; expected 10 to 43200 whole",
        ),
        ({"ROLLOUT_QUEUE_DEAD_LETTER": "https://sqs/1/q"}, "is the queue itself"),
        (
            {"ROLLOUT_QUEUE_DEAD_LETTER": "dead"},
            "DEAD_LETTER is 'dead'; expected the URL of an SQS queue",
        ),
    ],
)
def test_wrong_settings(environment: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_QUEUE", "https://sqs/1/q")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem):
        queue_settings()


# Processes


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from deployments.cli import main; main()", "store", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **environment}
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def port() -> Iterator[str]:
    with own_port() as port:
        yield str(port)


@pytest.mark.parametrize("make", [pytest.param("sqs", marks=pytest.mark.campaign), "pubsub"], indirect=True)
async def test_a_thousand_messages_come_once_each_though_bridges_are_killed_and_the_store_is_away(
    make: Make, tmp_path: Path, port: str
) -> None:
    # moto takes the longer for each call the more messages there are: a minute and a half in all.
    cloud, draw, database = make(), random.Random(3), f"sqlite:///{tmp_path}/fed.db"
    serve = ("serve", "--database", database, "--port", port)
    bridge = ("bridge", "--queue", cloud.address, "--server", f"http://127.0.0.1:{port}")
    settings = {"ROLLOUT_QUEUE_LEASE_SECONDS": "10", "ROLLOUT_QUEUE_DEAD_LETTER": cloud.dead_letter}
    server, bridges, kills = start(*serve), [], 0
    try:
        assert "serving at" in line_of(server)
        bridges += [start(*bridge, **settings) for _ in range(2)]
        assert all("refused" in line_of(one) for one in bridges)
        for begin in range(0, 1000, 100):
            await asyncio.to_thread(cloud.send, [*rows(range(begin, begin + 100)), f"poison {begin}"])
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            place = draw.randrange(2)
            if begin == 500:
                server.kill()
                server.wait()
            if begin % 200 == 100:
                bridges[place].kill()
                bridges[place].wait()
                bridges[place], kills = start(*bridge, **settings), kills + 1
            if begin == 700:
                await asyncio.sleep(3.0)
                server = start(*serve)
        end = time.monotonic() + LONG
        while await asyncio.to_thread(cloud.left):
            assert time.monotonic() < end and all(one.poll() is None for one in bridges), cloud.left()
            await asyncio.sleep(0.2)
        for one in bridges:
            one.send_signal(signal.SIGTERM)
        told = [one.communicate(timeout=LONG)[0] for one in bridges]
    finally:
        for one in (server, *bridges):
            one.kill()
            one.wait()
    assert [one.returncode for one in bridges] == [0, 0] and all("bridge ended: " in text for text in told)
    async with SqlLightningStore.from_url(database) as store:
        assert await inputs_of(store) == as_inputs(range(1000))
    assert set(cloud.dead()) <= {f"poison {begin}" for begin in range(0, 1000, 100)} and len(cloud.dead()) >= 10
    assert kills == 5
