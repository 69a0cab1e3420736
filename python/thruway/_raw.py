"""Bytes of tensors without any framework: what other packages build their own functions on."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from thruway import _save
from thruway._errors import InvalidInputError
from thruway._thruway import parse_header

# What frameworks call the format's dtypes.
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}


class TensorSpec:
    """A tensor in host memory that is to be serialized.

    Args:
        dtype: as frameworks call it ("float32", "bfloat16") or as the format does ("F32", "BF16").
        shape: the length of each dimension, in the framework's elements: of float4_e2m1fn_x2, in pairs.
        data_ptr: the address of its bytes, which lie packed and stay there while it is in use.
        data_len: how many bytes.
    """

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        code = _DTYPES.get(dtype, dtype if dtype in _DTYPES.values() else None)
        if code is None:
            raise InvalidInputError(f"{dtype!r} is no dtype of the format")
        self.dtype, self.shape = code, list(map(operator.index, shape))
        self.data_ptr, self.data_len = operator.index(data_ptr), operator.index(data_len)
        if min(*self.shape, self.data_ptr, self.data_len) < 0 or not (self.data_ptr or self.data_len == 0):
            raise InvalidInputError(f"there is no such memory: {self}")
        if dtype == "float4_e2m1fn_x2" and self.shape:
            self.shape[-1] *= 2

    def __repr__(self) -> str:
        return f"TensorSpec(dtype={self.dtype!r}, shape={self.shape}, data_len={self.data_len})"


def _source(name: str, spec: Any) -> _save.Source:
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"`{name}` is a TensorSpec, not {type(spec).__name__}")
    return _save.Source(name, spec.dtype, spec.shape, "host", spec.data_ptr, spec.data_len, spec)


def serialize(tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors."""
    return _save.to_bytes(_save.checked(tensor_dict, _source), metadata)


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec], filename: str | PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a file with these tensors. What stood there is replaced only once the new one is complete and synced."""
    _save.to_storage(_save.checked(tensor_dict, _source), filename, metadata, None, None, None)


def deserialize(data: bytes | bytearray | memoryview) -> list[tuple[str, dict[str, Any]]]:
    """The tensors in the bytes of a file: names, each with its "shape", its "dtype" and a copy of its bytes, "data"."""
    data = _save.bytes_of(data)
    entries, _ = parse_header(data, len(data))
    return [
        (name, {"shape": shape, "dtype": dtype, "data": bytearray(data[start:end])})
        for name, dtype, shape, _, start, end in entries
    ]
