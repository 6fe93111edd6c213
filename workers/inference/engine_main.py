"""`python -m workers.inference.engine_main`: answers requests with one model, in a process without secrets.

Its standard input is a socket: it gets orders over it, and sends back parts of answers. The first order says
which model to load; others follow once it is loaded. A model's files and what users write are untrusted: the
process sees only the model's files, has no database, and ends when the socket is closed.
"""

import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  # loading then takes less time
from transformers.models.auto import modeling_auto  # noqa: F401

from app.contract.regular_files import NotRegular
from workers.inference.engine import Engine, unexpected
from workers.inference.loading import NOT_LOADED, load
from workers.inference.protocol import LoadOrder, Reported
from workers.inference.refusal import refused, unavailable
from workers.training.exceptions import CannotTrain
from workers.training.models.fetching import fetch, fetch_in_child
from workers.training.processes.filesystem_view import show_model
from workers.training.processes.lifeline import die_with_parent
from workers.training.processes.limits import limit
from workers.training.processes.process_tree import run_sandboxed

_SOCKET = 0
"""Standard input. The sandbox's processes keep no other descriptor that could be used for it."""

_KILL_FIRST = "600"
"""For /proc/self/oom_score_adj: if memory runs out, this process ends before a trainer does."""

_ENDS_WITHIN_SECONDS = 2.0
"""How long an answer may go on after the socket was closed."""


def main() -> int:
    """Waits for the order to load a model, loads it, and answers until the socket is closed."""
    die_with_parent()
    if importlib.util.find_spec("bitsandbytes") is None:
        importlib.import_module("peft")  # it imports bitsandbytes, after which forks cannot use a GPU
    first = next(_lines(), None)
    if first is None:
        return 0
    order = LoadOrder.model_validate_json(first)
    _print_nothing()
    os.environ.update(order.environment)
    limit()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILL_FIRST)
    fetch_in_child(lambda: _fetch(order))  # if files are still missing, loading reports it
    return run_sandboxed(lambda apart: _answer(order, apart), isolated=order.hidden is not None)


def _print_nothing() -> None:
    """What libraries print may contain what users wrote."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _fetch(order: LoadOrder) -> int:
    with suppress(OSError, ValueError, ImportError):
        fetch(order.model, order.path)
    return 0


def _answer(order: LoadOrder, apart: bool) -> int:
    """Loads the model and answers.

    Args:
        apart: whether this process has its own mounts.
    """
    try:
        own = {Path(order.folder): True, Path(order.adapters): False}
        show_model(order.model, order.path, order.layer_paths, own, order.hidden, apart=apart)
    except NotRegular:
        _report(Reported(failed=refused("A folder of the model's files is a link.", field="model").error))
        return 1
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    layers = list(zip(order.model.layers, map(Path, order.layer_paths), strict=True))
    try:
        loaded = load(order.model, order.path, layers, Path(order.folder), torch.device(order.device))
        engine = Engine(loaded, _read_in_thread(), _report)
    except CannotTrain as error:
        message = str(error)
        _report(Reported(failed=refused(f"{message[:1].upper()}{message[1:]}.", field="model").error))
        return 1
    except torch.OutOfMemoryError:
        _report(Reported(failed=unavailable("The model does not fit in the device's memory.").error))
        return 1
    except NOT_LOADED as error:
        _report(Reported(failed=unexpected(error)))
        return 1
    engine.run()
    return 0


def _read_in_thread() -> "SimpleQueue[bytes | None]":
    """The lines that come over the socket, read by a thread, so that the end of the socket also ends
    a long answer."""
    lines: SimpleQueue[bytes | None] = SimpleQueue()

    def read() -> None:
        for line in _lines():
            lines.put(line)
        lines.put(None)
        time.sleep(_ENDS_WITHIN_SECONDS)
        os._exit(0)

    threading.Thread(target=read, daemon=True, name="orders").start()
    return lines


def _lines() -> Iterator[bytes]:
    """The lines that come over the socket."""
    rest = b""
    with suppress(OSError):
        while received := os.read(_SOCKET, 2**16):
            *lines, rest = (rest + received).split(b"\n")
            yield from lines


def _report(reported: Reported) -> None:
    """Sends a line; if nobody receives it, this process ends."""
    line = reported.model_dump_json(exclude_defaults=True).encode() + b"\n"
    try:
        while line:
            line = line[os.write(_SOCKET, line) :]
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
