"""`python -m workers.exports.export_main`: makes one export and verifies it, in a process without secrets.

The task comes over standard input. A model's files are untrusted: the process sees only what it needs, and
has neither the database nor, once the model's files are there, a secret.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from app.contract.export import ExportResult
from app.contract.regular_files import NotRegular, create_regular
from workers.exports.make import make
from workers.exports.protocol import RESULT, ExportTask
from workers.exports.refusal import NotExported
from workers.inference.loading import NOT_LOADED
from workers.training.exceptions import CannotTrain
from workers.training.models.fetching import fetch, fetch_in_child
from workers.training.processes.filesystem_view import show_model
from workers.training.processes.lifeline import die_with_parent
from workers.training.processes.limits import limit
from workers.training.processes.process_tree import run_sandboxed

_KILL_FIRST = "700"
"""For /proc/self/oom_score_adj: if memory runs out, this process ends before trainers and engines do."""


def main() -> int:
    """Makes the export of the task, and writes the result."""
    die_with_parent()
    task = ExportTask.model_validate_json(sys.stdin.buffer.read())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # what libraries print may contain training text
    limit()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILL_FIRST)
    fetch_in_child(lambda: _fetch(task))  # if files are still missing, loading reports it
    return run_sandboxed(lambda apart: _export(task, apart), isolated=task.hidden is not None)


def _fetch(task: ExportTask) -> int:
    with suppress(OSError, ValueError, ImportError):
        fetch(task.order.model, task.path)
    return 0


def _export(task: ExportTask, apart: bool) -> int:
    """Makes the export.

    Args:
        apart: whether this process has its own mounts.
    """
    try:
        own = {Path(task.data): False, Path(task.folder): True, Path(task.temporary): True}
        show_model(task.order.model, task.path, task.layer_paths, own, task.hidden, apart=apart)
        result = make(task)
    except NotRegular:
        result = ExportResult(error="a folder of the model's files is a link by now")
    except (CannotTrain, NotExported) as error:
        result = ExportResult(error=str(error)[:2000])
    except MemoryError:
        result = ExportResult(error="the machine has too little memory for the model")
    except NOT_LOADED as error:
        what = "memory ran out" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        result = ExportResult(
            error=f"the model could not be exported in this format ({what}): choose another format"
        )
    with create_regular(Path(task.temporary) / RESULT) as file:
        file.write(result.model_dump_json().encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
