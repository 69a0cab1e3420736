"""`stream`: tensors one after another, with a bound on the memory that is under way."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import thruway
import thruway.torch as ours
import torch

COUNT, LENGTH = 24, 100_000
BYTES = COUNT * LENGTH * 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    saved = {f"t{number:02}": torch.full((LENGTH,), float(number)) for number in range(COUNT)}
    ours.save_file(saved, tmp_path / "model", max_shard_bytes=BYTES // 3)
    return tmp_path / "model"


def assert_is_its_number(name: str, tensor: torch.Tensor) -> None:
    assert tensor.shape == (LENGTH,) and (tensor == int(name[1:])).all(), name


@pytest.mark.parametrize("budget", [None, LENGTH * 4 + 512, LENGTH * 12, BYTES * 9])
def test_every_tensor_comes_once_whatever_the_budget(path: Path, budget: int | None) -> None:
    names = []
    for name, tensor in ours.stream(path, device_budget_bytes=budget):
        assert_is_its_number(name, tensor)
        names.append(name)
    assert names == sorted(f"t{number:02}" for number in range(COUNT))


def test_several_models_are_one_stream(path: Path) -> None:
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 2
    assert dict(ours.stream(files)).keys() == dict(ours.stream(path)).keys()
    assert list(ours.stream([])) == []
    with pytest.raises(thruway.InvalidInputError, match="'t00' stands in two of the models"):
        list(ours.stream([files[0], path]))


def test_what_is_wanted_is_what_comes(path: Path) -> None:
    streamed = dict(ours.stream(path, names=["t03", "t20"], shard={"t20": (0, 1, 4)}, dtype=torch.float16))
    assert {name: (tensor.dtype, len(tensor)) for name, tensor in streamed.items()} == {
        "t03": (torch.float16, LENGTH),
        "t20": (torch.float16, LENGTH // 4),
    }
    assert (streamed["t20"] == 20).all()


def test_tensors_own_their_memory(path: Path) -> None:
    kept = {}
    for name, tensor in ours.stream(path, device_budget_bytes=LENGTH * 8 + 1024):
        tensor += 1
        kept[name] = tensor
    for file in path.iterdir():
        file.unlink()
    gc.collect()
    for name, tensor in kept.items():
        assert (tensor == int(name[1:]) + 1).all()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_under_way_stays_within_the_budget(tmp_path: Path) -> None:
    """Half a gigabyte passes through 32 MiB, each tensor dropped before the next: memory shows no more than that."""
    piece = 8 << 20
    saved = {f"t{number}": torch.full((piece,), number, dtype=torch.uint8) for number in range(64)}
    ours.save_file(saved, tmp_path / "a")
    del saved
    gc.collect()
    # What the first load of a process keeps: threads and what passes through the ring.
    list(ours.stream(tmp_path / "a", names=["t0"], path="staged"))
    before, most = _resident_bytes(), 0
    for name, tensor in ours.stream(tmp_path / "a", device_budget_bytes=4 * (piece + 512)):
        assert tensor[-1] == int(name[1:])
        del tensor
        most = max(most, _resident_bytes() - before)
    # Beside the budget the ring and allocators' slack.
    assert most < 4 * piece + (48 << 20), f"{most >> 20} MiB"


def test_a_stream_that_nobody_reads_on_stops_and_lets_go(path: Path) -> None:
    def walk(count: int) -> None:
        for _ in range(count):
            for _, _tensor in ours.stream(path, device_budget_bytes=LENGTH * 8 + 1024):
                break

    walk(20)
    gc.collect()
    before, descriptors = _resident_bytes(), _descriptors()
    walk(300)
    gc.collect()
    assert _resident_bytes() - before < 24 << 20
    assert _descriptors() == descriptors


def test_a_receipt_and_progress_tell_of_the_whole(path: Path) -> None:
    receipts: list[thruway.Receipt] = []
    moved: list[int] = []
    dict(ours.stream(path, device_budget_bytes=LENGTH * 12, receipt=receipts.append, progress=moved.append))
    assert [one.bytes for one in receipts] == [BYTES]
    assert sum(receipts[0].to_dict()["paths"].values()) == BYTES
    assert moved == sorted(moved) and moved[-1] == BYTES


def test_progress_can_be_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dict(ours.stream(path, progress=True))
    told = capsys.readouterr()
    assert told.out == "" and "9.60 of 9.60 MB" in told.err


def test_a_failure_in_the_middle_is_an_error_and_not_an_end(path: Path) -> None:
    """The last shard is replaced when the first tensors are out."""
    stream = ours.stream(path, device_budget_bytes=LENGTH * 4 + 512)
    next(stream)
    last = sorted(path.glob("*.safetensors"))[-1]
    ours.save_file(ours.load_file(last, backend="pread"), last)
    with pytest.raises(thruway.ChangedError, match="was replaced"):
        list(stream)


@pytest.mark.parametrize("budget", [0, -1, "x", True, 1.5])
def test_a_budget_is_a_number_of_bytes(path: Path, budget: object) -> None:
    with pytest.raises(thruway.InvalidInputError, match="device_budget_bytes is a number of bytes"):
        ours.stream(path, device_budget_bytes=budget)


def test_a_tensor_larger_than_the_budget_is_said_before_anything_is_read(path: Path) -> None:
    with pytest.raises(thruway.InvalidInputError, match=f"'t00' takes .* more than a device_budget_bytes of {LENGTH}"):
        ours.stream(path, device_budget_bytes=LENGTH)
