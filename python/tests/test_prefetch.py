"""`safe_open.prefetch` and `get_tensor_meta`."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import thruway
import thruway.numpy as ours
import torch
from thruway import safe_open

ARRAYS = {f"t{number}": np.arange(number * 1000, number * 1000 + 1500).reshape(50, 30) for number in range(20)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ours.save_file(ARRAYS, tmp_path / "model", max_shard_bytes=60_000)
    return tmp_path / "model"


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_all_tensors_come_once_in_the_order_of_their_bytes(path: Path, framework: str) -> None:
    with safe_open(path, framework) as opened:
        loader = opened.prefetch()
        assert loader.names() == opened.offset_keys() and len(loader) == 20
        assert np.array_equal(loader.take("t7"), ARRAYS["t7"])
        names = []
        for name, tensor in loader:
            assert np.array_equal(tensor, ARRAYS[name])
            names.append(name)
        assert names == [name for name in opened.offset_keys() if name != "t7"]
        assert len(loader) == 0 and list(loader) == []


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_plan_says_which_part_of_which_tensor(path: Path, framework: str) -> None:
    plan = {"t3": slice(5, 9), "t4": (slice(None), slice(1, 30, 2)), "t5": None, "t6": (..., 0), "t7": 3}
    with safe_open(path, framework) as opened, opened.prefetch(plan, threads=4) as loader:
        assert sorted(loader.names()) == sorted(plan)
        for name in ("t6", "t3", "t7", "t5", "t4"):
            wanted = ARRAYS[name] if plan[name] is None else ARRAYS[name][plan[name]]
            found = loader.take(name)
            assert found.shape == wanted.shape and np.array_equal(found, wanted), name


def test_what_is_not_there_to_take_is_named(path: Path) -> None:
    with safe_open(path, "np") as opened:
        with pytest.raises(thruway.SafetensorError, match="does not contain tensor nothing"):
            opened.prefetch({"nothing": None})
        with pytest.raises(thruway.SafetensorError, match="a plan is a dict"):
            opened.prefetch(["t1"])
        with pytest.raises(ValueError):
            opened.prefetch({"t1": 50})
        loader = opened.prefetch({"t1": None, "t2": None})
        loader.take("t1")
        for name in ("t1", "t9"):
            with pytest.raises(thruway.SafetensorError, match="was not planned, or was already delivered"):
                loader.take(name)
        loader.close()
        with pytest.raises(thruway.SafetensorError, match="closed"):
            loader.take("t2")


def test_what_was_taken_outlives_loader_handle_and_file(path: Path) -> None:
    with safe_open(path, "pt") as opened, opened.prefetch() as loader:
        kept = loader.take("t11")
    for file in path.iterdir():
        file.unlink()
    assert np.array_equal(kept, ARRAYS["t11"])


def test_a_closed_handle_prefetches_nothing(path: Path) -> None:
    with safe_open(path, "np") as opened:
        pass
    with pytest.raises(thruway.SafetensorError, match="File is closed"):
        opened.prefetch()


def test_meta_is_what_the_header_says(tmp_path: Path, write_file) -> None:
    path = write_file({"b": ("F32", [2, 3], b"\1" * 24), "a": ("U8", [0], b""), "c": ("BF16", [], b"ab")})
    with safe_open(path, "np") as opened:
        assert opened.get_tensor_meta("b") == ("F32", [2, 3], (0, 24))
        assert opened.get_tensor_meta("a").data_offsets == (24, 24)
        meta = opened.get_tensor_meta("c")
        assert (meta.dtype, meta.shape, meta.data_offsets) == ("BF16", [], (24, 26))
        with pytest.raises(thruway.SafetensorError, match="does not contain tensor zz"):
            opened.get_tensor_meta("zz")


def test_a_handle_can_be_sent_to_a_worker(path: Path) -> None:
    opened = safe_open(path, "pt", backend="pread")
    again = pickle.loads(pickle.dumps(opened))
    assert again.keys() == opened.keys() and torch.equal(again.get_tensor("t2"), opened.get_tensor("t2"))
