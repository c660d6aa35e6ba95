"""A nightly run on S3, a third of whose exchanges fail in seven ways, ends in the model of a run without faults."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.objects.verification import verify_store
from tests.flows.conftest import write_toml
from tests.flows.test_resume import finish, nightly
from tests.objects.object_files import BUCKET
from tests.support.faulty_proxy import KINDS, faulty_proxy

pytestmark = pytest.mark.server

RATE = 0.05


@pytest.mark.campaign
def test_five_percent_of_faults_of_each_kind_change_no_byte_of_a_night(
    small_nightly: dict[str, Any], tmp_path: Path, start_process, prefect_server: str, s3: dict[str, Any]
) -> None:
    config = write_toml(tmp_path / "nightly.toml", small_nightly)
    began = time.monotonic()
    expected, _ = finish(nightly(start_process, config, prefect_server))
    undisturbed = time.monotonic() - began
    with faulty_proxy(s3["endpoint_url"], RATE) as proxy:
        environment = {
            "ROLLOUT_STORAGE": f"s3://{BUCKET}/{tmp_path.name}",
            "ROLLOUT_DATABASE": f"sqlite:///{tmp_path}/faulty.db",
            "ROLLOUT_CACHE": str(tmp_path / "faulty-cache"),
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": s3["key"],
            "AWS_SECRET_ACCESS_KEY": s3["secret"],
        }
        began, log = time.monotonic(), tmp_path / "log"
        with log.open("w") as output:
            process = nightly(start_process, config, prefect_server, stdout=output, **environment)
            process.wait(timeout=900)
        seconds = time.monotonic() - began
        done: Counter[str] = proxy.done
    told = log.read_text()
    assert process.returncode == 0, told[-6000:]
    figures = {"requests": done.total(), "spoilt": done.total() - done[""], **{kind: done[kind] for kind in KINDS}}
    figures |= {
        "seconds": round(seconds),
        "seconds without faults": round(undisturbed),
        "lines of log": told.count("\n"),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    assert min(done[kind] for kind in KINDS) > 0
    assert f"model {expected}:" in told
    objects = ObjectStore.from_url(f"s3://{BUCKET}/{tmp_path.name}", storage_options=s3)
    assert objects.tree_is_present(ContentId(expected))
    assert verify_store(objects).damage == []
