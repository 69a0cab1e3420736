#!/usr/bin/env python3
"""Loads one model with one piece of software, in this one process, and tells how it went as one JSON object.

    peers.py NAME MODEL [--repeat N] [--cold] [--memory] [--device cuda:0]

The first run is the first load of the process; the others follow it. Before the first, packages are imported and CUDA
is started by a tiny allocation, so that nobody pays for that. A run begins before the files are opened, includes the
allocation of the destination, and ends when the device is synchronised and each tensor is there under its name; what
was loaded is dropped between runs, outside the clock. With --cold the page cache forgets the model before each run;
without it, bring the files into the page cache before.

With --memory one more load follows, which is not timed, and a thread asks the driver (`cudaMemGetInfo`) every two
milliseconds how much of the device's memory is free. What torch knows of would not do: some allocate beside it.

    thruway                load_file(device=...) of the directory
    safetensors            load_file(device=...), file by file
    safetensors-prefetch   prefetch() of all files at once; version 0.9 or newer
    fastsafetensors        SafeTensorsFileLoader without GPUDirect Storage
    runai                  SafetensorsStreamer; each tensor is copied on as it comes
    instanttensor          safe_open; INSTANTTENSOR_BACKEND picks its backend
    kvikio                 CuFile.pread of whole files, 16 threads: raw bytes, no tensors
    limit                  what this machine's copy engine gives from pinned memory, by torch: no file is read

And as Hugging Face's transformers reads checkpoints: safe_open, and for each name get_slice(name)[...]

    thruway-slices         with one handle for the directory
    thruway-slices-files   file by file
    safetensors-slices     file by file

`--device cpu` works with all of Thruway and safetensors but the prefetch, with fastsafetensors and runai, to try this
script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import direct_io

KVIKIO_THREADS = 16
KVIKIO_TASK_BYTES = 8 << 20
# Longer copies show no higher rate, and as much pinned memory takes a second to make.
LIMIT_BYTES_MAX = 1 << 30
WATCH_SECONDS = 0.002

# What one load gives: the tensors by name, and what has to be closed before the next.
Loaded = tuple[dict[str, Any], list[Any]]


class Peer:
    """The files of one model and the device that they go to."""

    def __init__(self, model: Path, files: list[Path], device: str) -> None:
        self.model = model
        self.paths = [str(file) for file in files]
        self.sizes = [file.stat().st_size for file in files]
        self.device = device
        # Thruway's own word on each load.
        self.receipts: list[Any] = []

    def thruway(self) -> Loaded:
        from thruway.torch import load_file

        return load_file(self.model, device=self.device, receipt=self.receipts.append), []

    def safetensors(self) -> Loaded:
        from safetensors.torch import load_file

        tensors: dict[str, Any] = {}
        for path in self.paths:
            tensors.update(load_file(path, device=self.device))
        return tensors, []

    def safetensors_prefetch(self) -> Loaded:
        from safetensors import safe_open

        tensors: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            handles = [
                stack.enter_context(safe_open(path, framework="pt", device=self.device, backend="pread"))
                for path in self.paths
            ]
            # All files at once, as fast as the engine takes them: one after another was slower.
            for loader in [handle.prefetch() for handle in handles]:
                tensors.update(iter(loader))
        return tensors, []

    def fastsafetensors(self) -> Loaded:
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, device=self.device, nogds=True)
        loader.add_filenames({0: self.paths})
        buffers = loader.copy_files_to_device()
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}, [buffers, loader]

    def runai(self) -> Loaded:
        from runai_model_streamer import SafetensorsStreamer

        tensors: dict[str, Any] = {}
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(self.paths)
            for name, tensor in streamer.get_tensors():
                # Its buffer is used again, so a tensor that stays on the host has to be copied too.
                tensors[name] = tensor.clone() if self.device == "cpu" else tensor.to(self.device)
        return tensors, []

    def instanttensor(self) -> Loaded:
        from instanttensor import safe_open

        tensors: dict[str, Any] = {}
        # The list is a copy because this one is sorted in place by the callee.
        with safe_open(list(self.paths), framework="pt", device=int(self.device.partition(":")[2] or 0)) as file:
            tensors.update(file.tensors())
        return tensors, []

    def kvikio(self) -> Loaded:
        import kvikio
        import torch

        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in self.sizes]
        handles = [kvikio.CuFile(path, "r") for path in self.paths]
        waits = [handle.pread(target) for handle, target in zip(handles, buffers, strict=True)]
        done = [wait.get() for wait in waits]
        if done != self.sizes:
            raise RuntimeError(f"kvikio read {sum(done)} of {sum(self.sizes)} bytes")
        return dict(zip(self.paths, buffers, strict=True)), handles

    def thruway_slices(self) -> Loaded:
        from thruway import safe_open

        return self.slices(safe_open, [self.model])

    def thruway_slices_files(self) -> Loaded:
        from thruway import safe_open

        return self.slices(safe_open, self.paths)

    def safetensors_slices(self) -> Loaded:
        from safetensors import safe_open

        return self.slices(safe_open, self.paths)

    def slices(self, safe_open: Callable[..., Any], paths: Sequence[str | Path]) -> Loaded:
        tensors: dict[str, Any] = {}
        for path in paths:
            with safe_open(path, framework="pt", device=self.device) as file:
                names = file.keys()
                tensors.update((name, file.get_slice(name)[...]) for name in names)
        return tensors, []


def kvikio_settings() -> None:
    import kvikio.defaults

    kvikio.defaults.set({"num_threads": KVIKIO_THREADS, "task_size": KVIKIO_TASK_BYTES})


# What each is called by, the package whose version counts, what a program imports at its start, and a load.
PEERS: dict[str, tuple[str, str, Callable[[Peer], Loaded]]] = {
    "thruway": ("thruway", "thruway.torch", Peer.thruway),
    "safetensors": ("safetensors", "safetensors.torch", Peer.safetensors),
    "safetensors-prefetch": ("safetensors", "safetensors", Peer.safetensors_prefetch),
    "fastsafetensors": ("fastsafetensors", "fastsafetensors", Peer.fastsafetensors),
    "runai": ("runai-model-streamer", "runai_model_streamer", Peer.runai),
    "instanttensor": ("instanttensor", "instanttensor", Peer.instanttensor),
    "kvikio": ("kvikio-cu13", "kvikio", Peer.kvikio),
    "thruway-slices": ("thruway", "thruway.torch", Peer.thruway_slices),
    "thruway-slices-files": ("thruway", "thruway.torch", Peer.thruway_slices_files),
    "safetensors-slices": ("safetensors", "safetensors", Peer.safetensors_slices),
}


def start(device: str) -> None:
    """Starts CUDA, which takes a second or so, before any clock runs."""
    import torch

    torch.zeros(1, device=device)
    synchronise(device)


def synchronise(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def drop_page_cache(files: list[Path]) -> None:
    """Nothing of the files is in the page cache afterwards, and nothing of others waits to be written."""
    os.sync()
    left = direct_io.evict_wholly(files)
    if left:
        raise RuntimeError(f"the page cache keeps {left} bytes of the model")


def mapped(part: str) -> list[str]:
    """The files in this process's memory whose names have this part: which library was loaded after all."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {line[5] for line in lines if len(line) == 6}
    return sorted(path for path in paths if part in Path(path).name)


