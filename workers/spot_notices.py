"""Watches for a cloud provider's notice that it will take this machine away.

Spot and preemptible machines learn of it from their metadata service: two minutes before on AWS, 30 seconds
before on Google Cloud and Azure. The worker then stops as on SIGTERM: trainers write checkpoints, and their
jobs go on elsewhere.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Literal

import httpx2 as httpx
import structlog

log = structlog.get_logger("accrue.worker")

Provider = Literal["aws", "gcp", "azure"]

_ADDRESSES = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}

_LOOK_SECONDS = 2.0
_TIMEOUT_SECONDS = 2.0


class SpotNotices:
    """Asks the metadata service in a thread of its own.

    Args:
        notify: called once, when there is a notice.
        address: of the metadata service; None: the provider's.
    """

    def __init__(self, provider: Provider, notify: Callable[[], None], address: str | None = None) -> None:
        self._provider, self._notify = provider, notify
        # These addresses are the machine's own: no proxy of the environment reaches them.
        self._http = httpx.Client(
            base_url=address or _ADDRESSES[provider], timeout=_TIMEOUT_SECONDS, trust_env=False
        )
        self._ended = threading.Event()

    def start(self) -> None:
        """Looks once, so that nothing begins on a machine that will soon be gone, and then keeps looking."""
        if not self._look():
            threading.Thread(target=self._watch, daemon=True, name="spot-notices").start()

    def end(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            if self._look():
                return

    def _look(self) -> bool:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
            if self._is_given_notice():
                log.warning("this machine will be taken away: the worker stops", provider=self._provider)
                self._notify()
                return True
        return False

    def _is_given_notice(self) -> bool:
        match self._provider:
            case "aws":
                return self._aws()
            case "gcp":
                return self._gcp()
            case "azure":
                return self._azure()

    def _aws(self) -> bool:
        """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
        token = self._http.put(
            "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        ).text
        answer = self._http.get(
            "/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token}
        )
        return answer.status_code == 200 and answer.json()["action"] in ("stop", "terminate", "hibernate")

    def _gcp(self) -> bool:
        """https://cloud.google.com/compute/docs/instances/spot (Detect preemption of Spot VMs)"""
        answer = self._http.get(
            "/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"}
        )
        return answer.status_code == 200 and answer.text.strip() == "TRUE"

    def _azure(self) -> bool:
        """https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events"""
        answer = self._http.get(
            "/metadata/scheduledevents", params={"api-version": "2020-07-01"}, headers={"Metadata": "true"}
        )
        events = answer.json()["Events"] if answer.status_code == 200 else []
        return any(event["EventType"] in ("Preempt", "Terminate") for event in events)
