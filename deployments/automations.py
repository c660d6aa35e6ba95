"""What the Prefect server does by itself for runs of this project: try again, notice machines that are gone, notify.

`rollout ops install` brings the server's automations to what is written here; `make serve` installs what heals, where
nothing of it is there.
On SQLite, `prefect server start` of before 3.8.6 may stand still for good when an automation changes (PrefectHQ/prefect
#23055); the servers that rollout starts do not (`tasks.runtime.server_process`). `install` probes the server
afterwards.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, CallWebhook, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from pydantic import SecretStr

from deployments.supervision import MAX_TRIES
from rollout_core.base.errors import ConfigError, NotFound, RolloutError
from tasks.runtime.scheduled_runs import SKIPPED

PREFIX = "rollout: "
"""Of the names of all automations that are written here; others are left alone."""
TAG = "prefect.tag.rollout"
"""Carried by every deployment of ``prefect.yaml``, and so by its runs."""
SILENT_SECONDS = 600
"""Without a heartbeat a run's machine counts as lost. Prefect sends one every 180 s (PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
at least 30), and a run that is taken for lost while it lives is computed twice, so this is more than three of them."""
MIN_SILENT_SECONDS = 90
"""Three heartbeats as often as Prefect allows them."""
WEBHOOK_BLOCK = "rollout-notifications"
"""Name of the webhook block that `save_webhook` writes."""
PROBE_SECONDS = 20.0
MOST_OF_AN_ANSWER = 300
"""Characters of a refusal that are shown."""

_LAST_TRIES = [str(tries) for tries in range(MAX_TRIES, 100)]
_ENDINGS = (
    *("Completed", "Failed", "TimedOut", "Crashed", "Cancelling", "Cancelled", "Suspended", "Paused", SKIPPED),
    "AwaitingRetry",  # it waits for a worker, for as long as that takes
)
_HEARTBEAT = "prefect.flow-run.heartbeat"
_TEXT = (
    "rollout: {{ flow.name }} run '{{ flow_run.name }}' is {{ flow_run.state.name }} after {{ flow_run.run_count }} "
    "starts. {{ flow_run.state.message }}"
)
# `tojson` quotes the text, whatever a message holds; it fails on what is not there, such as the flow of a run that was
# deleted meanwhile, and `string` makes that empty. "text" is what Slack, Mattermost and Google Chat show.
_PAYLOAD = (
    "{% set text %}" + _TEXT + "{% endset %}"
    '{"text": {{ text | string | tojson }}, "flow": {{ flow.name | string | tojson }}, '
    '"run": {{ flow_run.name | string | tojson }}, '
    '"id": {{ flow_run.id | string | tojson }}, "state": {{ flow_run.state.name | string | tojson }}, '
    '"url": {{ (flow_run | ui_url) | string | tojson }}}'
)


class Action(StrEnum):
    """What `install` does with an automation."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    KEEP = "keep"


@dataclass(frozen=True)
class Change:
    """One automation: what is to be done, and for an update what differs, as lines of a unified diff."""

    action: Action
    wanted: AutomationCore | None
    present: Automation | None
    diff: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        named = self.wanted or self.present
        return named.name if named is not None else ""


def healing(silent_seconds: float = SILENT_SECONDS) -> list[AutomationCore]:
    """Automations that bring back runs of deployments whose process or machine is gone.

    Args:
        silent_seconds: without a heartbeat, after which a run that counts as Running is taken for lost.
    """
    return [
        AutomationCore(
            name=f"{PREFIX}try a crashed run again",
            description=f"Under its own id, with what it has stored; at most {MAX_TRIES} starts in all.",
            trigger=_when(["Crashed"], {"prefect.run-count": [str(tries) for tries in range(MAX_TRIES)]}),
            actions=[
                ChangeFlowRunState(
                    state=StateType.SCHEDULED, name="AwaitingRetry", message="crashed, and is tried again", force=True
                )
            ],
        ),
        AutomationCore(
            name=f"{PREFIX}a run without heartbeats has crashed",
            description="Its machine is lost, or its worker died with it. It is then tried again.",
            trigger=EventTrigger(
                match=_runs({}),
                match_related=_of_deployments(),
                after={_HEARTBEAT},
                expect={_HEARTBEAT, *(f"prefect.flow-run.{name}" for name in _ENDINGS)},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=silent_seconds),
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED,
                    name="Crashed",
                    message=f"no heartbeat for {silent_seconds:g} s",
                    # Not by force: the heartbeat of a short run may come in after its end, and counts as its last sign.
                    # The server then refuses this for a run that has ended.
                    force=False,
                )
            ],
        ),
    ]


