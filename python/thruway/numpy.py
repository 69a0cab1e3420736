"""Loading and saving numpy arrays, with the functions of `safetensors.numpy`.

bfloat16 and the 8-bit floats need the package `ml_dtypes`, which numpy takes them from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import numpy as np

from thruway import _arrays, _open, _progress, _save
from thruway._errors import InvalidInputError
from thruway._thruway import Model, Receipt, parse_header

__all__ = ["load", "load_file", "save", "save_file"]


def load_file(
    filename: str | PathLike[str],
    *,
    backend: str = "mmap",
    path: str = "auto",
    receipt: Callable[[Receipt], object] | None = None,
    progress: _progress.Progress = None,
) -> dict[str, np.ndarray]:
    """Loads a file, a directory of shards or an index.

    Args:
        filename: what to load.
        backend: "mmap" maps files, which are read as arrays are touched; "pread" reads all of it now, at the drive's
            own speed.
        path: which way the bytes go, if they are read now: "auto", "staged" or "cached".
        receipt: called with what the load did; then it is read now.
        progress: `True` shows it on stderr; a function is called now and then with the bytes moved so far; likewise.

    Returns:
        An array for each name, in the order of the bytes. Arrays may be changed; a mapped file is not.
    """
    _open.check_backend(backend)
    if backend == "mmap" and path == "auto" and receipt is None and not progress:
        with _open.safe_open(filename, "np") as opened:
            return opened.get_tensors()
    model = Model(filename, "host", path)
    with _progress.shown(progress, sum(end - start for *_, start, end in model.entries())) as tell:
        arrays, told = _open.Load(_arrays, model, "host", None, [], progress=tell).wait()
    if receipt is not None:
        receipt(told)
    return arrays


def load(data: bytes | bytearray | memoryview) -> dict[str, np.ndarray]:
    """The arrays in the bytes of a file. They are copies."""
    data = _save.bytes_of(data)
    entries, _ = parse_header(data, len(data))
    return {name: _arrays.view(name, data, dtype, shape, start).copy() for name, dtype, shape, _, start, _ in entries}


def save_file(
    tensor_dict: Mapping[str, np.ndarray],
    filename: str | PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_bytes: int | None = None,
    receipt: Callable[[Receipt], object] | None = None,
) -> None:
    """Saves arrays. What stands at `filename` is replaced only when the new is complete and on the drive.

    Args:
        tensor_dict: the arrays. Those that are not contiguous are copied first.
        filename: the file, or with `max_shard_bytes` the directory.
        metadata: text pairs for the header.
        max_shard_bytes: writes a directory of files of at most so many bytes and an index.
        receipt: called with what the save did.
    """
    _save.to_storage(_save.checked(tensor_dict, _source), filename, metadata, max_shard_bytes, None, receipt)


def save(tensor_dict: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes that `save_file` would write."""
    return _save.to_bytes(_save.checked(tensor_dict, _source), metadata)


def _source(name: str, array: Any) -> _save.Source:
    if not isinstance(array, np.ndarray):
        raise InvalidInputError(f"Key `{name}` is invalid, expected numpy.ndarray but received {type(array)}")
    if isinstance(array, np.ma.MaskedArray):
        hint = "save its data and its mask under two names, or call `.filled()`"
        raise InvalidInputError(f"`{name}` has a mask, which the format has no place for", hint=hint)
    code = _arrays.CODES.get(array.dtype.name)
    if code is None:
        raise InvalidInputError(f"`{name}` has the dtype {array.dtype}, which safetensors files cannot hold")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    array = np.ascontiguousarray(array).reshape(array.shape)
    return _save.Source(name, code, list(array.shape), "host", array.ctypes.data, array.nbytes, array)
