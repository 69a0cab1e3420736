#!/usr/bin/env python3
"""Loads one model with one other piece of software, in this one process, and tells how it went as one JSON object.

    peers.py NAME MODEL [--repeat N] [--cold] [--device cuda:0]

The first run is the first load of the process; the others follow it. Before the first, CUDA is started by a tiny
allocation, so that nobody pays for it. A run begins before the files are opened, includes the allocation of the
destination, and ends when the device is synchronised and each tensor is there under its name; what was loaded is
dropped between runs, outside the clock. With --cold the page cache is dropped before each run (root only); without
it, bring the files into the page cache before. On the CPU only the model's own pages are dropped.

    safetensors            load_file(device=...), file by file
    safetensors-prefetch   prefetch() of all files at once; version 0.9 or newer
    fastsafetensors        SafeTensorsFileLoader without GPUDirect Storage
    runai                  SafetensorsStreamer; each tensor is copied on as it comes
    instanttensor          safe_open; INSTANTTENSOR_BACKEND picks its backend
    kvikio                 CuFile.pread of whole files, 16 threads: raw bytes, no tensors
    limit                  what this machine's copy engine gives from pinned memory, by torch: no file is read

`--device cpu` works with safetensors, fastsafetensors and runai, to try this script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import direct_io

KVIKIO_THREADS = 16
KVIKIO_TASK_BYTES = 8 << 20
# Longer copies show no higher rate, and as much pinned memory takes a second to make.
LIMIT_BYTES_MAX = 1 << 30
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

# What one load gives: the tensors by name, and what has to be closed before the next.
Loaded = tuple[dict[str, Any], list[Any]]


class Peer:
    """The files of one model and the device that they go to."""

    def __init__(self, files: list[Path], device: str) -> None:
        self.paths = [str(file) for file in files]
        self.sizes = [file.stat().st_size for file in files]
        self.device = device

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


def kvikio_settings() -> None:
    import kvikio.defaults

    kvikio.defaults.set({"num_threads": KVIKIO_THREADS, "task_size": KVIKIO_TASK_BYTES})


PEERS: dict[str, tuple[str, Callable[[Peer], Loaded]]] = {
    "safetensors": ("safetensors", Peer.safetensors),
    "safetensors-prefetch": ("safetensors", Peer.safetensors_prefetch),
    "fastsafetensors": ("fastsafetensors", Peer.fastsafetensors),
    "runai": ("runai-model-streamer", Peer.runai),
    "instanttensor": ("instanttensor", Peer.instanttensor),
    "kvikio": ("kvikio-cu13", Peer.kvikio),
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


def drop_page_cache(files: list[Path], device: str) -> None:
    """Nothing of the files is in the page cache afterwards."""
    os.sync()
    if device != "cpu":
        DROP_CACHES.write_text("3")
    left = direct_io.evict_wholly(files)
    if left:
        raise RuntimeError(f"the page cache keeps {left} bytes of the model")


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


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def load(name: str, files: list[Path], args: argparse.Namespace) -> dict:
    package, once = PEERS[name]
    peer, runs, count = Peer(files, args.device), [], 0
    start(args.device)
    version = importlib.metadata.version(package)
    if name == "kvikio":
        kvikio_settings()
    memory = HostMemory()
    for _ in range(args.repeat):
        if args.cold:
            drop_page_cache(files, args.device)
        synchronise(args.device)
        cpu, begun = cpu_seconds(), time.perf_counter()
        tensors, closers = once(peer)
        synchronise(args.device)
        runs.append({"seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - cpu})
        check(name, tensors, files, args.device)
        count = len(tensors)
        del tensors
        for closer in closers:
            closer.close()
        del closers
    told = {"name": name, "version": version, "bytes": sum(peer.sizes), "tensors": count, "runs": runs}
    return {**told, "peak_host_bytes": memory.grown()}


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
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each run")
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
