"""Saving torch tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from os import PathLike

import torch

from thruway import _save
from thruway._errors import InvalidInputError, UnsupportedError
from thruway._thruway import Receipt
from thruway.torch import _tensors


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
    stream = _tensors.stream_before(sources)
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
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidInputError(f"`{name}` has no shape before its module has run once")
        if tensor.is_nested:
            raise InvalidInputError(f"`{name}` is a nested tensor, which the format has no place for: save its parts")
        if tensor.layout != torch.strided:
            raise InvalidInputError(
                f"`{name}` is a sparse tensor, which the format has no place for: save its dense form"
            )
        if tensor.device.type == "meta":
            raise UnsupportedError(f"`{name}` is a meta tensor: it has no bytes to save")
        if not tensor.is_contiguous():
            hint = "call `.contiguous()` on it first, or use save_model(..., force_contiguous=True)"
            raise InvalidInputError(f"`{name}` is not contiguous", hint=hint)
        if tensor.numel():
            _tensors.check_memory(name, tensor)
            start = tensor.data_ptr()
            storage = (tensor.device, tensor.untyped_storage().data_ptr())
            seen.setdefault(storage, []).append((start, start + tensor.nbytes, name))
    for ranges in seen.values():
        ranges.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
            if start < end:
                raise SharedMemoryError(
                    "Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
                    f"when loading them again: {one!r} and {other!r}",
                    hint="save one of them, or a clone",
                )
    return tensors


class SharedMemoryError(InvalidInputError, RuntimeError):
    """Two tensors that are to be saved share memory."""


def _source(name: str, tensor: torch.Tensor) -> _save.Source:
    code = _tensors.CODES.get(tensor.dtype)
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
