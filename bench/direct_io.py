"""What a drive gives past the page cache, measured without any code of Thruway's: O_DIRECT requests from threads.

Python's part of a request of a megabyte or more is nothing beside the drive's, and the interpreter's lock is free while
a request is under way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4096


@dataclass(frozen=True)
class Shape:
    """How many requests are in flight, and how large they are."""

    depth: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.depth} x {self.chunk >> 10} KiB"


SHAPES = (Shape(32, 4 << 20), Shape(4, 4 << 20), Shape(16, 1 << 20), Shape(8, 1 << 20), Shape(16, 512 << 10))


def _in_threads(depth: int, chunk: int, jobs: list[tuple[int, int, int]], one: Callable, keep: bool = False) -> float:
    """Runs `one(descriptor, buffer, offset)` for every job, `depth` at a time. Gives the seconds.

    With `keep`, every job has memory of its own, as the bytes of a load have; else each thread uses one buffer again.
    """
    buffers_wanted = len(jobs) if keep else depth
    memory = mmap.mmap(-1, buffers_wanted * chunk, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A request into small pages is cut into many for the drive: without this a virtual one gave half its rate.
    memory.madvise(mmap.MADV_HUGEPAGE)
    # A read into memory that was never touched would measure the kernel's clearing of pages.
    piece = os.urandom(1 << 16)
    for _ in range(-(-len(memory) // len(piece))):
        memory.write(piece[: len(memory) - memory.tell()])
    buffers = [memoryview(memory)[slot * chunk : (slot + 1) * chunk] for slot in range(buffers_wanted)]
    queue, lock, failures = iter(enumerate(jobs)), threading.Lock(), []

    def work(thread: int) -> None:
        try:
            while not failures:
                with lock:
                    number, job = next(queue, (0, None))
                if job is None:
                    return
                descriptor, offset, length = job
                one(descriptor, buffers[number if keep else thread][:length], offset)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(depth)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    if failures:
        raise failures[0]
    return seconds


def _read(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        # The last block of a file may be short.
        if count == 0 or count % BLOCK:
            return
        view, offset = view[count:], offset + count


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwritev(descriptor, [view], offset)
        if count % BLOCK:
            raise OSError(f"a write past the page cache was cut to {count} bytes")
        view, offset = view[count:], offset + count


def read_rate(paths: Sequence[Path], shape: Shape, keep: bool = False) -> float:
    """GB/s of reading the files past the page cache, all of them at once.

    With `keep`, into as much memory as the files are long, all of it touched before, and nothing is overwritten. Else
    into a few buffers over and over, which stay in the processor's caches: a little faster, and of no use to a load.
    """
    jobs, total, descriptors = [], 0, []
    try:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            descriptors.append(descriptor)
            length = os.fstat(descriptor).st_size
            total += length
            jobs += [(descriptor, offset, shape.chunk) for offset in range(0, length, shape.chunk)]
        return total / _in_threads(shape.depth, shape.chunk, jobs, _read, keep) / 1e9
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def write_rate(path: Path, length: int, shape: Shape) -> float:
    """GB/s of filling a fresh file, its blocks reserved before, until it is synced. The file is removed."""
    length = max(length // shape.chunk, 1) * shape.chunk
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, length)
        jobs = [(descriptor, offset, shape.chunk) for offset in range(0, length, shape.chunk)]
        seconds = _in_threads(shape.depth, shape.chunk, jobs, _write)
        begun = time.perf_counter()
        os.fsync(descriptor)
        return length / (seconds + time.perf_counter() - begun) / 1e9
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def best_shape(rate: Callable[[Shape], float], shapes: Sequence[Shape] = SHAPES) -> tuple[float, Shape]:
    """The best rate of several shapes, and the shape."""
    return max(((rate(shape), shape) for shape in shapes), key=lambda found: found[0])


def evict(paths: Sequence[Path]) -> None:
    """Makes the page cache forget the files, as far as the kernel is willing to."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_bytes(path: Path) -> int:
    """How much of a file the page cache holds. The kernel tells the truth to whoever may write the file."""
    length = path.stat().st_size
    if length == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Mapping a file reads nothing of it.
        address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"cannot map {path}")
    try:
        pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if libc.mincore(address, length, pages) != 0:
            raise OSError(ctypes.get_errno(), f"cannot ask what the page cache holds of {path}")
        return min(sum(page & 1 for page in pages.raw) * mmap.PAGESIZE, length)
    finally:
        libc.munmap(address, length)


def evict_wholly(paths: Sequence[Path], attempts: int = 5) -> int:
    """Evicts until nothing is left, and gives what is left all the same."""
    left = -1
    for _ in range(attempts):
        evict(paths)
        left = sum(map(resident_bytes, paths))
        if left == 0:
            break
        # Another reader, or the kernel's own batches, may keep a page for a moment.
        time.sleep(0.1)
    return left


def warm(paths: Sequence[Path]) -> None:
    """Brings the files into the page cache."""
    jobs, descriptors, chunk = [], [], 4 << 20
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        descriptors.append(descriptor)
        jobs += [(descriptor, offset, chunk) for offset in range(0, os.fstat(descriptor).st_size, chunk)]
    _in_threads(min(8, os.cpu_count() or 1), chunk, jobs, _read)
    for descriptor in descriptors:
        os.close(descriptor)
