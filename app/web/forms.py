"""Limits on forms: a form of this service has one file and few fields."""

import errno
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

from starlette._utils import AwaitableOrContextManager, AwaitableOrContextManagerWrapper
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.errors import DiskFull, Unavailable
from app.web.thread_route import ThreadRoute

_MAX_FIELDS = 24
"""More than any client of OpenAI's API sends, with a field for each assigned column."""
_MAX_FIELD_BYTES = 2**14


class SmallFormRoute(ThreadRoute):
    """A route whose form may have one file. Starlette keeps a file open for each file of a form, and all
    fields in memory."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_small(request: Request) -> Response:
            return await handle(_SmallForm(request.scope, request.receive))

        return handle_small


class _SmallForm(Request):
    def form(self, **_: Any) -> AwaitableOrContextManager[FormData]:
        return AwaitableOrContextManagerWrapper(self._small_form())

    async def _small_form(self) -> FormData:
        """
        Raises:
            HTTPException: the disk with the temporary files is full, or no more files can be opened: the form
                itself may be valid.
        """
        limits = {"max_files": 1, "max_fields": _MAX_FIELDS, "max_part_size": _MAX_FIELD_BYTES}
        try:
            return await super().form(**limits)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                full = f"The disk of {tempfile.gettempdir()} is full: nothing was stored."
                raise HTTPException(DiskFull.status, full) from None
            failed = f"The upload failed ({error.strerror}): try again."
            raise HTTPException(Unavailable.status, failed) from None
