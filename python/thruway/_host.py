"""Host memory that Python sees: files mapped lazily, and tensors that the native half has loaded."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

from thruway._thruway import HostTensor


def mapped(path: Path) -> mmap.mmap | bytearray:
    """The whole file as memory that may be written and whose changes stay in it. Read as it is touched."""
    with path.open("rb") as file:
        # An empty file cannot be mapped, and its header could not be read either.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def buffer_of(tensor: HostTensor) -> Any:
    """The tensor's bytes as a buffer that keeps them alive."""
    buffer: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.address)
    buffer._keeps = tensor
    return buffer