def expected_bytes(files: list[Path]) -> dict[str, int]:
    """The tensors that the files hold, and their lengths, by this script's own reading of the headers."""
    lengths = {}
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                lengths[name] = entry["data_offsets"][1] - entry["data_offsets"][0]
    return lengths


def check(name: str, tensors: dict[str, Any], files: list[Path], device: str) -> None:
    """What was loaded must be the whole model, and on the device."""
    here = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
    wanted = {str(path): path.stat().st_size for path in files} if name == "kvikio" else expected_bytes(files)
    if here != wanted:
        raise RuntimeError(f"{name} loaded {len(here)} tensors of {sum(here.values())} bytes, not the whole model")
    if any(tensor.device.type != device.partition(":")[0] for tensor in tensors.values()):
        raise RuntimeError(f"{name} left tensors elsewhere than on {device}")


class HostMemory:
    """How much host memory this process took at most, beyond what it had at the start. Mapped files count."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            # Forgets the peak so far: that of starting Python and CUDA.
            Path("/proc/self/clear_refs").write_text("5")
        self.before = self.field("VmRSS")

    @staticmethod
    def field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)

    def grown(self) -> int:
        return max(self.field("VmHWM") - self.before, 0)


class DeviceMemory:
    """How much of the device's memory was taken at most while it was watched, beyond what was taken at the start."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before = self.least = self.free()

    def free(self) -> int:
        import torch

        return torch.cuda.mem_get_info(self.device)[0]

    def look(self) -> None:
        self.least = min(self.least, self.free())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        import torch

        # What earlier loads left with torch would be counted as this one's.
        torch.cuda.empty_cache()
        done = threading.Event()

        def watch() -> None:
            while not done.wait(WATCH_SECONDS):
                self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
            self.look()
        finally:
            done.set()
            thread.join()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def load(name: str, files: list[Path], args: argparse.Namespace) -> dict:
    package, module, once = PEERS[name]
    peer, counts = Peer(args.model, files, args.device), set()
    start(args.device)
    importlib.import_module(module)
    if name == "kvikio":
        kvikio_settings()

    def run(watched: contextlib.AbstractContextManager[None]) -> dict:
        if args.cold:
            drop_page_cache(files)
        synchronise(args.device)
        with watched:
            cpu, begun = cpu_seconds(), time.perf_counter()
            tensors, closers = once(peer)
            synchronise(args.device)
            told = {"seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - cpu}
        check(name, tensors, files, args.device)
        counts.add(len(tensors))
        del tensors
        for closer in closers:
            closer.close()
        return told

    device = DeviceMemory(args.device) if args.memory and args.device != "cpu" else None
    host = HostMemory()
    told = {
        "name": name,
        "version": importlib.metadata.version(package),
        "bytes": sum(peer.sizes),
        "runs": [run(contextlib.nullcontext()) for _ in range(args.repeat)],
        "tensors": max(counts),
        "peak_host_bytes": host.grown(),
        "taken": taken(receipt.to_dict() for receipt in peer.receipts),
        "cufile": mapped("libcufile.so"),
    }
    if device is not None:
        run(device.watched())
        told["peak_device_bytes"] = device.before - device.least
    return told


def taken(receipts: Iterable[dict[str, Any]]) -> list[str]:
    """Which ways the bytes of Thruway's loads went."""
    parts = (part for receipt in receipts for file in receipt["files"] for part in file["parts"])
    return sorted({f"{part['path']} ({part['engine']})" for part in parts})


def limit(files: list[Path], args: argparse.Namespace) -> dict:
    """Copies from pinned memory, as long as a large transfer and as often as it takes."""
    import torch

    start(args.device)
    size = min(sum(file.stat().st_size for file in files), LIMIT_BYTES_MAX)
    source = torch.ones(size, dtype=torch.uint8, pin_memory=args.device != "cpu")
    target = torch.empty(size, dtype=torch.uint8, device=args.device)
    runs = []
    for _ in range(max(args.repeat, 5)):
        synchronise(args.device)
        cpu, begun = cpu_seconds(), time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronise(args.device)
        runs.append({"seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - cpu})
    return {"name": "limit", "version": torch.__version__, "bytes": size, "tensors": 0, "runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*PEERS, "limit"])
    parser.add_argument("model", type=Path, help="a file, or a directory of shards")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="make the page cache forget the model before each run")
    parser.add_argument("--memory", action="store_true", help="watch the device's memory during one more load")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    files = [args.model] if args.model.is_file() else sorted(args.model.glob("*.safetensors"))
    if not files:
        parser.error(f"there is no model at {args.model}")
    told = limit(files, args) if args.name == "limit" else load(args.name, files, args)
    told["backend"] = os.environ.get("INSTANTTENSOR_BACKEND", "") if args.name == "instanttensor" else ""
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
