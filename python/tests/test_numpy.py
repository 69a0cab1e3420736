"""`thruway.numpy`, beside the reference package."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as reference
import thruway
import thruway.numpy as ours
from thruway import _arrays


def arrays_of_every_kind() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    made = {}
    for name in [*_arrays._DTYPES.values(), *_arrays._ML_DTYPES.values()]:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        for shape in ((), (0, 3), (5, 7), (700, 300)):
            raw = random.integers(0, 2 if name == "bool" else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
            made[f"{name} {shape}"] = raw.view(dtype).reshape(shape)
    return made


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape), name
        assert array.tobytes() == other[name].tobytes(), name


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = arrays_of_every_kind()
    ours.save_file(saved, tmp_path / "a")
    for backend in ("mmap", "pread"):
        assert_same_bits(saved, ours.load_file(tmp_path / "a", backend=backend))
    assert_same_bits(saved, ours.load(ours.save(saved)))


def test_the_reference_reads_what_we_write_and_small_files_are_its_very_bytes(tmp_path: Path) -> None:
    known = set(_arrays._DTYPES.values())
    plain = {name: array for name, array in arrays_of_every_kind().items() if name.split()[0] in known}
    ours.save_file(plain, tmp_path / "a", {"b": "c"})
    assert_same_bits(plain, reference.load_file(tmp_path / "a"))
    small = {name: array for name, array in plain.items() if array.size < 100}
    assert ours.save(small, {"b": "c"}) == reference.save(small, {"b": "c"})


def test_arrays_in_any_order_of_elements_or_bytes_are_saved_as_they_read() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)
    back = ours.load(ours.save({"big": array, "turned": array.T, "part": array[::2, 1:]}))
    assert np.array_equal(back["big"], array) and np.array_equal(back["turned"], array.T)
    assert np.array_equal(back["part"], array[::2, 1:])


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    for bad in (
        {"a": np.array(["text"])},
        {"a": [1]},
        {"a": np.zeros(2, np.complex128)},
        {"__metadata__": np.zeros(1)},
        {"a": np.ma.array([1, 2], mask=[False, True])},
        5,
    ):
        with pytest.raises(ValueError):
            ours.save_file(bad, tmp_path / "a")
    with pytest.raises(ValueError, match="metadata"):
        ours.save({"a": np.zeros(1)}, {"a": 1})
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    ours.save_file({"a": np.ones(3)}, tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(thruway.SafetensorError):
        ours.save_file({"a": np.ones(3), "__metadata__": np.ones(3)}, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
