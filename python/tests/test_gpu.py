"""What a GPU adds: its memory, its streams, and what happens to them when a load fails.

Where there is no GPU, tests that make sense without one run on the CPU alone and the others are skipped;
`THRUWAY_REQUIRE_GPU=1` turns a skip into a failure.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import thruway
import thruway.torch as ours
import torch
from test_torch import tensors_of_every_kind

BIG_TENSORS, BIG_BYTES = 32, 16 << 20


def find_gpu() -> str:
    if thruway.device_count() and torch.cuda.is_available():
        return "cuda:0"
    if "THRUWAY_REQUIRE_GPU" in os.environ:
        pytest.fail(f"Thruway sees {thruway.device_count()} GPUs, torch {torch.cuda.device_count()}")
    pytest.skip("there is no GPU")


@pytest.fixture
def gpu() -> str:
    return find_gpu()


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> str:
    return find_gpu() if request.param == "gpu" else "cpu"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """200 tensors of uneven lengths, each full of its own number."""
    path = tmp_path / "small.safetensors"
    ours.save_file({f"t{number}": torch.full((1 + number * 97,), number) for number in range(200)}, path)
    return path


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Half a gigabyte, which takes a moment from any drive."""
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    ours.save_file({f"t{n:02}": torch.full((BIG_BYTES,), n, dtype=torch.uint8) for n in range(BIG_TENSORS)}, path)
    yield path
    path.unlink()


def load(file: Path, device: str, **options: object) -> dict[str, torch.Tensor]:
    """Reads all of it now, on any device."""
    return ours.load_file(file, device, backend="pread", **options)


def assert_each_is_its_number(tensors: dict[str, torch.Tensor], count: int = 200) -> None:
    assert len(tensors) == count
    assert all((tensor == int(name[1:])).all() for name, tensor in tensors.items())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8).cpu() if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def held_bytes(device: str) -> int:
    """Memory that is taken: of a GPU, whoever took it; of the host, by this process."""
    gc.collect()
    if device == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def own_stream(device: str) -> contextlib.AbstractContextManager[object]:
    """Within it the current stream is a new one."""
    return contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream(device))


def keep_busy(device: str) -> None:
    """The current stream has nothing but this to do for half a second: a load is over long before."""
    if device != "cpu":
        torch.cuda._sleep(1_000_000_000)


def test_every_dtype_and_shape_arrives_and_leaves_bit_for_bit(device: str, tmp_path: Path) -> None:
    saved = tensors_of_every_kind()
    ours.save_file(saved, tmp_path / "a")
    loaded = load(tmp_path / "a", device)
    ours.save_file(loaded, tmp_path / "b")
    for found in (loaded, load(tmp_path / "b", "cpu")):
        assert found.keys() == saved.keys()
        for name, tensor in found.items():
            assert (tensor.dtype, tensor.shape) == (saved[name].dtype, saved[name].shape), name
            assert torch.equal(raw(tensor), raw(saved[name])), name
    assert {str(tensor.device) for tensor in loaded.values()} == {device}


def test_every_tensor_begins_where_kernels_like_it(gpu: str, small: Path) -> None:
    loaded = load(small, gpu)
    assert_each_is_its_number(loaded)
    assert not [name for name, tensor in loaded.items() if tensor.data_ptr() % 256]


def test_a_tensor_outlives_file_handle_and_siblings(device: str, small: Path) -> None:
    loaded = load(small, device)
    kept = loaded["t150"]
    with thruway.safe_open(small, "pt", device, backend="pread") as opened:
        alone = opened.get_tensor("t151")
        part = opened.get_slice("t152")[10:20]
    del loaded, opened
    small.unlink()
    gc.collect()
    # Takes whatever memory was let go of.
    torch.full((8 << 20,), -1, device=device)
    assert (kept == 150).all() and (alone == 151).all() and (part == 152).all()


def test_one_small_tensor_keeps_little_of_its_siblings_memory(gpu: str, tmp_path: Path) -> None:
    many = {f"t{number}": torch.full((5000 + number,), number, dtype=torch.int16) for number in range(2000)}
    ours.save_file({**many, "large": torch.zeros(10_000_000)}, tmp_path / "a")
    before = torch.cuda.memory_allocated(gpu)
    loaded = load(tmp_path / "a", gpu)
    kept = loaded["t1000"]
    del loaded
    gc.collect()
    assert torch.cuda.memory_allocated(gpu) - before <= (2 << 20) + kept.nbytes
    assert (kept == 1000).all()


