"""What strangers and tired colleagues pass: each is an error that says so, and of a kind that programs catch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import thruway
import thruway.numpy
import thruway.torch as ours
import torch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ours.save_file({"a": torch.ones(4, 4)}, tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize("device", ["foo", "", -1, "meta", True, 1.5, "cuda:99", [], "cpu:x"])
def test_devices_that_are_none(path: Path, device: Any) -> None:
    for call in (ours.load_file, lambda *arguments: thruway.safe_open(arguments[0], "pt", arguments[1])):
        with pytest.raises(thruway.ThruwayError):
            call(path, device)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, "mps", "meta", 5.0])
def test_devices_that_numpy_has_none_of(path: Path, device: Any) -> None:
    with pytest.raises(thruway.InvalidInputError, match="is not supported for framework numpy"):
        thruway.safe_open(path, "np", device=device)


def test_text_that_no_file_can_hold(tmp_path: Path) -> None:
    half = "\ud800"
    for save in (lambda *arguments: ours.save_file(arguments[0], tmp_path / "b", arguments[1]), ours.save):
        with pytest.raises(thruway.InvalidInputError, match="half of a surrogate pair"):
            save({half: torch.ones(1)}, None)
        with pytest.raises(thruway.InvalidInputError, match="half of a surrogate pair"):
            save({"a": torch.ones(1)}, {"key": half})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [5, None, 1.5, ["a"]])
def test_paths_that_are_none(bad: Any) -> None:
    for call in (ours.load_file, lambda path: ours.save_file({"a": torch.ones(1)}, path), thruway.numpy.load_file):
        with pytest.raises(TypeError):
            call(bad)


@pytest.mark.parametrize("bad", ["", "a\0b"])
def test_paths_that_lead_nowhere(bad: str) -> None:
    for call in (ours.load_file, lambda path: ours.save_file({"a": torch.ones(1)}, path)):
        with pytest.raises((ValueError, OSError, RuntimeError)):
            call(bad)


@pytest.mark.parametrize("bad", ["bogus", 5, None, ""])
def test_ways_that_are_none(path: Path, bad: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        ours.load_file(path, path=bad)
    with pytest.raises((ValueError, TypeError)):
        thruway.safe_open(path, "pt", path=bad)


def header_with(shape: list[int], dtype: str = "F32") -> bytes:
    text = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("shape", [[2**63, 0], [2**40, 2**40, 0], [0] * 70, [0] + [1] * 100_000, [2**64, 0], [-1, 0]])
def test_shapes_that_no_framework_has(shape: list[int]) -> None:
    """Empty ones, which take up no bytes: each is loaded as it is, or refused."""
    for load in (ours.load, thruway.numpy.load):
        try:
            loaded = load(header_with(shape))
        except thruway.ThruwayError as error:
            assert len(str(error)) < 1000
        else:
            assert list(loaded["a"].shape) == shape


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_tensors_that_have_no_bytes_of_their_own(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    lazy = torch.nn.LazyLinear(3).weight
    for tensor in (nested, lazy, torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises((ValueError, RuntimeError)):
            ours.save_file({"a": tensor}, tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_arguments_that_are_no_functions(path: Path) -> None:
    for options in ({"progress": 5}, {"receipt": 5}):
        with pytest.raises((TypeError, ValueError)):
            ours.load_file(path, **options)


@pytest.mark.parametrize(
    "index", [slice(0, 4, 2**70), slice(0.5, 2), slice(None, None, 1.5), slice("a"), np.float32(1)]
)
def test_indices_that_are_none(path: Path, index: Any) -> None:
    part = thruway.safe_open(path, "pt").get_slice("a")
    try:
        found = part[index]
    except (ValueError, TypeError):
        return
    assert index == slice(0, 4, 2**70) and torch.equal(found, torch.ones(1, 4))


def test_empty_tensors_are_made_on_the_cpu_whatever_the_default() -> None:
    saved = ours.save({"e": torch.zeros(0, 3), "a": torch.ones(2)})
    with torch.device("meta"):
        loaded = ours.load(saved)
    assert {str(tensor.device) for tensor in loaded.values()} == {"cpu"}
