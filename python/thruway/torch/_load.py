"""Loading torch tensors, all at once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from os import PathLike

import torch

from thruway import _progress, _save
from thruway._flight import Part, load_of
from thruway._open import Load, check_backend, safe_open
from thruway._select import Names, Shard
from thruway._thruway import Model, Receipt, parse_header
from thruway.torch import _stream, _tensors


def load_file(
    filename: str | PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    names: Names = None,
    shard: Shard | None = None,
    dtype: torch.dtype | None = None,
    path: str = "auto",
    receipt: Callable[[Receipt], object] | None = None,
    progress: _progress.Progress = None,
) -> dict[str, torch.Tensor]:
    """Loads a file, a directory of shards or an index.

    Args:
        filename: what to load.
        device: where to. A GPU's tensors come from torch's allocator and are ready for work that the current stream
            gets from now on; those of 2 MiB or less may share a storage of that size.
        backend: on the CPU, "mmap" maps files, which are read as tensors are touched; "pread" reads all of it now, at
            the drive's own speed. GPUs take no heed of it.
        names: the tensors that are wanted, or a function that picks them by name; all by default.
        shard: of tensors by name, or by the end of their names, the part that a rank needs: (dimension, rank, world),
            dealt as by `torch.chunk`. Only that part is read, and what lies in small gaps between its rows.
        dtype: what floating-point tensors are converted to, some at a time.
        path: which way the bytes go, if they are read now: "auto", "staged" or "cached".
        receipt: called with what the load did; then it is read now.
        progress: `True` shows it on stderr; a function is called now and then with the bytes moved so far; likewise.

    Returns:
        A tensor for each name, in the order of the bytes. Tensors may be changed; a mapped file is not.
    """
    check_backend(backend)
    _stream.check_dtype(dtype)
    filename = os.fspath(filename)
    memory, target = _tensors.place(device)
    lazy = memory == "host" and backend == "mmap" and path == "auto" and receipt is None and not progress
    if dtype is not None and not lazy:
        return dict(
            _stream.stream(
                filename,
                device,
                names=names,
                shard=shard,
                dtype=dtype,
                path=path,
                receipt=receipt,
                progress=progress,
            )
        )
    if lazy:
        mapped = safe_open(filename, "pt", device)
        wanted = _stream.wanted_of(mapped._entries, names, shard)
        tensors = ((one.name, mapped.part(one.name, one.narrowed)) for one in wanted)
        return {name: _stream.cast(_tensors.packed(tensor), dtype) for name, tensor in tensors}
    if names is None and shard is None:
        # Nothing needs to be known of the tensors, of which there may be many.
        model = Model(filename, memory, path)
        begin, total = functools.partial(Load, _tensors, model, memory, None, []), model.nbytes
    else:
        opened = _stream.Opened(filename, memory, path)
        part = Part(opened.models[0], _stream.wanted_of(opened.entries, names, shard))
        begin, total = functools.partial(load_of, _tensors, part, memory), sum(one.nbytes for one in part.wanted)
    with _progress.shown(progress, total) as tell:
        loaded, told = begin(progress=tell).wait()
    if receipt is not None:
        receipt(told)
    return loaded if target is None else {name: tensor.to(target) for name, tensor in loaded.items()}


def load(data: bytes | bytearray | memoryview) -> dict[str, torch.Tensor]:
    """The tensors in the bytes of a file. They are copies."""
    data = _save.bytes_of(data)
    entries, _ = parse_header(data, len(data))
    own = bytearray(data)
    return {name: _tensors.view(name, own, dtype, shape, start) for name, dtype, shape, _, start, _ in entries}