def notifying(block: UUID, is_webhook: bool) -> list[AutomationCore]:
    """Automations that tell a person: a run failed, crashed for the last time, or did not start in time. Once each,
    but where the server is so busy that it acts twice.

    Args:
        block: a webhook or notification block of the server, by the id of its document.
        is_webhook: whether it is a webhook, which receives JSON: text, flow, run, id, state, url.
    """

    def send(subject: str) -> list[ActionTypes]:
        if is_webhook:
            return [CallWebhook(block_document_id=block, payload=_PAYLOAD)]
        return [SendNotification(block_document_id=block, subject=subject, body=_TEXT + " {{ flow_run | ui_url }}")]

    return [
        AutomationCore(
            name=f"{PREFIX}tell that a run failed",
            trigger=_when(["Failed", "TimedOut"]),
            actions=send("A run failed"),
        ),
        AutomationCore(
            name=f"{PREFIX}tell that a run crashed for the last time",
            trigger=_when(["Crashed"], {"prefect.run-count": _LAST_TRIES}),
            actions=send("A run crashed for the last time"),
        ),
        AutomationCore(
            name=f"{PREFIX}tell that a run is late",
            trigger=_when(["Late"]),
            actions=send("A run is late: is a worker there?"),
        ),
    ]


def _when(states: Iterable[str], labels: dict[str, Any] | None = None) -> EventTrigger:
    """Each time that a run of a deployment comes into a state of one of these names."""
    return EventTrigger(
        match=_runs(labels or {}),
        match_related=_of_deployments(),
        expect={f"prefect.flow-run.{state}" for state in states},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )


def _runs(labels: dict[str, Any]) -> Any:
    return {"prefect.resource.id": "prefect.flow-run.*", **labels}


