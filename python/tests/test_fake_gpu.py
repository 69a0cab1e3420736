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
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import thruway
import thruway.numpy
from thruway import _open, _save
from thruway._thruway import Model

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

    def make(self, block: Memory, places: list[Any], tensors: dict[str, Any]) -> None:
        for name, _, _, offset, nbytes in places:
            tensors[name] = (block, offset, nbytes)

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
