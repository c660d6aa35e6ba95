"""Whether the cloud is about to take this machine back, as the metadata service of a spot machine tells.

AWS: a token by IMDSv2, then ``spot/instance-action``, which is there from two minutes before the end.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
Google Cloud: ``instance/preempted``, which becomes TRUE thirty seconds before the end; the request waits for that.
https://cloud.google.com/compute/docs/instances/create-use-preemptible
Azure: scheduled events, of which one of type Preempt names this machine from thirty seconds before the end.
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events

They are asked at the address that the clouds' own libraries use, which the environment variables
AWS_EC2_METADATA_SERVICE_ENDPOINT, GCE_METADATA_HOST and AZURE_POD_IDENTITY_AUTHORITY_HOST change.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import HTTPException
from typing import Literal

from rollout_core.base.errors import ConfigError
from rollout_core.base.machine import Spot

Kind = Literal["aws", "gce", "azure", "auto", "none"]
LEAD_SECONDS = {"aws": 120.0, "gce": 30.0, "azure": 30.0}
"""From a notice to the end of the machine."""
LEAST_SECONDS = 30.0
"""Taken for what is left where this machine's clock says less: to be cut off amid a snapshot is no worse than to be
killed before it."""
POLL_SECONDS = 2.0
"""Between two questions; AWS asks for no more than 5 s."""
CHANGE_SECONDS = 60
"""For which one request to Google's service waits for a change."""
REQUEST_SECONDS = 2.0
ENABLING_SECONDS = 150.0
"""For the first answer of Azure's scheduled events: the question switches them on, which takes up to two minutes."""
_TOKEN_SECONDS = 21_600
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Metadata never comes by way of a proxy."""


class Notice:
    """That the machine is taken away.

    Args:
        reason: for people.
        seconds: until it is gone, from now.
    """

    def __init__(self, reason: str, seconds: float) -> None:
        self.reason = reason
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Until the machine is gone, at least 0."""
        return max(0.0, self._end - time.monotonic())


class Metadata(ABC):
    """The metadata service of a machine. Whatever it answers, it raises OSError or ValueError only."""

    kind: str

    @abstractmethod
    def notice(self, *, wait: bool) -> Notice | None:
        """The notice, if there is one. With ``wait`` the call may take a minute, and ends when one comes."""

    def advice(self) -> str | None:
        """A sign that a notice may come, which changes nothing yet."""
        return None

    @abstractmethod
    def machine_type(self) -> str | None:
        """What the cloud calls a machine of this size; None where it does not say."""