def _of_deployments() -> Any:
    # Both: a run that a command started has nobody who would start it again.
    return [
        {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"},
        {"prefect.resource.role": "tag", "prefect.resource.id": TAG},
    ]


def save_webhook(url: str) -> str:
    """Save the block `WEBHOOK_BLOCK` with this address, which the server keeps encrypted; the block's address."""
    Webhook.register_type_and_schema()
    Webhook(url=SecretStr(url)).save(WEBHOOK_BLOCK, overwrite=True)
    return f"{Webhook.get_block_type_slug()}/{WEBHOOK_BLOCK}"


def block_of(client: SyncPrefectClient, address: str) -> tuple[UUID, bool]:
    """Id of a saved block by its address ``slug/name``, and whether it is a webhook.

    Raises ConfigError where the address is none or the block can notify nobody, NotFound where there is no such block.
    """
    slug, _, name = address.partition("/")
    if not slug or not name:
        raise ConfigError(f"--notify {address!r}: expected SLUG/NAME of a block, such as slack-webhook/team")
    try:
        document = client.read_block_document_by_name(name, slug)
    except ObjectNotFound as error:
        raise NotFound(f"--notify {address}: the Prefect server has no such block; create it in its UI") from error
    is_webhook = slug == Webhook.get_block_type_slug()
    capabilities = document.block_schema.capabilities if document.block_schema is not None else []
    if not is_webhook and not set(NotificationBlock.get_block_capabilities()) & set(capabilities):
        raise ConfigError(f"--notify {address}: this block notifies nobody; expected a webhook or a notification block")
    return document.id, is_webhook


def present(client: SyncPrefectClient) -> list[Automation]:
    """The server's automations that are of this project."""
    return [found for found in client.read_automations() if found.name.startswith(PREFIX)]


def silence(automations: Iterable[Automation]) -> float | None:
    """Seconds without a heartbeat after which installed automations take a run for lost; None where none does."""
    for automation in automations:
        trigger = automation.trigger
        if isinstance(trigger, EventTrigger) and trigger.posture is Posture.Proactive and _HEARTBEAT in trigger.after:
            return trigger.within.total_seconds()
    return None


def telling(automations: Iterable[Automation]) -> tuple[UUID, bool] | None:
    """The block by which installed automations tell somebody, and whether it is a webhook; None where none does."""
    for automation in automations:
        for action in automation.actions:
            if isinstance(action, CallWebhook | SendNotification):
                return action.block_document_id, isinstance(action, CallWebhook)
    return None


def changes(
    client: SyncPrefectClient, wanted: Sequence[AutomationCore], *, keeps_notifications: bool = False
) -> list[Change]:
    """What would bring the server's automations to ``wanted``; those of other names stay.

    Args:
        keeps_notifications: whether those that notify stay as they are where ``wanted`` has none.
    """
    others = {found.name: found for found in present(client)}
    found = []
    for core in wanted:
        there = others.pop(core.name, None)
        if there is None:
            found.append(Change(Action.CREATE, core, None))
            continue
        # One that a person has switched off stays off.
        core = core.model_copy(update={"enabled": there.enabled})
        diff = _diff(_content(there), _content(core))
        found.append(Change(Action.UPDATE if diff else Action.KEEP, core, there, diff))
    for there in others.values():
        tells = any(isinstance(action, CallWebhook | SendNotification) for action in there.actions)
        found.append(Change(Action.KEEP if tells and keeps_notifications else Action.DELETE, None, there))
    return found


def bring_about(
    webhook: str | None, notify: str | None, quiet: bool, silent_seconds: float | None, dry_run: bool
) -> list[Change]:
    """Install what heals and what tells, and say what changed.

    Args:
        webhook: address that gets notifications from now on.
        notify: block that gets notifications from now on.
        quiet: notifications are turned off. Without any of the three it stays as it was.
        silent_seconds: as of `healing`; None: as it was, or the default.
        dry_run: change nothing.
    """
    with get_client(sync_client=True) as client:
        there = present(client)
        installed, notified = silence(there), telling(there)
        seconds = silent_seconds or max(installed or SILENT_SECONDS, MIN_SILENT_SECONDS)
        wanted = healing(seconds)
        if webhook is not None and not dry_run:
            notify = save_webhook(webhook)
        if notify is not None:
            notified = block_of(client, notify)
        elif webhook is not None or quiet:
            notified = None
        if notified is not None:
            wanted += notifying(*notified)
        found = changes(client, wanted, keeps_notifications=not (quiet or notify))
        if not dry_run:
            install(client, found)
        return found


def install(client: SyncPrefectClient, found: Iterable[Change]) -> None:
    """Carry out what `changes` found. Raises RolloutError where the server does not answer any more, or refuses."""
    try:
        for change in found:
            if change.action is Action.CREATE and change.wanted is not None:
                client.create_automation(change.wanted)
            elif change.action is Action.UPDATE and change.wanted is not None and change.present is not None:
                client.update_automation(change.present.id, change.wanted)
            elif change.action is Action.DELETE and change.present is not None:
                client.delete_automation(change.present.id)
        httpx.get(f"{PREFECT_API_URL.value()}/health", timeout=PROBE_SECONDS).raise_for_status()
    except httpx.TimeoutException as error:
        raise RolloutError(
            "the Prefect server stopped answering while automations were installed, which `prefect server start` on "
            "SQLite does before Prefect 3.8.6 (`make serve` and PostgreSQL do not); restart it, and run `rollout ops "
            "install` again"
        ) from error
    except httpx.TransportError as error:
        raise RolloutError(
            f"the Prefect server went away while automations were installed ({type(error).__name__}: {error}); what "
            "was installed stays: start the server, and run `rollout ops install` again"
        ) from error
    except ObjectNotFound as error:
        raise RolloutError(
            "an automation was removed while automations were installed; run `rollout ops install` again"
        ) from error
    except httpx.HTTPStatusError as error:
        answer = " ".join(error.response.text.split())[:MOST_OF_AN_ANSWER]
        raise RolloutError(
            f"the Prefect server answered {error.response.status_code} while automations were installed ({answer}); "
            "see its log, and run `rollout ops install` again: what was installed stays"
        ) from error


def _content(automation: AutomationCore) -> dict[str, Any]:
    """What makes an automation, without ids of the server."""
    fields = automation.model_dump(mode="json", include=set(AutomationCore.model_fields) - {"owner_resource"})
    trigger = fields["trigger"]
    for name in ("after", "expect", "for_each"):
        if name in trigger:
            trigger[name] = sorted(trigger[name])
    trigger.pop("id", None)
    return fields


def _diff(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    old, new = (json.dumps(content, indent=2, sort_keys=True).splitlines() for content in (before, after))
    lines = difflib.unified_diff(old, new, lineterm="", n=1)
    return tuple(line for line in lines if not line.startswith(("---", "+++")))
