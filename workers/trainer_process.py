"""A trainer's process: started without the worker's secrets, and ended reliably."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from app import PACKAGES_FOLDER
from app.contract import fail_points
from app.contract.regular_files import append_regular
from app.contract.reports import Failure
from app.errors import BadSetting
from app.planning.devices import Device
from workers.orphaned_processes import are_gone, children_of
from workers.run_directory import (
    DISK_FULL,
    DISK_FULL_FAILURE,
    GPU_NAMES_VARIABLE,
    HIDDEN_VARIABLE,
    LIFELINE_VARIABLE,
    SECRET_FILES_VARIABLE,
    SILENCE_VARIABLE,
    TOKEN_VARIABLE,
    RunDirectory,
)
from workers.training.processes.fork_server import ForkedTrainer, ForkServer
from workers.training.processes.preloading import command

_PASSED_ON = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "SSL_CERT_FILE",
    "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy",
    "CC", "CXX", fail_points.VARIABLE,
)  # fmt: skip
_PASSED_ON_PREFIXES = (
    "CUDA_", "NVIDIA_", "CUDNN_", "CUBLAS_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_",
    "TRITON_", "BNB_", "OMP_", "MKL_",
)  # fmt: skip


_GPU_CHECK_SECONDS = 60.0
WITHOUT_NETWORK = ("unshare", "--map-current-user", "--net", "--")
"""A command prefix for an empty network namespace, in the user namespace that this needs."""


def check_network_isolation() -> None:
    """Checks that this machine can start processes without a network.

    Raises:
        BadSetting: it cannot.
    """
    try:
        tried = subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        refused = str(error)
    else:
        refused = tried.stderr.strip() if tried.returncode else ""
    if refused:
        raise BadSetting(
            f"ACCRUE_TRAINER_NETWORK=false is not possible here: {refused}. It needs unshare (util-linux) "
            "and user namespaces, which a container has with --security-opt seccomp=unconfined."
        )


class TrainerProcess:
    """`python -m workers.training` on one run directory and its devices.

    The parent-death signal is bound to the thread that creates this object: that thread must outlive the
    trainer.
    """

    def __init__(
        self,
        run: RunDirectory,
        devices: Sequence[Device],
        silence_seconds: float,
        *,
        network: bool = True,
        device_locks: Sequence[int] = (),
        view: str = "",
        variables: Mapping[str, str] | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """
        Args:
            silence_seconds: after this time without a `sign_of_life()`, the trainer ends by itself; must be
                shorter than the lease.
            network: whether the trainer may use the network.
            device_locks: descriptors that the trainer keeps open as long as it lives.
            view: the files of a folder that the trainer may see, where the machine supports this
                (`filesystem_view.named_view`); empty for no restriction.
            variables: further environment variables.
            fork_server: what starts the trainer, where the machine supports this and the trainer may use the
                network; None: it is started directly.

        Raises:
            OSError: the process cannot be started.
        """
        theirs, self._lifeline = os.pipe()
        os.set_blocking(self._lifeline, False)
        token = pipe_with(os.environ.get("HF_TOKEN", ""))
        environment = {
            **device_environment(devices),
            SILENCE_VARIABLE: str(silence_seconds),
            HIDDEN_VARIABLE: view,
            **(variables or {}),
        }
        named = {LIFELINE_VARIABLE: theirs, TOKEN_VARIABLE: token}
        self._process: subprocess.Popen[bytes] | ForkedTrainer
        try:
            with append_regular(run.trainer_log) as output:
                forked = None
                if fork_server is not None and network:
                    forked = fork_server.start(run.path, environment, output.fileno(), named, device_locks)
                self._process = forked or subprocess.Popen(
                    [*(() if network else WITHOUT_NETWORK), *command(run.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**environment, **{name: str(number) for name, number in named.items()}},
                    pass_fds=[*named.values(), *device_locks],
                    start_new_session=True,
                    cwd=PACKAGES_FOLDER,
                )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(theirs)
            os.close(token)
        self._inner: list[int] = []
        """Descriptors of the trainer's children when it was killed: the kernel ends them and their
        descendants slightly later than the trainer."""
        self._kill_at: float | None = None
        self._closed = False
        self._signalling = threading.Lock()
        """Held while checking that the process lives and signalling it, since a reaped process's id may be
        reused."""

    evicted_because: str | None = None
    """No engine ends this process."""
    is_waiting = False

    @property
    def pid(self) -> int | None:
        """None as long as the fork server is loading the libraries."""
        return self._process.pid

    def new_messages(self) -> list[str]:
        """Nothing: no engine is involved."""
        return []

    def status(self) -> int | None:
        """The exit status; None while the trainer is alive or, after `kill()`, one of its children."""
        with self._signalling:
            status = self._process.poll()
            return status if status is None or are_gone(self._inner) else None

    def sign_of_life(self) -> None:
        """Signals to the trainer that its lease is still valid."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError), self._signalling:
            if not self._closed:
                os.write(self._lifeline, b".")

    def interrupt(self, grace_seconds: float) -> None:
        """Sends SIGTERM; the trainer is `overdue` after the grace period."""
        self._kill_at = time.monotonic() + grace_seconds
        with self._signalling:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    @property
    def overdue(self) -> bool:
        """Whether the grace period of a requested stop is over."""
        return self._kill_at is not None and time.monotonic() > self._kill_at

    def kill(self) -> None:
        """Kills the trainer and its children, which are in a session of their own."""
        with self._signalling:
            pid = self.pid
            if self._process.poll() is None:
                if pid is not None:
                    self._inner = self._inner or children_of(pid)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
                self._process.kill()  # it may not have its session yet, or may not have been started

    def close(self) -> None:
        """Releases the resources of a trainer that has ended; closing its lifeline ends any of
        its processes that still run."""
        with self._signalling:
            if not self._closed:
                self._closed = True
                os.close(self._lifeline)
                for descriptor in self._inner:
                    os.close(descriptor)
                self._inner = []