class AWSMetadata(Metadata):
    """Of an EC2 machine. In a container its token needs a hop more: ``HttpPutResponseHopLimit=2``."""

    kind = "aws"

    def __init__(self) -> None:
        endpoint = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
        self._latest = f"{endpoint.rstrip('/')}/latest"
        self._token = ""

    def notice(self, *, wait: bool) -> Notice | None:
        text = self._read("spot/instance-action")
        if text is None:
            return None
        action = json.loads(text)
        at = datetime.fromisoformat(str(action["time"]).replace("Z", "+00:00"))
        left = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        # A clock may be wrong. What it makes of the time is no longer than AWS gives, nor too short for a snapshot.
        left = min(max(left, LEAST_SECONDS), LEAD_SECONDS["aws"])
        return Notice(f"AWS will {action['action']} this machine at {at:%H:%M:%S} UTC", left)

    def advice(self) -> str | None:
        if self._read("events/recommendations/rebalance") is None:
            return None
        return "AWS says that this spot machine is at elevated risk of being taken back; work continues until notice"

    def machine_type(self) -> str | None:
        return (self._read("instance-type") or "").strip() or None

    def _read(self, path: str) -> str | None:
        """A value; None where there is none."""
        for is_last in (False, True):
            if not self._token:
                lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
                self._token = _ask(f"{self._latest}/api/token", lifetime, method="PUT")[0].strip()
            try:
                return _ask(f"{self._latest}/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})[0]
            except urllib.error.HTTPError as error:
                if error.code == HTTPStatus.NOT_FOUND:
                    return None
                if error.code != HTTPStatus.UNAUTHORIZED or is_last:
                    raise
                self._token = ""  # it has expired
        raise AssertionError("the second try returns or raises")


class GCEMetadata(Metadata):
    """Of a machine of Google's Compute Engine."""

    kind = "gce"

    def __init__(self) -> None:
        host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
        self._instance = f"http://{host}/computeMetadata/v1/instance"
        self._etag = "0"

    def notice(self, *, wait: bool) -> Notice | None:
        url, timeout = f"{self._instance}/preempted", REQUEST_SECONDS
        if wait:
            # What has changed since the last answer is reported at once.
            url += f"?wait_for_change=true&timeout_sec={CHANGE_SECONDS}&last_etag={self._etag}"
            timeout += CHANGE_SECONDS
        text, headers = _ask(url, {"Metadata-Flavor": "Google"}, timeout=timeout)
        if headers.get("Metadata-Flavor") != "Google":
            raise ValueError("the answer is not of Google's metadata service")
        self._etag = headers.get("ETag", "0")
        if text.strip().upper() != "TRUE":
            return None
        return Notice("Google Cloud preempts this machine", LEAD_SECONDS["gce"])

    def machine_type(self) -> str | None:
        path = _ask(f"{self._instance}/machine-type", {"Metadata-Flavor": "Google"})[0]
        return path.strip().rpartition("/")[2] or None


class AzureMetadata(Metadata):
    """Of a virtual machine of Azure. Events are of a whole scale set, so they count where they name this machine."""

    kind = "azure"

    def __init__(self) -> None:
        host = os.environ.get("AZURE_POD_IDENTITY_AUTHORITY_HOST") or "http://169.254.169.254"
        self._metadata = f"{host.rstrip('/')}/metadata"
        self._name = ""

    def notice(self, *, wait: bool) -> Notice | None:
        name = self._name = self._name or self._compute("name")
        try:
            text = self._read("scheduledevents?api-version=2020-07-01", ENABLING_SECONDS if wait else REQUEST_SECONDS)
        except TimeoutError:
            if wait:
                raise
            return None  # the machine's first question of this kind, which `SpotWatch` waits for
        events = json.loads(text)["Events"]
        ours = [event for event in events if event["EventType"] == "Preempt" and name in event["Resources"]]
        if not ours:
            return None
        left = LEAST_SECONDS
        if ours[0].get("NotBefore"):  # empty once it has begun
            left = (parsedate_to_datetime(ours[0]["NotBefore"]) - datetime.now(UTC)).total_seconds()
        return Notice("Azure evicts this machine", min(max(left, LEAST_SECONDS), LEAD_SECONDS["azure"]))

    def machine_type(self) -> str | None:
        return self._compute("vmSize") or None

    def _compute(self, name: str) -> str:
        return self._read(f"instance/compute/{name}?api-version=2021-02-01&format=text").strip()

    def _read(self, path: str, timeout: float = REQUEST_SECONDS) -> str:
        return _ask(f"{self._metadata}/{path}", {"Metadata": "true"}, timeout=timeout)[0]


def _ask(
    url: str, headers: dict[str, str], *, method: str = "GET", timeout: float = REQUEST_SECONDS
) -> tuple[str, dict[str, str]]:
    request = urllib.request.Request(url, headers=headers, method=method)
    with _OPENER.open(request, timeout=timeout) as answer:
        return answer.read().decode("utf-8", "replace"), dict(answer.headers.items())


def metadata(kind: Kind) -> Metadata | None:
    """The metadata service of this machine; None where notices are not wanted, or ``auto`` finds no cloud.

    Raises ConfigError where the named one does not answer.
    """
    if kind == "none":
        return None
    services = [each for each in (AWSMetadata(), GCEMetadata(), AzureMetadata()) if kind in ("auto", each.kind)]
    with ThreadPoolExecutor(len(services), "rollout-metadata") as pool:
        troubles = list(pool.map(_trouble, services))
    found = next((service for service, trouble in zip(services, troubles, strict=True) if trouble is None), None)
    if found is None and kind != "auto":
        raise ConfigError(
            f"--spot {kind}: the metadata service does not answer as that of {kind} ({troubles[0]}); on another "
            "machine leave the option out. In a container on AWS it needs HttpPutResponseHopLimit=2"
        ) from troubles[0]
    return found


def _trouble(service: Metadata) -> Exception | None:
    """Why a service does not answer as it should; None where it does."""
    try:
        service.notice(wait=False)
    except NO_ANSWER as error:
        return error
    return None


NO_ANSWER = (OSError, HTTPException, ValueError, KeyError, TypeError)
"""What comes of a metadata service that is away, breaks off, or answers with something else."""


def machine_type(service: Metadata) -> str | None:
    """As `Metadata.machine_type`; None also where the service does not answer that."""
    try:
        return service.machine_type()
    except NO_ANSWER:
        return None


def look_at_spot(service: Metadata) -> Spot:
    """What the service says now, as an inventory has it. Raises what `Metadata.notice` does."""
    notice = service.notice(wait=False)
    said = (None, None) if notice is None else (notice.reason, round(notice.seconds_left, 1))
    return Spot(service.kind, machine_type(service), *said)


class SpotWatch:
    """Asks a metadata service all the time, in a thread of its own, until a notice comes.

    Args:
        service: to be asked; the first time before this returns.
        say: receives a line when the service falls silent or answers again, and what it advises.
    """

    def __init__(self, service: Metadata, say: Callable[[str], None]) -> None:
        self._service, self._say = service, say
        self._notice: Notice | None = None
        self._trouble: str | None = None
        self._advised = False
        self._look(wait=False)
        threading.Thread(target=self._watch, name="rollout-spot-notices", daemon=True).start()

    def notice(self) -> Notice | None:
        """The notice once it has come."""
        return self._notice

    def _watch(self) -> None:
        while self._notice is None:
            time.sleep(POLL_SECONDS)
            self._look(wait=True)

    def _look(self, *, wait: bool) -> None:
        try:
            self._notice = self._service.notice(wait=wait)
            if not self._advised and (advice := self._service.advice()) is not None:
                self._advised = True
                self._say(advice)
        except NO_ANSWER as error:
            if self._trouble is None:
                self._say(f"the metadata service of {self._service.kind} does not answer ({error}); notices are unseen")
            self._trouble = str(error)
            return
        if self._trouble is not None:
            self._trouble = None
            self._say(f"the metadata service of {self._service.kind} answers again")
