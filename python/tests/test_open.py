"""`safe_open`: tensor by tensor, and parts of tensors."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import thruway
import thruway.numpy
import torch
from thruway import safe_open

WHOLE = np.arange(5 * 4 * 3, dtype=np.float32).reshape(5, 4, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"b": WHOLE, "a": np.zeros((0, 3), np.int8), "scalar": np.array(7, np.int64)}
    thruway.numpy.save_file(tensors, tmp_path / "model.safetensors", {"key": "value"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_what_a_file_holds(path: Path, framework: str, backend: str) -> None:
    with safe_open(path, framework, backend=backend) as opened:
        assert opened.keys() == ["a", "b", "scalar"]
        assert sorted(opened.offset_keys()) == opened.keys()
        assert opened.metadata() == {"key": "value"}
        assert (opened.get_shape("b"), opened.get_dtype("b")) == ([5, 4, 3], "F32")
        assert np.array_equal(np.asarray(opened.get_tensor("b")), WHOLE)
        assert opened.get_tensors().keys() == {"a", "b", "scalar"}
        assert opened.get_tensor("scalar").item() == 7
        part = opened.get_slice("b")
        assert (part.get_shape(), part.get_dtype()) == ([5, 4, 3], "F32")


INDICES = [
    ...,
    0,
    -1,
    slice(None),
    slice(1, 3),
    slice(3, 1),
    slice(-2, None),
    slice(0, 99),
    slice(None, None, 2),
    (slice(1, 5), 2),
    (slice(None), slice(1, 3)),
    (..., 1),
    (..., slice(1, None)),
    (0, ..., 2),
    (2, 3, 1),
    (slice(None), slice(None), slice(0, 0)),
    (slice(1, None, 3), slice(None, None, 2), slice(None, 2)),
    [],
]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_slice_is_what_numpy_would_give(path: Path, index: object, backend: str) -> None:
    with safe_open(path, "np", backend=backend) as opened:
        found = opened.get_slice("b")[index]
        assert found.shape == WHOLE[index].shape and np.array_equal(found, WHOLE[index])
    with safe_open(path, "pt", backend=backend) as opened:
        found = opened.get_slice("b")[index]
        assert found.is_contiguous() and np.array_equal(found.numpy(), WHOLE[index])


def test_every_range_of_every_dimension(path: Path) -> None:
    with safe_open(path, "pt", backend="pread") as opened:
        part = opened.get_slice("b")
        for dimension, length in enumerate(WHOLE.shape):
            for start, stop in itertools.combinations(range(length + 1), 2):
                index = (*[slice(None)] * dimension, slice(start, stop))
                assert np.array_equal(part[index].numpy(), WHOLE[index]), index


@pytest.mark.parametrize(
    "index",
    [5, -6, (0, 0, 0, 0), slice(None, None, -1), slice(None, None, 0), [0], "a", 1.5, (..., ...), True, np.array([1])],
    ids=str,
)
def test_an_index_that_cannot_be_is_an_error(path: Path, index: object) -> None:
    with safe_open(path, "np") as opened:
        # Programs catch either.
        for kind in (ValueError, IndexError):
            with pytest.raises(kind):
                opened.get_slice("b")[index]


def test_a_slice_of_an_empty_tensor(path: Path) -> None:
    with safe_open(path, "np") as opened:
        assert opened.get_slice("a")[:].shape == (0, 3)
        assert opened.get_slice("a")[:, 1:].shape == (0, 2)
        assert opened.get_slice("scalar")[...] == 7


def test_mistakes_are_named(path: Path) -> None:
    with pytest.raises(ValueError, match="framework bogus is invalid"):
        safe_open(path, "bogus")
    with pytest.raises(ValueError, match='backend "bogus" is invalid'):
        safe_open(path, "pt", backend="bogus")
    with pytest.raises(ValueError, match="Device cuda:0 is not supported for framework numpy"):
        safe_open(path, "np", device="cuda:0")
    opened = safe_open(path, "pt")
    with pytest.raises(thruway.SafetensorError, match="File does not contain tensor zz"):
        opened.get_tensor("zz")
    with opened:
        pass
    for call in (opened.keys, opened.metadata, lambda: opened.get_tensor("b"), lambda: opened.get_slice("b")):
        with pytest.raises(thruway.SafetensorError, match="File is closed"):
            call()


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_file_that_was_replaced_or_cut_after_it_was_opened_is_not_read(path: Path, backend: str) -> None:
    opened = safe_open(path, "np", backend=backend)
    thruway.numpy.save_file({"b": WHOLE + 1}, path)
    with pytest.raises(thruway.ChangedError):
        opened.get_tensor("b")
    opened = safe_open(path, "np", backend=backend)
    with path.open("r+b") as file:
        file.truncate(200)
    with pytest.raises(thruway.ChangedError):
        opened.get_tensor("b")


def test_a_handle_reads_a_tensor_again_and_again(path: Path) -> None:
    for backend in ("mmap", "pread"):
        with safe_open(path, "pt", backend=backend) as opened:
            for _ in range(20):
                assert torch.equal(opened.get_tensor("b"), torch.from_numpy(WHOLE))