def pipe_with(secret: str) -> int:
    """The reading end of a pipe that holds a secret: unlike an environment, it can be read only once."""
    reading, writing = os.pipe()
    os.write(writing, secret.encode())
    os.close(writing)
    return reading


def failure_of(status: int, printed: Path) -> Failure:
    """The failure that an exit status means, if the trainer itself could not report one.

    Args:
        printed: the file with what the trainer printed.
    """
    if status == DISK_FULL:
        return DISK_FULL_FAILURE
    if status < 0 and _REFUSED_MEMORY.search(_end_of(printed)):
        return Failure(
            code="data_not_tokenised",
            message="the model's tokenizer needs more memory than allowed (2 GiB plus 4 KiB per character "
            "of the data): check tokenizer.json, or use another model",
            permanent=True,
        )
    if status >= 0:
        message = f"the trainer ended with status {status}"
        return Failure(code="trainer_crashed", message=message, permanent=False)
    name = signal.Signals(-status).name
    hint = " (often because the machine ran out of memory)" if name == "SIGKILL" else ""
    return Failure(code="trainer_killed", message=f"the trainer was ended by {name}{hint}", permanent=False)


_REFUSED_MEMORY = re.compile(rb"^memory allocation of \d+ bytes failed$", re.MULTILINE)
"""What Rust, in which tokenizers are written, prints before it aborts. Of the code whose memory is
limited, only tokenizers are written in Rust."""
_END_BYTES = 2**14


def _end_of(printed: Path) -> bytes:
    """The last part of what a trainer printed."""
    with contextlib.suppress(OSError), printed.open("rb") as file:
        file.seek(max(0, printed.stat().st_size - _END_BYTES))
        return file.read(_END_BYTES)
    return b""


def is_passed_on(name: str) -> bool:
    """Whether an environment variable is passed on to trainers."""
    return name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)


def gpu_works(device: Device) -> bool:
    """Whether a GPU can still compute. A new process tries this, which takes some seconds."""
    command = [sys.executable, "-c", "import torch; torch.ones(8, device='cuda').sum().item()"]
    try:
        tried = subprocess.run(
            command,
            env=device_environment([device]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GPU_CHECK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


_NAMES_OF_SECRETS = ("KUBECONFIG", "PGPASSFILE", "NETRC", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE",
                     "GOOGLE_APPLICATION_CREDENTIALS")  # fmt: skip
"""Variables that name files with keys and passwords; KUBECONFIG may name several."""


def secret_files() -> str:
    """The value of `SECRET_FILES_VARIABLE`: the files from which this process may read keys, passwords and
    jobs, where its environment decides which they are. These are its settings, the hub's tokens, those that
    variables name, and an SQLite database."""
    from huggingface_hub import constants
    from sqlalchemy import make_url

    from app.settings import get_settings

    found = [".env", constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH]
    for name in _NAMES_OF_SECRETS:
        found += filter(None, os.environ.get(name, "").split(os.pathsep))
    url = make_url(get_settings().resolved_database_url)
    if url.get_backend_name() == "sqlite" and url.database:
        found += [f"{url.database}{end}" for end in ("", "-wal", "-shm")]
    return os.pathsep.join(str(Path(path).absolute()) for path in found)


def device_environment(devices: Sequence[Device]) -> dict[str, str]:
    """The environment of a process that uses devices."""
    passed = {name: value for name, value in os.environ.items() if is_passed_on(name)}
    if any(device.expandable_segments for device in devices) and "PYTORCH_CUDA_ALLOC_CONF" not in passed:
        # blocks of other sizes leave no gaps then
        passed.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return {
        **passed,
        "CUDA_VISIBLE_DEVICES": ",".join(
            device.uuid or str(device.id) for device in devices if device.kind == "cuda"
        ),
        GPU_NAMES_VARIABLE: ",".join(f"{device.id}={device.uuid}" for device in devices if device.uuid),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # nvidia-smi's order, by which GPUs are numbered
        SECRET_FILES_VARIABLE: secret_files(),
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
    }
