"""Bytes of tensors without a framework, beside the reference package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import thruway

# What frameworks call them, and the bytes of an element.
DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


def spec(package, array: np.ndarray, dtype: str, shape: list[int]):
    return package.TensorSpec(dtype=dtype, shape=shape, data_ptr=array.ctypes.data, data_len=array.nbytes)


@pytest.mark.parametrize("metadata", [None, {"clé": "ü"}])
def test_bytes_are_the_reference_s_very_own(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    raw = np.random.default_rng(1).integers(0, 2, 96, np.uint8)
    made = [
        {f"a {dtype}": spec(package, raw, dtype, [2, 48 // nbytes]) for dtype, nbytes in DTYPES.items()}
        for package in (thruway, safetensors)
    ]
    ours, theirs = (
        package.serialize(tensors, metadata) for package, tensors in zip((thruway, safetensors), made, strict=True)
    )
    assert ours == theirs
    thruway.serialize_file(made[0], tmp_path / "a", metadata)
    assert (tmp_path / "a").read_bytes() == ours
    # The reference gives them in no order.
    found = thruway.deserialize(ours)
    assert dict(found) == dict(safetensors.deserialize(ours)) and len(found) == len(DTYPES)
    assert {type(tensor["data"]) for _, tensor in found} == {bytearray}


def test_pairs_of_four_bits_are_counted_as_the_reference_counts_them() -> None:
    raw = np.arange(6, dtype=np.uint8)
    specs = [spec(package, raw, "float4_e2m1fn_x2", [2, 3]) for package in (thruway, safetensors)]
    assert [one.shape for one in specs] == [[2, 6]] * 2
    assert thruway.serialize({"a": specs[0]}) == safetensors.serialize({"a": specs[1]})


def test_what_is_no_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is a TensorSpec, not dict"):
        thruway.serialize({"a": {"dtype": "float32"}})
    with pytest.raises(thruway.InvalidInputError, match="'float7' is no dtype"):
        thruway.TensorSpec(dtype="float7", shape=[1], data_ptr=0, data_len=4)
    array = np.zeros(3, np.float32)
    for save in (thruway.serialize, lambda tensors: thruway.serialize_file(tensors, tmp_path / "a")):
        with pytest.raises(thruway.InvalidInputError, match="needs 16 bytes and its memory holds 12"):
            save({"a": spec(thruway, array, "float32", [2, 2])})
    assert not list(tmp_path.iterdir())
    for shape, address, nbytes in (([-1], 8, 4), ([1], 0, 4), ([1], -8, 4), ([1], 8, -4)):
        with pytest.raises(thruway.InvalidInputError, match="no such memory"):
            thruway.TensorSpec(dtype="float32", shape=shape, data_ptr=address, data_len=nbytes)
    with pytest.raises(thruway.MalformedError):
        thruway.deserialize(json.dumps({"a": 1}).encode())
