"""Loading and saving torch tensors, with the functions of `safetensors.torch`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch

from thruway import _save
from thruway._errors import InvalidInputError, UnsupportedError
from thruway._open import load as _load
from thruway._open import safe_open
from thruway._thruway import Loading, Model, Receipt, parse_header
from thruway.torch._module import load_model, save_model

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]

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
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

# How much of a GPU's memory small tensors may share: what freeing all of them but one can leave allocated.
_SHARED_BYTES = 2 << 20


def load_file(
    filename: str | PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    path: str = "auto",
    receipt: Callable[[Receipt], object] | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, torch.Tensor]:
    """Loads a file, a directory of shards or an index.

    Args:
        filename: what to load.
        device: where to. A GPU's tensors come from torch's allocator and are ready for work that the current stream
            gets from now on; those of 2 MiB or less may share a storage of that size.
        backend: on the CPU, "mmap" maps files, which are read as tensors are touched; "pread" reads all of it now, at
            the drive's own speed. GPUs take no heed of it.
        path: which way the bytes go, if they are read now: "auto", "staged" or "cached".
        receipt: called with what the load did; then it is read now.
        progress: called now and then with the bytes moved so far; likewise.

    Returns:
        A tensor for each name, in the order of the bytes. Tensors may be changed; a mapped file is not.
    """
    if backend not in ("mmap", "pread"):
        raise InvalidInputError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
    memory, target = _place(device)
    if memory == "host" and backend == "mmap" and path == "auto" and receipt is None and progress is None:
        with safe_open(filename, "pt", device) as opened:
            return opened.get_tensors()
    this = sys.modules[__name__]
    tensors, told = _load(this, Model(filename, memory), memory, None, [], path=path, progress=progress)
    if receipt is not None:
        receipt(told)
    return {name: _to(tensor, target) for name, tensor in tensors.items()}


def load(data: bytes | bytearray | memoryview) -> dict[str, torch.Tensor]:
    """The tensors in the bytes of a file. They are copies."""
    data = _save.bytes_of(data)
    entries, _ = parse_header(data, len(data))
    own = bytearray(data)
    return {name: _view(own, dtype, shape, start) for name, dtype, shape, _, start, _ in entries}


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_bytes: int | None = None,
    receipt: Callable[[Receipt], object] | None = None,
) -> None:
    """Saves tensors. What stands at `filename` is replaced only when the new is complete and on the drive.

    Args:
        tensors: dense, contiguous tensors that share no memory, on the CPU and on one GPU; from other devices they are
            copied. Work that the current stream has on them is waited for.
        filename: the file, or with `max_shard_bytes` the directory.
        metadata: text pairs for the header.
        max_shard_bytes: writes a directory of files of at most so many bytes and an index.
        receipt: called with what the save did.
    """
    sources = _save.checked(_unshared(tensors), _source)
    gpus = {source.device for source in sources} - {"host"}
    stream = torch.cuda.current_stream(next(iter(gpus))).cuda_stream if gpus else None
    _save.to_storage(sources, filename, metadata, max_shard_bytes, stream, receipt)


def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes that `save_file` would write."""
    unshared = _unshared(tensors)
    return _save.to_bytes(_save.checked({name: tensor.cpu() for name, tensor in unshared.items()}, _source), metadata)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The same, if it is something that can be saved."""
    if not isinstance(tensors, Mapping):
        raise InvalidInputError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    seen: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}")
        if tensor.layout != torch.strided:
            raise InvalidInputError(
                f"`{name}` is a sparse tensor, which the format has no place for: save its dense form"
            )
        if tensor.device.type == "meta":
            raise UnsupportedError(f"`{name}` is a meta tensor: it has no bytes to save")
        if not tensor.is_contiguous():
            hint = "call `.contiguous()` on it first, or use save_model(..., force_contiguous=True)"
            raise InvalidInputError(f"`{name}` is not contiguous\nhint: {hint}")
        if tensor.numel():
            start = tensor.data_ptr()
            held = tensor.untyped_storage().nbytes()
            if not start or tensor.storage_offset() * tensor.itemsize + tensor.nbytes > held:
                hint = "it was freed, or is sharded: gather it first"
                raise InvalidInputError(f"`{name}` has no memory for its {tensor.nbytes} bytes\nhint: {hint}")
            storage = (tensor.device, tensor.untyped_storage().data_ptr())
            seen.setdefault(storage, []).append((start, start + tensor.nbytes, name))
    for ranges in seen.values():
        ranges.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
            if start < end:
                raise SharedMemoryError(
                    "Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
                    f"when loading them again: {one!r} and {other!r}\nhint: save one of them, or a clone"
                )
    return tensors


class SharedMemoryError(InvalidInputError, RuntimeError):
    """Two tensors that are to be saved share memory."""


def _source(name: str, tensor: torch.Tensor) -> _save.Source:
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise InvalidInputError(f"`{name}` has the dtype {tensor.dtype}, which safetensors files cannot hold")
    shape = list(tensor.shape)
    if code == "F4" and shape:
        shape[-1] *= 2
    tensor = tensor.detach()
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg()
    device = "host" if tensor.device.type == "cpu" else f"cuda:{tensor.get_device()}"
    return _save.Source(name, code, shape, device, tensor.data_ptr(), tensor.nbytes, tensor)


# --- what `safe_open` asks of a framework


def _place(device: Any) -> tuple[str, torch.device | None]:
    """Where the native half loads to, and the device that tensors are moved to from there, if it is another."""
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type == "cuda":
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        return f"cuda:{index}", None
    return "host", None if wanted.type == "cpu" else wanted


def _dtype(code: str) -> torch.dtype:
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise UnsupportedError(f"Dtype not understood: {code}: torch {torch.__version__} has none for it")
    return dtype


def _shape(code: str, shape: list[int]) -> list[int]:
    """The shape in torch's elements: two of the format's F4 are one of torch's."""
    if code != "F4" or not shape:
        return shape
    if shape[-1] % 2:
        raise UnsupportedError(
            f"a tensor of F4 has the shape {shape}: torch has pairs, so the last length must be even"
        )
    return [*shape[:-1], shape[-1] // 2]


def _view(buffer: Any, code: str, shape: list[int], offset: int) -> torch.Tensor:
    dtype, shape = _dtype(code), _shape(code, shape)
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if offset % dtype.itemsize:
        # A file whose header has an odd length: no number may begin there in memory.
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


def _to(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    return tensor if device is None else tensor.to(device)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()


def _gpu_terms(memory: str) -> tuple[int | None, int | None]:
    if memory == "host":
        return None, None
    return torch.cuda.current_stream(memory).cuda_stream, _SHARED_BYTES


def _allocate(loading: Loading, wanted: Any, memory: str, tensors: dict[str, Any]) -> None:
    """Gives a load the memory that it wants, and makes the tensors while their bytes are on the way."""
    storages = [torch.empty(nbytes, dtype=torch.uint8, device=memory) for nbytes, _ in wanted]
    loading.give([(storage.data_ptr(), storage) for storage in storages])
    for storage, (_, places) in zip(storages, wanted, strict=True):
        for name, code, shape, offset, nbytes in places:
            raw = storage if nbytes == storage.numel() else storage[offset : offset + nbytes]
            tensors[name] = raw.view(_dtype(code)).view(_shape(code, shape))
