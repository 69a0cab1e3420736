"""Moves tensors between storage and GPU memory by the shortest path the machine has, and says which path it took.

`thruway.torch` and `thruway.numpy` hold the functions that load and save, with the names of the `safetensors` package;
`safe_open` opens a file for reading tensor by tensor. This module imports neither torch nor numpy.
"""

from thruway._errors import (
    CancelledError,
    ChangedError,
    GpuError,
    InvalidInputError,
    MalformedError,
    NoSpaceError,
    NotFoundError,
    OutOfMemoryError,
    PathUnavailableError,
    PermissionDeniedError,
    SafetensorError,
    ThruwayError,
    UnsupportedError,
)
from thruway._open import safe_open
from thruway._thruway import Receipt, __version__, device_count

__all__ = [
    "CancelledError",
    "ChangedError",
    "GpuError",
    "InvalidInputError",
    "MalformedError",
    "NoSpaceError",
    "NotFoundError",
    "OutOfMemoryError",
    "PathUnavailableError",
    "PermissionDeniedError",
    "Receipt",
    "SafetensorError",
    "ThruwayError",
    "UnsupportedError",
    "__version__",
    "device_count",
    "safe_open",
]