def test_a_slice_is_what_torch_would_give(device: str, tmp_path: Path) -> None:
    whole = torch.arange(60 * 50 * 7, dtype=torch.int32).view(60, 50, 7)
    ours.save_file({"a": whole}, tmp_path / "a")
    ranges = (slice(0, 1), slice(3, 41), slice(-5, None), slice(2, 2), slice(None, None, 3), 4)
    with thruway.safe_open(tmp_path / "a", "pt", device, backend="pread") as opened:
        for index in (..., *((*[slice(None)] * dimension, one) for dimension in range(3) for one in ranges)):
            found = opened.get_slice("a")[index]
            assert str(found.device) == device and found.is_contiguous()
            assert torch.equal(found.cpu(), whole[index]), index


def test_a_load_comes_after_what_the_current_stream_still_reads_and_before_what_it_does_next(
    gpu: str, tmp_path: Path
) -> None:
    """Memory of a dropped tensor is handed out at once, though kernels that were queued before may yet read it."""
    ours.save_file({"a": torch.full((32 << 20,), 9, dtype=torch.uint8)}, tmp_path / "a")
    # What is done for the first time may wait for the whole GPU.
    assert load(tmp_path / "a", gpu)["a"].sum() == 9 * (32 << 20)
    torch.cuda.empty_cache()
    with own_stream(gpu):
        dropped = torch.full((32 << 20,), 5, dtype=torch.uint8, device=gpu)
        seen = torch.empty_like(dropped)
        address = dropped.data_ptr()
        keep_busy(gpu)
        seen.copy_(dropped)
        del dropped
        loaded = load(tmp_path / "a", gpu)["a"]
        assert loaded.data_ptr() == address, "torch gave other memory, and this shows nothing"
        total = loaded.sum()
    torch.cuda.synchronize()
    assert (seen == 5).all() and total == 9 * (32 << 20)


def test_a_save_waits_for_what_the_current_stream_still_writes(device: str, tmp_path: Path) -> None:
    with own_stream(device):
        tensor = torch.zeros(8 << 20, dtype=torch.int32, device=device).fill_(1)
        keep_busy(device)
        tensor.fill_(3)
        ours.save_file({"a": tensor}, tmp_path / "a")
    assert (ours.load_file(tmp_path / "a")["a"] == 3).all()


def test_threads_load_at_once_each_on_a_stream_of_its_own(device: str, small: Path) -> None:
    def work(_: int) -> None:
        with own_stream(device):
            assert_each_is_its_number(load(small, device))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(48)))


