"""A process that the supervisor keeps beside its trainers, and restarts if it dies."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping

import structlog

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from app.settings import Settings
from workers.run_directory import LIFELINE_VARIABLE

log = structlog.get_logger("accrue.worker")


class HelperProcess:
    """`python -m` with one of the workers' modules; it ends with the process that made this object.

    It runs in the worker's current folder, where an .env file and a relative ACCRUE_DATA_DIR are found, and
    imports nothing from there.

    Args:
        name: what the log calls it.
        module: its module, below `workers`.
        environment: variables that differ from the worker's own; None: the variable is left out.
        restart_seconds: the minimum time between two starts.
        grace_seconds: how long it may take to end after SIGTERM; 0: it is killed at once.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        module: str,
        environment: Mapping[str, str | None],
        restart_seconds: float,
        grace_seconds: float = 0.0,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._settings, self._name, self._module = settings, name, module
        self._environment, self._restart_seconds = environment, restart_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._started_at = float("-inf")

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def keep_alive(self) -> None:
        """Starts the process, or restarts it if it has ended and was not started too recently."""
        if self.is_alive or time.monotonic() < self._started_at + self._restart_seconds:
            return
        if self._process is not None and self._process.returncode != 0:
            log.warning(f"the {self._name} ended and is restarted", status=self._process.returncode)
        self._close_lifeline()
        self._started_at = time.monotonic()
        self._start()

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            if self._grace_seconds:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._grace_seconds)
            self._process.kill()
            self._process.wait()
        self._close_lifeline()

    def _start(self) -> None:
        theirs, self._lifeline = os.pipe()
        changed = {**os.environ, "ACCRUE_DATABASE_URL": self._settings.resolved_database_url}
        environment = {**changed, **self._environment, LIFELINE_VARIABLE: str(theirs)}
        packages = [str(PACKAGES_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(packages)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{PACKAGE_PREFIX}workers.{self._module}"],
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in environment.items() if value is not None},
                pass_fds=[theirs],
                start_new_session=True,
            )
        except OSError as error:
            log.warning(f"the {self._name} could not be started", error=str(error))
        finally:
            os.close(theirs)

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            with contextlib.suppress(OSError):
                os.close(self._lifeline)
        self._lifeline = None


def profiler(settings: Settings) -> HelperProcess:
    """`python -m workers.profiling`, which simulates memory and makes previews."""
    hidden = {"HF_TOKEN": None, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return HelperProcess(settings, "profiler", "profiling", hidden, restart_seconds=30.0)


def exports(settings: Settings) -> HelperProcess:
    """`python -m workers.exports`, which makes exports. It ends when none is waiting."""
    return HelperProcess(settings, "export process", "exports", {}, restart_seconds=1.0, grace_seconds=5.0)


def inference(settings: Settings) -> HelperProcess:
    """`python -m workers.inference`, which answers requests. It ends after a time without any
    (ACCRUE_INFERENCE_IDLE_SECONDS)."""
    return HelperProcess(
        settings, "inference process", "inference", {}, restart_seconds=1.0, grace_seconds=5.0
    )
