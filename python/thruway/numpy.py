"""Loading and saving numpy arrays, with the functions of `safetensors.numpy`.

bfloat16 and the 8-bit floats need the package `ml_dtypes`, which numpy takes them from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import numpy as np

from thruway import _save
from thruway._errors import InvalidInputError, UnsupportedError
from thruway._open import load as _load
from thruway._thruway import Loading, Model, Receipt, parse_header

__all__ = ["load", "load_file", "save", "save_file"]

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_CODES = {name: code for code, name in {**_DTYPES, **_ML_DTYPES}.items()}


def load_file(
    filename: str | PathLike[str],
    *,
    backend: str = "mmap",
    path: str = "auto",
    receipt: Callable[[Receipt], object] | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, np.ndarray]:
    """Loads a file, a directory of shards or an index.

    Args:
        filename: what to load.
        backend: "mmap" maps files, which are read as arrays are touched; "pread" reads all of it now, at the drive's
            own speed.
        path: which way the bytes go, if they are read now: "auto", "staged" or "cached".
        receipt: called with what the load did; then it is read now.
        progress: called now and then with the bytes moved so far; likewise.

    Returns:
        An array for each name, in the order of the bytes. Arrays may be changed; a mapped file is not.
    """
    from thruway._open import safe_open

    if backend == "mmap" and path == "auto" and receipt is None and progress is None:
        with safe_open(filename, "np") as opened:
            return opened.get_tensors()
    if backend not in ("mmap", "pread"):
        raise InvalidInputError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
    arrays, told = _load(_module(), Model(filename, "host"), "host", None, [], path=path, progress=progress)
    if receipt is not None:
        receipt(told)
    return arrays


def load(data: bytes | bytearray | memoryview) -> dict[str, np.ndarray]:
    """The arrays in the bytes of a file. They are copies."""
    data = _save.bytes_of(data)
    entries, _ = parse_header(data, len(data))
    return {name: _view(data, dtype, shape, start).copy() for name, dtype, shape, _, start, _ in entries}


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
    code = _CODES.get(array.dtype.name)
    if code is None:
        raise InvalidInputError(f"`{name}` has the dtype {array.dtype}, which safetensors files cannot hold")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    array = np.ascontiguousarray(array).reshape(array.shape)
    return _save.Source(name, code, list(array.shape), "host", array.ctypes.data, array.nbytes, array)


def _numpy_dtype(code: str) -> np.dtype[Any]:
    if code in _DTYPES:
        return np.dtype(_DTYPES[code]).newbyteorder("<")
    if code not in _ML_DTYPES:
        raise UnsupportedError(f"Dtype not understood: {code}: numpy has none for it")
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedError(
            f"numpy needs the package ml_dtypes for {_ML_DTYPES[code]}\nhint: pip install ml_dtypes"
        ) from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[code]))
    return dtype


# --- what `safe_open` asks of a framework


def _module() -> Any:
    import sys

    return sys.modules[__name__]


def _place(device: Any) -> tuple[str, None]:
    if device != "cpu":
        raise InvalidInputError(f"Device {device} is not supported for framework numpy")
    return "host", None


def _view(buffer: Any, code: str, shape: list[int], offset: int) -> np.ndarray:
    dtype = _numpy_dtype(code)
    count = int(np.prod(shape, dtype=np.uint64)) if shape else 1
    if count == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype, count, offset).reshape(shape)


def _to(array: np.ndarray, device: None) -> np.ndarray:
    return array


def _shape(code: str, shape: list[int]) -> list[int]:
    return shape


def _packed(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(np.shape(array))


def _gpu_terms(memory: str) -> tuple[None, None]:
    return None, None


def _allocate(loading: Loading, wanted: Any, memory: str, tensors: dict[str, Any]) -> None:
    raise UnsupportedError("numpy has no GPU memory")