def test_a_thousand_loads_hold_no_memory_and_no_descriptor(device: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    ours.save_file({f"t{number}": torch.full((30_000,), number) for number in range(10)}, path)

    def work(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            load(path, device)
            with thruway.safe_open(path, "pt", device, backend="pread") as opened:
                opened.get_slice("t3")[1:100]
        return held_bytes(device), held_bytes("cpu"), len(list(Path("/proc/self/fd").iterdir()))

    before, after = work(100), work(1000)
    assert after[0] - before[0] < 16 << 20 and after[1] - before[1] < 16 << 20
    assert after[2] == before[2]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as a terminal's program has it: one that was started in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_a_load_at_once_and_leaves_its_memory_free(device: str, big: Path, interruptible: None) -> None:
    load(big, device, path="staged")
    before, sent = held_bytes(device), []

    def send(moved: int) -> None:
        if not sent:
            sent.append((moved, time.perf_counter()))
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        load(big, device, path="staged", progress=send)
    moved, since = sent[0]
    assert moved < BIG_TENSORS * BIG_BYTES and time.perf_counter() - since < 1
    assert held_bytes(device) - before < 32 << 20
    assert_each_is_its_number(load(big, device), BIG_TENSORS)


def test_a_gpu_that_is_full_is_an_error_and_nothing_stays_taken(gpu: str, small: Path, big: Path) -> None:
    load(small, gpu)
    before = held_bytes(gpu)
    hold = torch.empty(torch.cuda.mem_get_info(gpu)[0] - BIG_TENSORS * BIG_BYTES // 2, dtype=torch.uint8, device=gpu)
    full = held_bytes(gpu)
    with pytest.raises((thruway.OutOfMemoryError, torch.cuda.OutOfMemoryError)):
        load(big, gpu)
    assert held_bytes(gpu) - full < 16 << 20
    assert_each_is_its_number(load(small, gpu))
    del hold
    assert held_bytes(gpu) - before < 16 << 20
    assert_each_is_its_number(load(big, gpu), BIG_TENSORS)


def _in_child(path: Path, opened: thruway.safe_open) -> None:
    for call in (lambda: ours.load_file(path, "cuda:0"), lambda: opened.get_tensor("t1")):
        with pytest.raises(RuntimeError, match="fork"):
            call()
    os._exit(7)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_so_and_does_not_hang(gpu: str, small: Path) -> None:
    """CUDA does not survive a fork."""
    load(small, gpu)
    opened = thruway.safe_open(small, "pt", gpu)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(small, opened))
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    assert code == 7
    assert_each_is_its_number(load(small, gpu))


@pytest.mark.parametrize("way", ["cached", "staged"])
def test_a_receipt_says_which_way_the_bytes_went(device: str, big: Path, way: str) -> None:
    receipts: list[thruway.Receipt] = []
    assert_each_is_its_number(load(big, device, path=way, receipt=receipts.append), BIG_TENSORS)
    paths = receipts[0].paths
    assert sum(paths.values()) == receipts[0].bytes == BIG_TENSORS * BIG_BYTES
    # To the host there is a way past the page cache that needs no slots.
    assert paths.keys() <= ({way, "plain"} if device == "cpu" and way == "staged" else {way})


def test_a_stream_holds_no_more_than_its_budget(device: str, big: Path) -> None:
    budget, seen = 6 * BIG_BYTES, []
    before = held_bytes(device)
    if device != "cpu":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    for name, tensor in ours.stream(big, device, device_budget_bytes=budget):
        # Single elements: a comparison of all of them would take memory too.
        seen.append((name, tensor[0].item(), tensor[-1].item()))
        if device == "cpu":
            assert held_bytes(device) - before < budget + (320 << 20)
        del tensor
    assert seen == [(f"t{number:02}", number, number) for number in range(BIG_TENSORS)]
    if device != "cpu":
        assert torch.cuda.max_memory_allocated(device) - before <= budget


def test_each_rank_streams_its_shards(device: str, tmp_path: Path) -> None:
    whole = {"layers.0.q_proj.weight": torch.randn(640, 300), "layers.0.o_proj.weight": torch.randn(300, 640)}
    ours.save_file(whole, tmp_path / "a")
    for rank in range(4):
        shard = {"q_proj.weight": (0, rank, 4), "o_proj.weight": (1, rank, 4)}
        found = dict(ours.stream(tmp_path / "a", device, shard=shard, dtype=torch.bfloat16))
        assert found.keys() == whole.keys()
        for name, tensor in found.items():
            dimension, _, _ = shard[name.removeprefix("layers.0.")]
            wanted = whole[name].chunk(4, dimension)[rank].to(torch.bfloat16)
            assert str(tensor.device) == device and torch.equal(tensor.cpu(), wanted), (name, rank)


def test_a_module_is_filled_where_it_lies_after_what_is_queued_on_it(device: str, tmp_path: Path) -> None:
    def layers(device: str) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, device=device) for _ in range(8)))

    source = layers("cpu")
    ours.save_model(source, tmp_path / "a")
    with own_stream(device), torch.no_grad():
        module = layers(device)
        addresses = [parameter.data_ptr() for parameter in module.parameters()]
        if device != "cpu":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        keep_busy(device)
        for parameter in module.parameters():
            parameter.fill_(-1)
        assert ours.load_into(module, tmp_path / "a") == ([], [])
        if device != "cpu":
            # The module has 134 MB.
            assert torch.cuda.max_memory_allocated(device) - before < 16 << 20
        assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
        for mine, its in zip(module.parameters(), source.parameters(), strict=True):
            assert torch.equal(mine.cpu(), its)
