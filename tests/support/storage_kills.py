"""Kills of writers, housekeeping and restores, at random moments, in a folder, on S3 (moto) or on GCS (the stand-in).

Run: python -m tests.support.storage_kills [--store folder|s3|gcs] [--kills 200] [--seed 1] [--pause 3]

Two runs, two housekeepers and a reader work on one store; each is killed and started again and again. Days are seconds
here, and so are the grace period and what goes with it; the rest is as in earnest. A run puts the same few bytes again
and again, which others are deleting, looks after everything it has put or found since it began, and labels some of its
training states. The reader restores labelled ones. At the end nothing is missing, everything that is labelled restores
to its id, and two last rounds leave nothing that is not needed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.retention import Retention
from rollout_core.objects import ObjectStore, SnapshotStore, backends, buckets, object_store as store
from rollout_core.objects.retention import rounds as housekeeping, run_leases as leases
from rollout_core.objects.retention.usage import measure
from rollout_core.objects.verification import verify_store
from rollout_core.promotion.history import histories
from tests.support.gcp_server import google_cloud

GRACE_SECONDS = 3.0
RULES = Retention(keep_states=1, state_days=2.0, result_days=4.0, note_days=30.0, grace_hours=GRACE_SECONDS / 3600)
VARIANTS = 6
BUCKET = "kills"


def scale_down() -> None:
    """A day takes a second."""
    housekeeping._DAY, housekeeping.MIN_GRACE_HOURS = 1.0, 0.0
    for module in (backends, buckets, store, leases):
        module.TOUCH_AFTER_SECONDS = 0.0
    leases._MARGIN_SECONDS, buckets.REMOTE_SETTLE_SECONDS, backends.LocalFiles.settle_seconds = 1.0, 1.0, 0.3


def weights(number: int) -> bytes:
    return random.Random(number).randbytes(20_000)


def write_run(objects: ObjectStore, folder: Path, draw: random.Random, acknowledged: Path) -> None:
    """Iterations of a run that never ends by itself."""
    snapshots, run = SnapshotStore(objects), f"run-{os.getpid()}-{draw.randrange(10**6)}"
    with leases.lease(objects, run), acknowledged.open("a") as told:
        ours: list[tuple[ContentId, ContentId]] = []
        for step in range(10_000):
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "model").mkdir(parents=True)
            variant = draw.randrange(VARIANTS)
            (folder / "model" / "weights").write_bytes(weights(variant))
            (folder / "moments").write_bytes(weights(draw.randrange(VARIANTS, 2 * VARIANTS)) + str(step).encode())
            key = content_id("kill", [variant, draw.randrange(4)])
            leases.renew_ref(objects, f"results/{key}")
            model = _found(objects, key)
            if model is None:
                model = objects.put_tree(folder / "model")
                document = {"metadata": {"storage_key": key}, "result": json.dumps({"model": model})}
                objects.set_ref(f"results/{key}", objects.put_json(document))
            ours.append((key, model))
            state = snapshots.save(folder, run_id=run, step=step, algorithm="ppo", meta={"run": "kills"})
            if draw.random() < 0.1:
                snapshots.set_label(state.id, "gold")
                told.write(f"{state.id}\n")
                told.flush()
            for _, model in draw.sample(ours, min(4, len(ours))):
                assert objects.tree_is_present(model), f"model {model} of a run under way is gone"
            assert snapshots.is_present(state.id), f"the state {state.id} that was just saved is gone"


def _found(objects: ObjectStore, key: ContentId) -> ContentId | None:
    named = objects.get_ref(f"results/{key}")
    return None if named is None else ContentId(json.loads(objects.get_json(named)["result"])["model"])


def keep_house(objects: ObjectStore) -> None:
    while True:
        done = housekeeping.clean(objects, RULES, histories=histories(objects))
        assert not done.garbage.unreadable, done.garbage.unreadable
        time.sleep(0.05)


def restore(objects: ObjectStore, folder: Path, draw: random.Random, acknowledged: Path) -> None:
    while True:
        known = acknowledged.read_text().split("\n")[:-1]
        if known:
            shutil.rmtree(folder, ignore_errors=True)
            SnapshotStore(objects).restore(ContentId(draw.choice(known)), folder)
        time.sleep(0.05)


def act(role: str, url: str, options: dict[str, Any], scratch: Path, seed: int, acknowledged: Path) -> None:
    scale_down()
    objects, draw = ObjectStore.from_url(url, storage_options=options), random.Random(seed)
    if role == "run":
        write_run(objects, scratch, draw, acknowledged)
    elif role == "housekeeping":
        keep_house(objects)
    else:
        restore(objects, scratch, draw, acknowledged)


ROLES = ("run", "run", "housekeeping", "housekeeping", "restore")


def campaign(url: str, options: dict[str, Any], folder: Path, kills: int, seed: int, pause: float) -> None:
    draw, acknowledged, errors = random.Random(seed), folder / "acknowledged", folder / "errors"
    acknowledged.touch()
    counts: dict[str, int] = dict.fromkeys(ROLES, 0)

    def start(place: int) -> subprocess.Popen[bytes]:
        arguments = [
            ROLES[place],
            url,
            json.dumps(options),
            str(folder / f"scratch-{place}"),
            str(draw.randrange(10**9)),
        ]
        with errors.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.support.storage_kills", "--act", *arguments, str(acknowledged)],
                stderr=output,
            )

    acting = [start(place) for place in range(len(ROLES))]
    try:
        for _ in range(kills):
            time.sleep(draw.uniform(0.05, pause))
            place = draw.randrange(len(ROLES))
            if acting[place].poll() is not None:
                raise SystemExit(f"{ROLES[place]} failed:\n{errors.read_text()[-4000:]}")
            acting[place].kill()
            acting[place].wait()
            counts[ROLES[place]] += 1
            acting[place] = start(place)
    finally:
        for process in acting:
            process.send_signal(signal.SIGKILL)
            process.wait()
    tell(ObjectStore.from_url(url, storage_options=options), folder, counts, acknowledged, errors)


def tell(objects: ObjectStore, folder: Path, counts: dict[str, int], acknowledged: Path, errors: Path) -> None:
    scale_down()
    gold = sorted(set(acknowledged.read_text().split("\n")[:-1]))
    for number, snapshot_id in enumerate(gold):
        SnapshotStore(objects).restore(ContentId(snapshot_id), folder / f"restored-{number}")  # verifies the id
    damage = verify_store(objects).damage
    before = measure(objects)
    time.sleep(1.1)  # a bucket dates by seconds
    for _ in range(2):  # what the first takes away of notes, the second takes of their bytes
        housekeeping.clean(objects, RULES.model_copy(update={"grace_hours": 0.0}), histories=histories(objects))
    after = measure(objects)
    print(
        json.dumps(
            {
                "store": objects.url.partition(":")[0],
                "kills": counts,
                "labelled and restored": len(gold),
                "damaged or missing": len(damage),
                "bytes before the last round": before.total_bytes,
                "bytes after": after.total_bytes,
                "not needed after": after.unneeded_bytes + after.leftover_bytes,
                "errors": errors.read_text()[-2000:],
            }
        ),
        flush=True,
    )
    if damage or after.unneeded_bytes + after.leftover_bytes or errors.read_text():
        raise SystemExit(1)


@contextmanager
def in_a_folder(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"{folder}/store", {}


@contextmanager
def on_s3(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "moto.log").open("wb") as output:
        command = [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        objects = ObjectStore.from_url(f"s3://{BUCKET}/store", storage_options=options)
        for _ in range(200):
            try:
                objects.files.fs.call_s3("create_bucket", Bucket=BUCKET)  # type: ignore[attr-defined]
                break
            except OSError:
                time.sleep(0.2)
        yield objects.url, options
    finally:
        server.kill()
        server.wait()


@contextmanager
def on_gcs(_: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with google_cloud(BUCKET) as server:
        yield f"gs://{BUCKET}/store", {"endpoint_url": server.url, "token": "anon"}


STORES = {"folder": in_a_folder, "s3": on_s3, "gcs": on_gcs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=STORES, default="folder")
    parser.add_argument("--pause", type=float, default=3.0, help="most seconds between kills; more on a busy machine")
    parser.add_argument("--act", nargs=6)
    given = parser.parse_args()
    if given.act:
        role, url, options, scratch, seed, acknowledged = given.act
        act(role, url, json.loads(options), Path(scratch), int(seed), Path(acknowledged))
        return
    with tempfile.TemporaryDirectory() as name, STORES[given.store](Path(name)) as (url, options):
        campaign(url, options, Path(name), given.kills, given.seed, given.pause)


if __name__ == "__main__":
    main()
