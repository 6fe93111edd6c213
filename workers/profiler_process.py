"""The profiler's process: the supervisor starts it, and restarts it if it dies."""

import contextlib
import os
import subprocess
import sys
import time

import structlog

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from app.settings import Settings
from workers.run_directory import LIFELINE_VARIABLE

log = structlog.get_logger("accrue.worker")

_RESTART_SECONDS = 30.0


class ProfilerProcess:
    """`python -m workers.profiling`, kept alive; it ends with the process that made this object."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._started_at = float("-inf")

    def keep_alive(self) -> None:
        """Starts the profiler, or restarts it if it died some time ago."""
        if self._process is not None and self._process.poll() is None:
            return
        if time.monotonic() < self._started_at + _RESTART_SECONDS:
            return
        if self._process is not None:
            log.warning("the profiler ended and is restarted", status=self._process.returncode)
        self._close_lifeline()
        self._started_at = time.monotonic()
        self._start()

    def end(self) -> None:
        """Kills the profiler. The next profiler takes over its requests."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._close_lifeline()

    def _start(self) -> None:
        theirs, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{PACKAGE_PREFIX}workers.profiling"],
                stdin=subprocess.DEVNULL,
                env={
                    **{name: value for name, value in os.environ.items() if name != "HF_TOKEN"},
                    LIFELINE_VARIABLE: str(theirs),
                    "ACCRUE_DATABASE_URL": self._settings.resolved_database_url,
                    "CUDA_VISIBLE_DEVICES": "",
                    "HF_HUB_OFFLINE": "1",
                },
                pass_fds=[theirs],
                start_new_session=True,
                cwd=PACKAGES_FOLDER,
            )
        except OSError as error:
            log.warning("the profiler could not be started", error=str(error))
        finally:
            os.close(theirs)

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            with contextlib.suppress(OSError):
                os.close(self._lifeline)
        self._lifeline = None
