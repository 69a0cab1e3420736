"""Tensors of the format as torch's: dtypes, shapes, devices, memory. What `safe_open` and loads ask of a framework."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from thruway import _save
from thruway._errors import InvalidInputError, UnsupportedError
from thruway._open import Run

# The format's name of each dtype; some are younger than the oldest torch that is supported.
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
CODES = {dtype: code for code, dtype in DTYPES.items()}

# Less than this is in few pieces.
_RESERVE_BYTES_MIN = 256 << 20


def place(device: Any) -> tuple[str, torch.device | None]:
    """Where the native half loads to, and the device that tensors are moved to from there, if it is another.

    Raises:
        InvalidInputError: what is no device, or has no memory of its own.
        UnsupportedError: a GPU that this machine or this torch does not have.
    """
    try:
        wanted = (
            torch.device("cuda", device) if type(device) is int else torch.device("cpu" if device is None else device)
        )
    except (RuntimeError, TypeError, ValueError):
        raise InvalidInputError(
            f'{device!r} is no device: use "cpu", "cuda", "cuda:1" or the number of a GPU'
        ) from None
    if wanted.type == "meta":
        raise InvalidInputError("tensors on meta have no bytes that could be loaded")
    if wanted.type != "cuda":
        return "host", None if wanted.type == "cpu" else wanted
    _ensure_not_forked()
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"torch {torch.__version__} finds no GPU that it can use, so nothing is loaded to {device}"
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    return f"cuda:{index}", None


def _ensure_not_forked() -> None:
    """Raises in a child of a process that had used CUDA, which does not survive a fork."""
    if torch.cuda._is_in_bad_fork():
        hint = 'start workers with multiprocessing\'s "spawn" or "forkserver"'
        raise UnsupportedError("this process was forked from one that had used the GPU already", hint=hint)


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises for a tensor whose memory is gone, or is too little for it."""
    if not tensor.numel():
        return
    try:
        start, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except RuntimeError:
        start, held = 0, 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not start or (tensor.storage_offset() + last + 1) * tensor.itemsize > held:
        hint = "it was freed, or is sharded or wrapped: make an ordinary tensor of it first"
        raise InvalidInputError(f"`{name}` has no memory for its {tensor.nbytes} bytes", hint=hint)


def dtype_of(name: str, code: str) -> torch.dtype:
    """Torch's dtype for one of the format."""
    dtype = DTYPES.get(code)
    if dtype is None:
        raise UnsupportedError(f"Dtype not understood: {code}: torch {torch.__version__} has none for it ({name!r})")
    return dtype


def shape_of(code: str, shape: Sequence[int]) -> list[int]:
    """The shape in torch's elements: two of the format's F4 are one of torch's."""
    if code != "F4" or not shape:
        return list(shape)
    if shape[-1] % 2:
        raise UnsupportedError(
            f"a tensor of F4 has the shape {list(shape)}: torch has pairs, so the last length must be even"
        )
    return [*shape[:-1], shape[-1] // 2]


def view(name: str, buffer: Any, code: str, shape: Sequence[int], offset: int) -> torch.Tensor:
    """A tensor over the bytes of a buffer from `offset` on. It keeps the buffer."""
    dtype, lengths = dtype_of(name, code), shape_of(code, shape)
    count = math.prod(lengths)
    if count == 0:
        return _shaped(name, torch.empty(0, dtype=dtype, device="cpu"), lengths)
    if offset % dtype.itemsize:
        # A file whose header has an odd length: no number may begin there in memory.
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        return _shaped(name, raw.clone().view(dtype), lengths)
    return _shaped(name, torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset), lengths)


def of_bytes(name: str, raw: torch.Tensor, code: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of just these bytes, whose memory it shares."""
    return _shaped(name, raw.view(dtype_of(name, code)), shape_of(code, shape))


def _shaped(name: str, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    try:
        return flat.view(tuple(shape))
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise _no_such_shape(name, shape) from None


def _no_such_shape(name: str, shape: Sequence[int]) -> UnsupportedError:
    first = list(shape[:6])
    lengths = f"{first}" if len(shape) <= 6 else f"{len(shape)} dimensions, {first} and so on"
    return UnsupportedError(f"torch has no tensors of the shape of {name!r}: {lengths}")


def to(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """The tensor where it belongs, if that is elsewhere."""
    return tensor if device is None else tensor.to(device)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The same without gaps."""
    return tensor.contiguous()


def current_stream(memory: str) -> int | None:
    """The stream that a transfer comes after, if it goes to or from a GPU.

    Raises:
        UnsupportedError: in a child of a process that had used CUDA.
    """
    if memory == "host":
        return None
    _ensure_not_forked()
    return torch.cuda.current_stream(memory).cuda_stream


def stream_before(sources: Iterable[_save.Source]) -> int | None:
    """The stream that a save of these comes after: that of the one GPU that some of them lie on, if any do."""
    gpus = {source.device for source in sources} - {"host"}
    return current_stream(next(iter(gpus))) if gpus else None


def allocate(wanted: list[int], memory: str) -> list[tuple[int, torch.Tensor]]:
    """The memory that a load wants, a block for each number of bytes: its address, and what keeps it."""
    _reserve(sum(-(-nbytes // 512) * 512 for nbytes in wanted), memory)
    blocks = (torch.empty(nbytes, dtype=torch.uint8, device=memory) for nbytes in wanted)
    return [(block.data_ptr(), block) for block in blocks]


def _reserve(nbytes: int, memory: str) -> None:
    """Has torch get much memory from the driver at once, if it has not got it. It deals it out in parts then.

    To get each large tensor's from the driver holds up copies to the GPU: the first load of a process took 5 % longer.
    """
    conf = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    # With these torch would not deal it out.
    if nbytes < _RESERVE_BYTES_MIN or "max_split_size_mb" in conf or "cudaMallocAsync" in conf:
        return
    if torch.cuda.memory_reserved(memory) - torch.cuda.memory_allocated(memory) < nbytes:
        # Where there is not so much in one piece, there may be in several.
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            torch.empty(nbytes, dtype=torch.uint8, device=memory)


def make(block: torch.Tensor, runs: list[Run], tensors: dict[str, Any]) -> None:
    """The tensors that lie in a block of memory, which they share.

    Of many that follow one another without gaps by one call of torch, of others by one for each: a model of many small
    ones would take longer to make than to load.
    """
    for code, shape, nbytes, names, offsets in runs:
        if nbytes == 0:
            tensors.update((name, of_bytes(name, block[:0], code, shape)) for name in names)
            continue
        dtype, lengths = dtype_of(names[0], code), shape_of(code, shape)
        whole = block[: block.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        strides = [math.prod(lengths[dimension + 1 :]) for dimension in range(len(lengths))]
        starts = [offset // dtype.itemsize for offset in offsets]
        no_gaps = offsets == [*range(offsets[0], offsets[0] + len(names) * nbytes, nbytes)]
        try:
            if lengths and no_gaps:
                rows = whole.as_strided([len(names) * lengths[0], *lengths[1:]], strides, starts[0])
                # Not `split`: its tensors could not be changed in place where gradients are tracked.
                made: Sequence[torch.Tensor] = torch.unsafe_split(rows, lengths[0])
            else:
                made = [whole.as_strided(lengths, strides, start) for start in starts]
        except (RuntimeError, TypeError, ValueError, OverflowError):
            raise _no_such_shape(names[0], shape) from None
        tensors.update(zip(names, made, strict=True))
