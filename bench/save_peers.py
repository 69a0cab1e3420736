#!/usr/bin/env python3
"""Saves tensors from the device with Thruway or other software, and tells how it went as one JSON object.

    save_peers.py NAME DIRECTORY [--bytes N] [--repeat N] [--device cuda:0]

The tensors are 64 MiB each, bf16, random. A run begins when the device is synchronised and ends when every file that
was written and its directory are synced to the drive: what is saved is there after a loss of power. Each run writes
fresh files into a directory of its own, which is removed afterwards, outside the clock.

    thruway                save_file, one file
    torch.save             one file
    safetensors            save_file, one file
    dcp                    torch.distributed.checkpoint, FileSystemWriter with 16 threads, one rank
    kvikio                 CuFile.pwrite, 16 threads, one file: raw bytes without names

`--device cpu` tries this script without a GPU; kvikio cannot do that.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TENSOR_BYTES = 64 << 20
THREADS = 16
KVIKIO_TASK_BYTES = 8 << 20

Tensors = dict[str, Any]


def thruway(tensors: Tensors, directory: Path) -> None:
    from thruway.torch import save_file

    save_file(tensors, directory / "model.safetensors")


def torch_save(tensors: Tensors, directory: Path) -> None:
    import torch

    torch.save(tensors, directory / "model.pt")


def safetensors(tensors: Tensors, directory: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, directory / "model.safetensors")


def dcp(tensors: Tensors, directory: Path) -> None:
    from torch.distributed import checkpoint

    writer = checkpoint.FileSystemWriter(directory / "checkpoint", thread_count=THREADS, sync_files=True)
    with warnings.catch_warnings():
        # It warns that there is one rank only.
        warnings.simplefilter("ignore")
        checkpoint.save(tensors, storage_writer=writer)


def kvikio(tensors: Tensors, directory: Path) -> None:
    import kvikio
    import kvikio.defaults
    import torch

    kvikio.defaults.set({"num_threads": THREADS, "task_size": KVIKIO_TASK_BYTES})
    with kvikio.CuFile(directory / "model.bin", "w") as file:
        offset, waits = 0, []
        for tensor in tensors.values():
            raw = tensor.view(torch.uint8)
            waits.append(file.pwrite(raw, file_offset=offset))
            offset += raw.nbytes
        written = sum(wait.get() for wait in waits)
    if written != offset:
        raise RuntimeError(f"kvikio wrote {written} of {offset} bytes")


PEERS: dict[str, tuple[str, Callable[[Tensors, Path], None]]] = {
    "thruway": ("thruway", thruway),
    "torch.save": ("torch", torch_save),
    "safetensors": ("safetensors", safetensors),
    "dcp": ("torch", dcp),
    "kvikio": ("kvikio-cu13", kvikio),
}


def sync(directory: Path) -> None:
    """Every file below, and every directory, onto the drive."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make(count: int, device: str) -> Tensors:
    import torch

    shape = (4096, TENSOR_BYTES // 2 // 4096)
    return {
        f"layer.{number}.weight": torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device).view(
            torch.bfloat16
        )
        for number in range(count)
    }


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(PEERS))
    parser.add_argument("directory", type=Path, help="on the drive to measure")
    parser.add_argument("--bytes", type=int, default=4_300_000_000, help="rounded to whole tensors")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    import torch

    package, save = PEERS[args.name]
    version = importlib.metadata.version(package)
    tensors = make(max(1, round(args.bytes / TENSOR_BYTES)), args.device)
    total, runs = sum(tensor.nbytes for tensor in tensors.values()), []
    for _ in range(args.repeat):
        directory = Path(tempfile.mkdtemp(prefix="save-", dir=args.directory))
        try:
            # What is still to be written of before would be written now.
            os.sync()
            if args.device != "cpu":
                torch.cuda.synchronize(args.device)
            cpu, begun = cpu_seconds(), time.perf_counter()
            save(tensors, directory)
            sync(directory)
            runs.append({"seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - cpu})
            written = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            if written < total:
                raise RuntimeError(f"{args.name} wrote {written} of {total} bytes")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps({"name": args.name, "version": version, "bytes": total, "tensors": len(tensors), "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
