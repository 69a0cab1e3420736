#!/usr/bin/env python3
"""Saves and restores checkpoints with Thruway or other software, and tells how it went as one JSON object.

    checkpoint.py NAME DIRECTORY [--bytes N] [--repeat N] [--device cuda:0]

The state is bf16 tensors of 64 MiB, random, on the device. A save begins when the device is synchronised and ends when
every file that was written and its directory are synced: what is saved is there after a loss of power. Each goes into
fresh files, which are removed afterwards, outside the clock. Before the first a small state is saved, for whatever is
imported or made once.

    thruway                Checkpointer.save; before each the drive's own rate, O_DIRECT writes into a fresh file whose
                           blocks are reserved; with --background after each Checkpointer.save_async
    torch.save             one file
    safetensors            save_file, one file
    dcp-1, dcp-4, dcp-16   torch.distributed.checkpoint, FileSystemWriter with so many threads, one rank
    kvikio                 CuFile.pwrite, 16 threads, one file: raw bytes without names

Those that save in the background tell how long the call blocks, when the caller's stream is free (an event recorded
right after the call), when the tensors may change, and when all is synced. Memory for the copies is pinned before,
where that can be asked for, and `prepare_seconds` says what it took.

    dcp-async              dcp.async_save as it comes, FileSystemWriter with 16 threads
    dcp-async-pinned       with DefaultStager, which pins its memory and copies in a thread

And Thruway alone:

    restore                Checkpointer.restore, which holds all bytes against their checksums, in turns with load_file
                           of the same files, from the page cache and from the drive; what is restored is compared
    train                  steps of a real training, with AdamW, in turns with saves every few steps and without

`--device cpu` tries this script without a GPU; kvikio and dcp-async-pinned cannot do that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint_train
import direct_io
import save_peers
from save_peers import Tensors, cpu_seconds

TENSOR_BYTES = 64 << 20
# So much of a file for each shape of requests, to find the drive's best.
PROBE_BYTES = 1_000_000_000
BACKGROUND_THREADS = 16
CACHED_PAIRS = 5
# What the page cache may keep of a file that is to come from the drive: another may hold a page for a moment.
LEFT_MAX = 0.01
SMALL_BYTES = 1_000_000


# ------------------------------------------------------------------------------- common to all


def make(size: int, device: str) -> Tensors:
    """So many random bytes; NaNs among them do not matter."""
    import torch

    rows = max(1, min(TENSOR_BYTES, size // 8) // (2 * 4096))
    return {
        f"layer.{number}.weight": torch.randint(-(2**15), 2**15, (rows, 4096), dtype=torch.int16, device=device).view(
            torch.bfloat16
        )
        for number in range(max(1, round(size / (2 * 4096 * rows))))
    }


def bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def synchronise(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def settle(device: str) -> None:
    """Nothing of before is still to be computed, or to be written."""
    os.sync()
    synchronise(device)


@contextlib.contextmanager
def fresh(parent: Path) -> Iterator[Path]:
    """A directory of one save's own."""
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def must_hold(directory: Path, size: int) -> None:
    """A save that left something out would be a fast one."""
    written = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if written < size:
        raise RuntimeError(f"{written} of {size} bytes were written")


def limit_from_device(device: str) -> float | None:
    """GB/s of copies into pinned memory, as `thruway bench` measures it: 64 MiB at a time on one stream."""
    if device == "cpu":
        return None
    import torch

    source = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    target = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    rates, copies = [], 16
    for _ in range(4):
        synchronise(device)
        begun = time.perf_counter()
        for _ in range(copies):
            target.copy_(source, non_blocking=True)
        synchronise(device)
        rates.append(copies * source.nbytes / (time.perf_counter() - begun) / 1e9)
    # The first finds the link asleep.
    return sorted(rates[1:])[1]


class Background(NamedTuple):
    """A save under way."""

    # Waits until the tensors may change.
    staged: Callable[[], object]
    # Waits until all is synced.
    durable: Callable[[], object]


