"""Reports a full disk as such, whichever library has found it full."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError


@contextmanager
def full_disk_reported() -> Iterator[None]:
    """Turns safetensors' error of a full disk into Python's.

    Raises:
        OSError: the disk is full, or a quota is used up.
    """
    try:
        yield
    except SafetensorError as error:
        for code in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(code) in str(error) or f"os error {code}" in str(error):
                raise OSError(code, os.strerror(code)) from None
        raise
