"""Tensors of the format as numpy's arrays. What `safe_open` and loads ask of a framework."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from thruway._errors import InvalidInputError, UnsupportedError

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
CODES = {name: code for code, name in {**_DTYPES, **_ML_DTYPES}.items()}


def dtype_of(code: str) -> np.dtype[Any]:
    if code in _DTYPES:
        return np.dtype(_DTYPES[code]).newbyteorder("<")
    if code not in _ML_DTYPES:
        raise UnsupportedError(f"Dtype not understood: {code}: numpy has none for it")
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedError(
            f"numpy needs the package ml_dtypes for {_ML_DTYPES[code]}", hint="pip install ml_dtypes"
        ) from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[code]))
    return dtype


def place(device: Any) -> tuple[str, None]:
    """Arrays lie in host memory."""
    if device is not None and str(device) not in ("cpu", "cpu:0"):
        raise InvalidInputError(f"Device {device} is not supported for framework numpy")
    return "host", None


def view(name: str, buffer: Any, code: str, shape: list[int], offset: int) -> np.ndarray:
    """An array over the bytes of a buffer from `offset` on. It keeps the buffer."""
    dtype = dtype_of(code)
    count = math.prod(shape)
    try:
        if count == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(buffer, dtype, count, offset).reshape(shape)
    except (ValueError, OverflowError, TypeError):
        lengths = f"{shape[:6]}" if len(shape) <= 6 else f"{len(shape)} dimensions, {shape[:6]} and so on"
        raise UnsupportedError(f"numpy has no arrays of the shape of {name!r}: {lengths}") from None


def to(array: np.ndarray, device: None) -> np.ndarray:
    """Arrays belong where they are."""
    return array


def shape_of(code: str, shape: list[int]) -> list[int]:
    """The shape in numpy's elements."""
    return shape


def packed(array: Any) -> np.ndarray:
    """The same without gaps."""
    return np.ascontiguousarray(array).reshape(np.shape(array))


def current_stream(memory: str) -> None:
    """None: there is no GPU."""


def allocate(wanted: list[int], memory: str) -> list[tuple[int, object]]:
    """Never asked for: `place` gives host memory only."""
    raise UnsupportedError("numpy has no GPU memory")