def in_background(device: str, begin: Callable[[], Background]) -> dict[str, float]:
    """The seconds of one save in the background, all of them from the call on."""
    settle(device)
    cpu, begun = cpu_seconds(), time.perf_counter()
    under_way = begin()
    run = {"blocked_seconds": time.perf_counter() - begun}
    if device != "cpu":
        import torch

        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    run["stream_free_seconds"] = time.perf_counter() - begun
    under_way.staged()
    run["staged_seconds"] = time.perf_counter() - begun
    under_way.durable()
    return {**run, "seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - cpu}


# ------------------------------------------------------------------------------------- Thruway


def thruway(args: argparse.Namespace, tensors: Tensors) -> dict[str, Any]:
    from thruway.torch import Checkpointer

    size = bytes_of(tensors)
    runs, background, limits = [], [], []
    told: dict[str, Any] = {"limit_from_device": limit_from_device(args.device)}
    with fresh(args.directory) as directory:
        begun = time.perf_counter()
        pool = size if args.background else None
        checkpoints = Checkpointer(directory / "run", pool_bytes=pool, device=args.device)
        told["prepare_seconds"] = time.perf_counter() - begun

        def removed(step: int) -> None:
            (place,) = (directory / "run").glob("step-*")
            must_hold(place, size)
            if checkpoints.steps() != [step]:
                raise RuntimeError(f"step {step} was saved, and {checkpoints.steps()} are there")
            shutil.rmtree(place)

        def begin(step: int) -> Background:
            saving = checkpoints.save_async(step, {"model": tensors})
            return Background(saving.wait_staged, saving.wait)

        small = {"model": make(SMALL_BYTES, args.device)}
        shutil.rmtree(checkpoints.save(0, small).path)
        if args.background:
            shutil.rmtree(checkpoints.save_async(0, small).wait().path)
        file, probe = directory / "limit", min(size, PROBE_BYTES)
        shape = direct_io.best_shape(lambda one: direct_io.write_rate(file, probe, one))[1]
        for number in range(args.repeat):
            os.sync()
            limits.append(direct_io.write_rate(file, size, shape))
            settle(args.device)
            cpu, begun = cpu_seconds(), time.perf_counter()
            saved = checkpoints.save(2 * number, {"model": tensors})
            runs.append({"seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - cpu})
            told["taken"] = str(saved.receipt)
            removed(2 * number)
            if args.background:
                background.append(in_background(args.device, lambda step=2 * number + 1: begin(step)))
                removed(2 * number + 1)
    return {**told, "runs": runs, "background": background, "limits": limits, "limit_shape": str(shape)}


def restore(args: argparse.Namespace, tensors: Tensors) -> dict[str, Any]:
    import torch
    from thruway.torch import Checkpointer, load_file

    with fresh(args.directory) as directory:
        checkpoints = Checkpointer(directory / "run", device=args.device)
        place = checkpoints.save(1, {"model": tensors}).path
        files = sorted(place.glob("*.safetensors"))

        def restored() -> Tensors:
            return checkpoints.restore(1, device=args.device)["model"]

        def loaded() -> Tensors:
            return load_file(place, args.device, backend="pread")

        def seconds(work: Callable[[], Tensors], cold: bool) -> dict[str, float]:
            left = direct_io.evict_wholly(files) if cold else 0
            if left > LEFT_MAX * bytes_of(tensors):
                raise RuntimeError(f"the page cache keeps {left} bytes")
            synchronise(args.device)
            cpu, begun = cpu_seconds(), time.perf_counter()
            found = work()
            synchronise(args.device)
            run = {"seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - cpu}
            for name, tensor in tensors.items():
                # Bytes, as a NaN is equal to nothing.
                if not torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)):
                    raise RuntimeError(f"{name} came back with other bytes")
            return run

        def pairs(count: int, cold: bool) -> list[dict[str, Any]]:
            # In turns, and each as often the first of the two as the other.
            both = (("load", loaded), ("restore", restored))
            ordered = (both[:: 1 if number % 2 == 0 else -1] for number in range(count))
            return [{name: seconds(work, cold) for name, work in order} for order in ordered]

        direct_io.warm(files)
        # The first takes the memory that all others use again.
        pairs(1, cold=False)
        told = {"cached": pairs(CACHED_PAIRS, cold=False)}
        return {**told, "cold": pairs(args.repeat, cold=True), "compared": True}


# -------------------------------------------------------------------------------------- others


def writer(directory: Path, threads: int) -> Any:
    from torch.distributed import checkpoint

    return checkpoint.FileSystemWriter(directory / "checkpoint", thread_count=threads, sync_files=True)


def dcp(threads: int) -> Callable[[Tensors, Path], None]:
    def save(tensors: Tensors, directory: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.save({"model": tensors}, storage_writer=writer(directory, threads))

    return save


SYNCED: dict[str, tuple[str, Callable[[Tensors, Path], None]]] = {
    "torch.save": ("torch", save_peers.torch_save),
    "safetensors": ("safetensors", save_peers.safetensors),
    "dcp-1": ("torch", dcp(1)),
    "dcp-4": ("torch", dcp(4)),
    "dcp-16": ("torch", dcp(16)),
    "kvikio": ("kvikio-cu13", save_peers.kvikio),
}


def synced(args: argparse.Namespace, tensors: Tensors) -> dict[str, Any]:
    runs = []
    with fresh(args.directory) as directory:
        SYNCED[args.name][1](make(SMALL_BYTES, args.device), directory)
    for _ in range(args.repeat):
        with fresh(args.directory) as directory:
            settle(args.device)
            cpu, begun = cpu_seconds(), time.perf_counter()
            SYNCED[args.name][1](tensors, directory)
            save_peers.sync(directory)
            runs.append({"seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - cpu})
            must_hold(directory, bytes_of(tensors))
    return {"runs": runs}


def dcp_async(args: argparse.Namespace, tensors: Tensors) -> dict[str, Any]:
    from torch.distributed import checkpoint

    state, stager, told = {"model": tensors}, None, {}
    with fresh(args.directory) as directory:
        checkpoint.async_save(
            {"model": make(SMALL_BYTES, args.device)}, storage_writer=writer(directory, BACKGROUND_THREADS)
        ).result()
    if args.name == "dcp-async-pinned":
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # Memory that is shared between processes is of no use to a thread.
        stager = DefaultStager(StagingOptions(use_shared_memory=False))
        begun = time.perf_counter()
        ready = stager.stage(state)
        ready.result()
        told["prepare_seconds"] = time.perf_counter() - begun

    def begin(directory: Path) -> Background:
        response = checkpoint.async_save(
            state, storage_writer=writer(directory, BACKGROUND_THREADS), async_stager=stager
        )
        # Without a thread of its own for the copies it gives one future, and the copies are made by now.
        uploaded = getattr(response, "upload_completion", response)
        staged = getattr(response, "staging_completion", None)

        def durable() -> None:
            uploaded.result()
            save_peers.sync(directory)

        return Background(staged.result if staged is not None else lambda: None, durable)

    background = []
    try:
        for _ in range(args.repeat):
            with fresh(args.directory) as directory:
                background.append(in_background(args.device, lambda directory=directory: begin(directory)))
                must_hold(directory, bytes_of(tensors))
    finally:
        if stager is not None:
            stager.close()
    return {**told, "runs": background}


# --------------------------------------------------------------------------------- the program

OTHERS: dict[str, tuple[str, Callable[[argparse.Namespace, Tensors], dict[str, Any]]]] = {
    "thruway": ("thruway", thruway),
    "restore": ("thruway", restore),
    "dcp-async": ("torch", dcp_async),
    "dcp-async-pinned": ("torch", dcp_async),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*OTHERS, *SYNCED, "train"])
    parser.add_argument("directory", type=Path, help="on the drive to measure")
    parser.add_argument("--bytes", type=int, default=8_000_000_000, help="of the state, about")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--background", action="store_true", help="thruway: save_async too")
    parser.add_argument("--every", type=int, default=10, help="train: steps from save to save")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="train: of a step, about")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    # Of one rank where there might be several, and the like: on standard error, as all the rest.
    warnings.simplefilter("default")
    if args.name == "train":
        print(json.dumps(checkpoint_train.measure(args)))
        return 0
    package, work = OTHERS[args.name] if args.name in OTHERS else (SYNCED[args.name][0], synced)
    tensors = make(args.bytes, args.device)
    known = {"name": args.name, "version": importlib.metadata.version(package), "tensors": len(tensors)}
    print(json.dumps({**known, "bytes": bytes_of(tensors), **work(args, tensors)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
