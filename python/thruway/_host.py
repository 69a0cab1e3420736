"""Host memory that Python sees: files mapped lazily, and tensors that the native half has loaded."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

from thruway._errors import ChangedError
from thruway._thruway import HostTensor


def mapped(path: Path, identity: tuple[int, int, int, int]) -> mmap.mmap:
    """The whole file as memory that may be written and whose changes stay in it. Read as it is touched.

    Raises:
        ChangedError: it is not the file any more whose header was read.
    """
    changed = ChangedError(f"{path} was changed, replaced or removed after it was opened", hint="open it again")
    try:
        # What stands there now may be a pipe, whose opening would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            now = os.fstat(file.fileno())
            if (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns) != identity:
                raise changed
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise changed from None


def buffer_of(tensor: HostTensor) -> Any:
    """The tensor's bytes as a buffer that keeps them alive."""
    buffer: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.address)
    buffer._keeps = tensor
    return buffer
