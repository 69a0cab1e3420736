"""Modules: their parameters and buffers saved and loaded, where several names may stand for one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

import torch

from thruway._errors import InvalidInputError
from thruway._thruway import Receipt


def one_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two names of the very same tensor. Some subclasses have no address to tell them apart by."""
    return tensor.device, tensor.dtype, tensor.data_ptr() or id(tensor), tuple(tensor.shape), tensor.stride()


def aliases(state: Mapping[str, torch.Tensor], preferred: Iterable[str] = ()) -> dict[str, str]:
    """For each name that need not be saved the one that stands for it: of the same tensor, or of all that it views.

    Of names of the same tensor a preferred one is kept, or the first. A view that is preferred is kept too.
    """
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in state.items():
        # What a module adds with `get_extra_state` may be anything.
        if isinstance(tensor, torch.Tensor) and tensor.numel() and not torch.nn.parameter.is_lazy(tensor):
            names.setdefault(one_tensor(tensor), []).append(name)
    wanted, found, wholes = set(preferred), {}, {}
    for same in names.values():
        kept = min(same, key=lambda name: (name not in wanted, name))
        found.update({name: kept for name in same if name != kept})
        if (storage := _wholly_used(state[kept])) is not None:
            wholes[storage] = kept
    for same in names.values():
        storage = _storage(state[same[0]])
        whole = None if storage is None else wholes.get(storage)
        if whole is not None and whole not in same and not wanted.intersection(same):
            found.update(dict.fromkeys(same, whole))
    return found


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int] | None:
    """What tells a storage from others, of a tensor that has one."""
    return (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.data_ptr() else None


def _wholly_used(tensor: torch.Tensor) -> tuple[torch.device, int] | None:
    """The storage of a tensor that fills it."""
    storage = _storage(tensor)
    fills = storage is not None and tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return storage if fills else None


def save_model(
    model: torch.nn.Module,
    filename: str | PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    receipt: Callable[[Receipt], object] | None = None,
) -> None:
    """Saves a module's parameters and buffers, a tensor with several names once.

    Args:
        model: the module.
        filename: the file.
        metadata: text pairs for the header. Each name that is left out is added, with the one that stands for it.
        force_contiguous: copies tensors that are not contiguous, which else are an error.
        receipt: called with what the save did.
    """
    from thruway.torch import save_file

    state = model.state_dict()
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            hint = "save the tensors with save_file, and the rest apart"
            raise InvalidInputError(f"`{name}`, which the module's get_extra_state gives, is no tensor", hint=hint)
    left_out = aliases(state)
    kept = {name: tensor for name, tensor in state.items() if name not in left_out}
    if force_contiguous:
        kept = {name: tensor.contiguous() for name, tensor in kept.items()}
    save_file(kept, filename, {**left_out, **(metadata or {})}, receipt=receipt)


def load_model(
    model: torch.nn.Module,
    filename: str | PathLike[str],
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    receipt: Callable[[Receipt], object] | None = None,
) -> tuple[list[str], list[str]]:
    """Loads a file, a directory of shards or an index into a module.

    Args:
        model: the module.
        filename: what to load.
        strict: names that the module lacks or the file lacks are an error.
        device: where tensors are loaded to before they are copied into the module.
        backend: as for `load_file`.
        receipt: called with what the load did, as by `load_file`.

    Returns:
        The names that the file lacks, and those that the module lacks.

    Raises:
        RuntimeError: with `strict`, as torch's `load_state_dict` raises it; and for shapes that do not fit.
    """
    from thruway.torch import load_file

    loaded = load_file(filename, device, backend=backend, receipt=receipt)
    left_out = aliases(model.state_dict(), loaded)
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    # A name is there too if the one that stands for its tensor is.
    missing = sorted(name for name in missing if left_out.get(name) not in loaded)
    # Two tensors of the file cannot both be the module's one.
    unexpected = sorted({*unexpected, *(name for name in left_out if name in loaded)})
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                lines.append(f"    {what} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in names) + ".")
        raise StateError("\n".join(lines))
    return missing, unexpected


class StateError(InvalidInputError, RuntimeError):
    """A file's tensors are not those of the module."""
