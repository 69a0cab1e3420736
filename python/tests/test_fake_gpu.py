"""The package's way to a GPU and back, over the CUDA driver that is made of host memory.

The driver is chosen once in a process, so each case runs in one of its own: this file, started with the case's name.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import thruway
import thruway.numpy
from thruway import _open, _save
from thruway._thruway import Checkpointer, Loading, Model

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def driver() -> str:
    """Builds the driver, if it is not there."""
    if shutil.which("cargo") is None and "CI" not in os.environ:
        pytest.skip("there is no cargo to build the driver with")
    build = ["cargo", "build", "--quiet", "--locked", "--package=thruway-fake-cuda", "--message-format=json"]
    told = subprocess.run(build, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    files = (file for line in told.stdout.splitlines() for file in json.loads(line).get("filenames", []))
    return next(file for file in files if file.endswith("libfake_cuda.so"))


class Memory:
    """Some memory of the GPU."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        address = ctypes.c_uint64()
        if nbytes:
            gpu.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.gpu, self.address, self.nbytes = gpu, address.value, nbytes

    def __del__(self) -> None:
        if self.address:
            self.gpu.call("cuMemFree_v2", ctypes.c_uint64(self.address))


class Gpu:
    """A framework that has nothing but memory on a GPU: what `thruway._open.Load` asks of one."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(os.environ["THRUWAY_CUDA_LIB"])
        self.allocations_left = 1_000_000
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def report(self) -> dict[str, Any]:
        size = self.driver.fake_cuda_report(None, ctypes.c_size_t(0)) + 4096
        text = ctypes.create_string_buffer(size)
        self.driver.fake_cuda_report(text, ctypes.c_size_t(size))
        return json.loads(text.value)

    def current_stream(self, memory: str) -> int:
        return 0

    def allocate(self, wanted: list[int], memory: str) -> list[tuple[int, Memory]]:
        if self.allocations_left < len(wanted):
            raise MemoryError("the GPU is full")
        self.allocations_left -= len(wanted)
        return [(block.address, block) for block in (Memory(self, nbytes) for nbytes in wanted)]

    def make(self, block: Memory, runs: list[_open.Run], tensors: dict[str, Any]) -> None:
        for _, _, nbytes, names, offsets in runs:
            tensors.update((name, (block, offset, nbytes)) for name, offset in zip(names, offsets, strict=True))

    def fill(self, memory: Memory, value: int, times: int) -> None:
        """Queues work on the default stream."""
        for _ in range(times):
            arguments = (ctypes.c_uint64(memory.address), ctypes.c_ubyte(value), ctypes.c_size_t(memory.nbytes), None)
            self.call("cuMemsetD8Async", *arguments)

    def read(self, tensor: tuple[Memory, int, int]) -> bytes:
        memory, offset, nbytes = tensor
        found = ctypes.create_string_buffer(nbytes)
        address = ctypes.c_uint64(memory.address + offset)
        assert nbytes == 0 or self.driver.fake_cuda_read(address, found, ctypes.c_size_t(nbytes)) == 0
        return found.raw

    def is_clean(self) -> None:
        """Nothing was misused, and nothing but what the process keeps is left."""
        gc.collect()
        report = self.report()
        assert report["faults"] == [], report["faults"]
        assert (report["live_allocations"], report["in_flight_operations"]) == (0, 0), report


def arrays() -> dict[str, np.ndarray]:
    dice = np.random.default_rng(5)
    sizes = [0, 1, 7, 4096, 9_000_000, *dice.integers(1, 50_000, 300)]
    return {f"t{number:03}": dice.integers(0, 256, size, np.uint8) for number, size in enumerate(sizes)}


def load_of(gpu: Gpu, path: Path, **options: Any) -> _open.Load:
    slices = options.pop("slices", [])
    select = options.pop("select", None)
    model = Model(path, "cuda:0", options.pop("way", "auto"))
    return _open.Load(cast(ModuleType, gpu), model, "cuda:0", select, slices, **options)


def assert_right(gpu: Gpu, tensors: dict[str, Any], saved: dict[str, np.ndarray]) -> None:
    assert tensors.keys() == saved.keys()
    for name, tensor in tensors.items():
        assert gpu.read(tensor) == saved[name].tobytes(), name


def loads(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    for way in ("auto", "staged", "cached"):
        tensors, receipt = load_of(gpu, path, way=way).wait()
        assert_right(gpu, tensors, saved)
        assert receipt.bytes == sum(array.nbytes for array in saved.values())
        assert not [name for name, (memory, offset, _) in tensors.items() if (memory.address + offset) % 256]
        # Small ones share, so that what a survivor holds is little.
        assert {memory.nbytes for memory, _, nbytes in tensors.values() if nbytes < memory.nbytes} <= {*range(2 << 20)}
        del tensors


def slices(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    whole = saved["t004"].reshape(3000, 3000)
    thruway.numpy.save_file({"whole": whole}, path)
    for dimension, start, end in ((0, 10, 2000), (1, 0, 1), (1, 17, 2900), (0, 5, 5)):
        tensors, _ = load_of(gpu, path, select=[], slices=[("whole", dimension, start, end)]).wait()
        index = (slice(None),) * dimension + (slice(start, end),)
        assert gpu.read(tensors["whole"]) == whole[index].tobytes()
        del tensors


def into(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    """Memory that is there already, which work that was queued before still fills."""
    homes = {name: Memory(gpu, array.nbytes) for name, array in saved.items()}
    for memory in homes.values():
        if memory.nbytes:
            gpu.fill(memory, 0xEE, 3)
    load_of(
        gpu, path, into=[(name, ("cuda:0", memory.address, memory.nbytes, memory)) for name, memory in homes.items()]
    ).wait()
    assert_right(gpu, {name: (memory, 0, memory.nbytes) for name, memory in homes.items()}, saved)


def saves(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    tensors, _ = load_of(gpu, path).wait()
    sources = [
        _save.Source(name, "U8", [nbytes], "cuda:0", memory.address + offset, nbytes, memory)
        for name, (memory, offset, nbytes) in tensors.items()
    ]
    receipts: list[thruway.Receipt] = []
    _save.to_storage(sources, path.with_name("again"), {"a": "b"}, None, 0, receipts.append)
    assert receipts[0].bytes >= sum(array.nbytes for array in saved.values())
    assert path.with_name("again").read_bytes()[-100_000:] == path.read_bytes()[-100_000:]
    found = thruway.numpy.load_file(path.with_name("again"))
    assert all(np.array_equal(found[name], array) for name, array in saved.items())


def pairs_of(tensors: dict[str, Any]) -> list[Any]:
    """Tensors as a checkpoint's native half takes them."""
    return [
        ((name, "U8", [nbytes]), ("cuda:0", memory.address + offset, nbytes, memory))
        for name, (memory, offset, nbytes) in tensors.items()
    ]


