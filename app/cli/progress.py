"""Progress of uploads and of waiting, on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import BinaryIO

from rich.console import Console
from rich.progress import Progress

_SHOWN_FROM_BYTES = 2**22


@contextmanager
def uploading(name: str, size: int, content: BinaryIO) -> Iterator[BinaryIO]:
    """Yields the content, wrapped so that reading it moves a progress bar (none for small uploads, or without
    a terminal). Once everything is sent, the bar says that the service checks the file."""
    console = Console(stderr=True)
    if not console.is_terminal or size < _SHOWN_FROM_BYTES:
        yield content
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"Uploading {name}", total=size)
        read = content.read

        def noted(count: int = -1) -> bytes:
            block = read(count)
            sent = content.tell()
            what = f"Uploading {name}" if sent < size else f"The service checks {name}"
            progress.update(task, completed=sent, description=what)
            return block

        yield _Noted(content, noted)  # type: ignore[misc]


class _Noted:
    """A file whose `read` is replaced."""

    def __init__(self, content: BinaryIO, read: object) -> None:
        self._content, self.read = content, read

    def __getattr__(self, name: str) -> object:
        return getattr(self._content, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(lambda: self.read(2**16), b"")  # type: ignore[operator]


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[None]:
    """Shows on a terminal that something is going on."""
    with nullcontext() if quiet else Console(stderr=True).status(f"{what} …"):
        yield
