"""Downloads a trained model or an export, and unpacks its tar while it arrives."""

import re
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from app.cli.client import Client, ServiceError, printable
from app.cli.terminal import console
from app.errors import InvalidRequest

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def fetch_model(client: Client, job_id: str, folder: Path) -> list[str]:
    """Downloads and unpacks a model. Returns the names of its files.

    Raises:
        InvalidRequest: the folder exists.
        ServiceError: there is no such model, or the download was cut off; no folder is left behind.
    """
    if folder.exists():
        raise InvalidRequest(
            f"{folder} already exists: run accrue download {job_id} FOLDER with a folder that does not "
            "exist yet"
        )
    return fetch_tar(client, f"/gradient-accumulation/training/{job_id}/model", folder)


def fetch_tar(client: Client, path: str, folder: Path, *, quiet: bool = False) -> list[str]:
    """Downloads a tar of regular files and unpacks it into a new folder. Returns the names of the files.

    Args:
        quiet: show no progress.

    Raises:
        ServiceError: there is none, or the download was cut off; no folder is left behind.
    """
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    unfinished.mkdir(parents=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    try:
        with (
            client.stream(path) as answer,
            Progress(*columns, console=console, disable=quiet) as bar,
        ):
            task = bar.add_task(folder.name, total=int(answer.headers.get("content-length", 0)) or None)
            arriving = _ChunkReader(answer.iter_bytes(), lambda size: bar.advance(task, size))
            names = _unpack(BufferedReader(arriving), unfinished)
    except BaseException as error:
        shutil.rmtree(unfinished)
        if isinstance(error, tarfile.TarError):
            raise ServiceError(f"{folder}: the download was cut off; run the command again") from None
        raise
    unfinished.rename(folder)
    return names


def _unpack(content: BufferedReader, folder: Path) -> list[str]:
    """Extracts the files of a tar into one folder, ignoring their paths. Returns their names."""
    names = []
    with tarfile.open(fileobj=content, mode="r|") as tar:
        for member in tar:
            source = tar.extractfile(member)
            if source is None:  # not a regular file, such as a folder
                continue
            name = Path(member.name).name
            if not _PLAIN_NAME.fullmatch(name):
                raise ServiceError(f"the download contains an unexpected file name: {printable(name)[:80]!r}")
            names.append(name)
            with (folder / names[-1]).open("wb") as target:
                shutil.copyfileobj(source, target)
    return names


class _ChunkReader(RawIOBase):
    """Presents an iterator of chunks as a file that can be read once."""

    def __init__(self, chunks: Iterator[bytes], arrived: Callable[[int], None]) -> None:
        self._chunks, self._arrived, self._rest = chunks, arrived, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        if not self._rest:
            self._rest = next(self._chunks, b"")
            self._arrived(len(self._rest))
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._rest))
        view[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