def order_of(step: int) -> dict[str, Any]:
    order = {"step": step, "structure": "{}", "metadata": {}, "replace": False, "max_shard_bytes": 4_000_000}
    return {**order, "trained": [], "stream": 0, "ranks": None}


def restored(gpu: Gpu, run: Checkpointer, step: int, group: str) -> dict[str, Any]:
    checkpoint = run.open(step, "cuda:0")

    def load(*, slices: Any, progress: Any, **options: Any) -> Loading:
        return checkpoint.load(group, **options)

    framework, model = cast(ModuleType, gpu), cast(Model, SimpleNamespace(load=load))
    return _open.Load(framework, model, "cuda:0", checkpoint.groups()[group], []).wait()[0]


def run_in(path: Path, pool_bytes: int | None = None, lag: float = 60.0) -> Checkpointer:
    place = path.with_name("run")
    options: dict[str, Any] = {"keep": None, "keep_every": None, "pool_bytes": pool_bytes, "lag_seconds": lag}
    return Checkpointer(place, device="cuda:0", **options)


def checkpoints(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    """What the default stream overwrites right after the call is saved as it was, with guards and without."""
    for number, (pool_bytes, guarded) in enumerate(
        [(None, None), (1_000_000, None), (None, {("m", "t004")}), (1_000_000, set())]
    ):
        run = run_in(path, pool_bytes)
        tensors, _ = load_of(gpu, path).wait()
        run.save([("m", pairs_of(tensors), {})], order_of(number * 2))
        saving = run.begin([("m", pairs_of(tensors), {})], order_of(number * 2 + 1), guarded)
        for name, (memory, _, _) in tensors.items():
            if memory.nbytes and (guarded is None or ("m", name) not in guarded):
                gpu.fill(memory, 0xEE, 1)
        saving.hold(0)
        gpu.fill(tensors["t004"][0], 0xEE, 1)
        assert saving.wait_for("staged", None) and saving.staged_seconds() is not None
        assert saving.wait()[0] == number * 2 + 1
        assert (saving.done(), saving.level()) == (True, "durable")
        # What overwrites them may still be under way.
        gpu.call("cuCtxSynchronize")
        del tensors
        for step in run.steps():
            assert_right(gpu, restored(gpu, run, step, "m"), saved)


def a_wait_is_interrupted(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    """Ctrl-C ends a wait, and the save goes on. A second save waits no longer than its lag."""
    tensors, _ = load_of(gpu, path).wait()
    run = run_in(path, lag=0.1)
    groups = [("m", pairs_of(tensors), {})]
    gpu.driver.fake_cuda_hold(1)
    saving = run.begin(groups, order_of(1), None)
    for wait in (saving.wait, lambda: saving.wait_for("staged", None)):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            wait()
    assert not saving.wait_for("staged", 0.01) and saving.level() == "queued"
    for save in (lambda: run.save(groups, order_of(2)), lambda: run.begin(groups, order_of(2), None), run.wait):
        with pytest.raises(thruway.LimitReachedError, match="step 1 is still under way"):
            save()
    gpu.driver.fake_cuda_hold(0)
    assert saving.wait()[0] == 1
    run.save(groups, order_of(2))
    assert run.steps() == [1, 2] and run.verify(1) == []


def everything_is_dropped(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    """While a save is under way: it is done when nobody has it any more, and nothing is freed before."""
    for step, pool_bytes in enumerate((None, 1_000_000)):
        tensors, _ = load_of(gpu, path).wait()
        run = run_in(path, pool_bytes)
        run.begin([("m", pairs_of(tensors), {})], order_of(step), {("m", name) for name in tensors})
        del tensors, run
        gc.collect()
        assert_right(gpu, restored(gpu, run_in(path), step, "m"), saved)


def allocations_fail(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    for left in (0, 1, 2):
        gpu.allocations_left = left
        with pytest.raises(MemoryError, match="the GPU is full") as raised:
            load_of(gpu, path).wait()
        # Whoever keeps the exception does not keep the memory.
        gpu.is_clean()
        del raised
    gpu.allocations_left = 1_000_000
    loads(gpu, path, saved)


def callbacks_fail(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    """In the middle: each copy takes so long that the load cannot be over when it is first told of."""
    told: list[int] = []

    def fail(moved: int) -> None:
        told.append(moved)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_of(gpu, path, progress=fail).wait()
    assert len(told) == 1 and told[0] < sum(array.nbytes for array in saved.values())


def is_dropped(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    dice = random.Random(4)
    for _ in range(20):
        load = load_of(gpu, path)
        load.place(dice.randrange(len(saved)))
        if dice.random() < 0.5:
            load.cancel()
        del load
        gc.collect()
        gpu.is_clean()


def calls_fail(gpu: Gpu, path: Path, saved: dict[str, np.ndarray]) -> None:
    """The driver refuses something once; the next load works."""
    with pytest.raises(thruway.ThruwayError, match="CUDA_ERROR_"):
        load_of(gpu, path).wait()
    gpu.is_clean()
    loads(gpu, path, saved)


CASES = {
    loads: [{}],
    slices: [{}],
    into: [{"FAKE_CUDA_DELAY_US": "1000..3000"}],
    saves: [{}],
    checkpoints: [{"FAKE_CUDA_DELAY_US": "100..1500"}],
    a_wait_is_interrupted: [{}],
    everything_is_dropped: [{"FAKE_CUDA_DELAY_US": "500..2000"}],
    allocations_fail: [{}],
    callbacks_fail: [{"FAKE_CUDA_DELAY_US": "150000..200000"}],
    is_dropped: [{}],
    calls_fail: [
        {"FAKE_CUDA_FAIL": f"{call}:OUT_OF_MEMORY"}
        for call in ("cuStreamCreate:1", "cuMemHostRegister:1", "cuMemcpyHtoDAsync:1", "cuMemcpyHtoDAsync:3")
    ],
}


@pytest.mark.parametrize(
    ("case", "settings"),
    [pytest.param(case, one, id=case.__name__) for case, settings in CASES.items() for one in settings],
)
def test_over_a_driver_made_of_host_memory(driver: str, case: Any, settings: dict[str, str]) -> None:
    environment = {**os.environ, "THRUWAY_CUDA_LIB": driver, **settings}
    command = [sys.executable, __file__, case.__name__]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr


def main(wanted: str) -> None:
    case = next(case for case in CASES if case.__name__ == wanted)
    gpu = Gpu()
    with tempfile.TemporaryDirectory() as place:
        saved = arrays()
        thruway.numpy.save_file(saved, Path(place) / "model")
        case(gpu, Path(place) / "model", saved)
    gpu.is_clean()


if __name__ == "__main__":
    main(sys.argv[1])
