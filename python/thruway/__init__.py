"""Moves tensors between storage and GPU memory by the shortest path the machine has, and says which path it took.

`thruway.torch` and `thruway.numpy` hold the functions that load and save, with the names of the `safetensors` package;
`safe_open` opens a file for reading tensor by tensor. This module imports neither torch nor numpy.
"""

import atexit

from thruway import _thruway
from thruway._errors import (
    AlreadyExistsError,
    BadIndexError,
    CancelledError,
    ChangedError,
    GpuError,
    InvalidInputError,
    LimitReachedError,
    MalformedError,
    MismatchError,
    NoSpaceError,
    NotFoundError,
    OutOfMemoryError,
    PathUnavailableError,
    PermissionDeniedError,
    SafetensorError,
    StorageError,
    ThruwayError,
    TruncatedError,
    UnsupportedError,
)
from thruway._open import Slice, TensorMeta, safe_open
from thruway._prefetch import PrefetchLoader
from thruway._raw import TensorSpec, deserialize, serialize, serialize_file
from thruway._thruway import Receipt, __version__, device_count

# A thread that loads while the interpreter ends would take the process down.
atexit.register(_thruway.close)

__all__ = [
    "AlreadyExistsError",
    "BadIndexError",
    "CancelledError",
    "ChangedError",
    "GpuError",
    "InvalidInputError",
    "LimitReachedError",
    "MalformedError",
    "MismatchError",
    "NoSpaceError",
    "NotFoundError",
    "OutOfMemoryError",
    "PathUnavailableError",
    "PermissionDeniedError",
    "PrefetchLoader",
    "Receipt",
    "SafetensorError",
    "Slice",
    "StorageError",
    "TensorMeta",
    "TensorSpec",
    "ThruwayError",
    "TruncatedError",
    "UnsupportedError",
    "__version__",
    "deserialize",
    "device_count",
    "safe_open",
    "serialize",
    "serialize_file",
]
