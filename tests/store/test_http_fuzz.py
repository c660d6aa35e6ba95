"""The HTTP API against its own description: whatever is sent, the answer is no server error."""

from __future__ import annotations

import asyncio
import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from rollout_core.store import SqlLightningStore
from rollout_core.store.http.app import AppSettings, create_app
from rollout_core.store.http.routes import ROUTES

KEY = {"Authorization": "Bearer k"}
"""With it the name of the test's host does not matter."""


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    store = SqlLightningStore.from_url(f"sqlite:///{tmp_path_factory.mktemp('fuzz')}/store.db")
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(store, AppSettings(api_key="k")), headers=KEY)
    asyncio.run(store.close())


# What takes nothing but an id cannot be asked wrongly.
CASES = [
    pytest.param(operation, mode, id=f"{operation.name}-{mode.value}")
    for operation in ROUTES
    for mode in GenerationMode
    if operation.takes is not None or mode is GenerationMode.POSITIVE
]


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_no_request_is_a_server_error(api, operation, mode):
    """Requests that follow the description, and requests that break it."""
    described = api[operation.path][operation.method]

    @given(case=described.as_strategy(generation_mode=mode))
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case):
        if operation.name == "wait_for_rollouts" and isinstance(case.body, dict):
            # Nobody finishes anything here, so none of the waits may be long.
            case.body["timeout"] = 0
        if operation.name in ("wait_for_work", "wait_for_changes") and isinstance(case.body, dict):
            timeout = case.body.get("timeout")  # nor is anything queued; what is no number stays what it is
            case.body["timeout"] = min(timeout, 0) if isinstance(timeout, int | float) else timeout
        case.call_and_validate(checks=[not_a_server_error], headers=KEY)

    send()


def test_the_description_is_json_and_names_every_operation(api):
    described = {(path, method) for path, item in api.raw_schema["paths"].items() for method in item}
    assert described == {(operation.path, operation.method.lower()) for operation in ROUTES}
    json.dumps(api.raw_schema)
