"""Loading in place: bytes go from storage to where a module's parameters and buffers lie already."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thruway import _progress, _select
from thruway._errors import InvalidInputError, UnsupportedError
from thruway._flight import load_of
from thruway._open import Bytes
from thruway._thruway import Receipt
from thruway.torch import _stream, _tensors
from thruway.torch._module import aliases


def load_into(
    module: torch.nn.Module,
    paths: _stream.Paths,
    *,
    strict: bool = True,
    shard: _select.Shard | None = None,
    path: str = "auto",
    receipt: Callable[[Receipt], object] | None = None,
    progress: _progress.Progress = None,
) -> tuple[list[str], list[str]]:
    """Loads a model into the parameters and buffers of a module, which stay where they are.

    Nothing is allocated for tensors that have the dtype of theirs in the file and no gaps; others are converted some at
    a time. Of a parameter that is sharded over a device mesh (a DTensor, as FSDP2 makes them), only this rank's part is
    read. A tensor with several names is loaded once.

    Args:
        module: the module, on the CPU, on GPUs, or both. Work that the current stream has on it is waited for.
        paths: a file, a directory of shards or an index, or a list of these.
        strict: names that the module lacks or the files lack are an error.
        shard: of tensors by name, or by the end of their names, the part that the module has: (dimension, rank, world).
        path: which way the bytes go: "auto", "staged" or "cached".
        receipt: called with what the load did.
        progress: `True` shows it on stderr; a function is called now and then with the bytes moved so far.

    Returns:
        The names that the files lack, and those that the module lacks.

    Raises:
        RuntimeError: torch's own, of what is missing, unexpected or of another shape. Nothing is changed then; after
            any other failure parts of the module may have been overwritten.
        InvalidInputError: a parameter that has no memory yet: see `torch.nn.Module.to_empty`.
    """
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if _is_tensor(name, tensor)}
    homes = {name: _home(name, tensor) for name, tensor in state.items()}
    opened = {
        memory: _stream.Opened(paths, memory, path) for memory in {home.memory for home in homes.values()} or {"host"}
    }
    entries = next(iter(opened.values())).entries
    shapes = {name: _tensors.shape_of(entry[1], entry[2]) for name, entry in entries.items()}
    same = aliases({name: home.tensor for name, home in homes.items()}, entries)
    shards = _select.resolved(shapes, shard)
    missing, unexpected = _report(module, state, _cut(shapes, shards), same, strict)
    shards |= {name: home.shard for name, home in homes.items() if name in entries and home.shard is not None}
    wanted = {name: homes[name] for name in entries if name in homes and same.get(name) not in entries}
    for name, home in wanted.items():
        if home.tensor.is_meta:
            hint = "give the module memory first: module.to_empty(device=...)"
            raise InvalidInputError(f"{name!r} lies on meta, where nothing can be loaded", hint=hint)
    began, receipts, moved = (time.perf_counter(), time.process_time()), list[Receipt](), 0
    with _progress.shown(progress, sum(home.tensor.nbytes for home in wanted.values())) as tell, torch.no_grad():
        for one in opened.values():
            here = {name: home.tensor for name, home in wanted.items() if home.memory == one.memory}
            straight = [name for name, tensor in here.items() if _takes_bytes(tensor, entries[name][1])]
            for part in one.parts(straight, _those(shards, straight)):
                into = [(piece.name, _bytes_of(here[piece.name], one.memory)) for piece in part.wanted]
                load = load_of(_tensors, part, one.memory, _after(moved, tell), into)
                receipts.append(load.wait()[1])
                moved += sum(piece.nbytes for piece in part.wanted)
                for piece in part.wanted:
                    torch.autograd.graph.increment_version(here[piece.name])
            others = [name for name in here if name not in set(straight)]
            streamed = _stream.streamed(one, names=others, shard=_those(shards, others), receipt=receipts.append)
            for name, tensor in streamed:
                here[name].copy_(tensor.reshape(here[name].shape))
                moved += tensor.nbytes
                if tell is not None:
                    tell(moved)
    if receipt is not None:
        receipt(Receipt.joined(receipts, time.perf_counter() - began[0], time.process_time() - began[1]))
    return missing, unexpected


def _after(moved: int, tell: Callable[[int], object] | None) -> Callable[[int], object] | None:
    """Tells the bytes of a part as those of the whole."""
    return None if tell is None else lambda more: tell(moved + more)


class _Home(NamedTuple):
    """Where a tensor of a module lies."""

    # Of a sharded one this rank's part.
    tensor: torch.Tensor
    # "host" or "cuda:N"; where it is loaded to on its way to another device.
    memory: str
    # Dimension, rank and world of the part.
    shard: tuple[int, int, int] | None


def _is_tensor(name: str, value: object) -> bool:
    """Whether it can be loaded. What a module adds with `get_extra_state` may be anything."""
    if not isinstance(value, torch.Tensor):
        return False
    if torch.nn.parameter.is_lazy(value):
        raise InvalidInputError(f"{name!r} has no shape before the module has run once: run it, then load")
    return True


def _home(name: str, tensor: Any) -> _Home:
    sharded = _is_dtensor(tensor)
    local = (tensor.to_local() if sharded else tensor).detach()
    memory = f"cuda:{local.get_device()}" if local.device.type == "cuda" else "host"
    return _Home(local, memory, _shard_of(name, tensor) if sharded else None)


def _is_dtensor(tensor: torch.Tensor) -> Any:
    # Who has one has imported this, which takes long.
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def _shard_of(name: str, tensor: Any) -> tuple[int, int, int] | None:
    """Which part of a DTensor this rank has; `None` if all of it."""
    sharded = [(at, placement) for at, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not sharded:
        return None
    at, placement = sharded[0]
    if len(sharded) > 1 or type(placement).__name__ != "Shard":
        hint = "load with thruway.torch.load_file(..., shard=...), and distribute the tensors yourself"
        raise UnsupportedError(f"{name!r} is placed as {tensor.placements}, of which no part is one slice", hint=hint)
    return placement.dim, tensor.device_mesh.get_local_rank(at), tensor.device_mesh.size(at)


def _report(
    module: torch.nn.Module,
    state: dict[str, torch.Tensor],
    shapes: dict[str, list[int]],
    same: dict[str, str],
    strict: bool,
) -> tuple[list[str], list[str]]:
    """What torch says of a file with tensors of these shapes. It gets the module's own, and copies them to itself."""

    def stand_in(name: str, shape: list[int]) -> torch.Tensor:
        tensor = state.get(name)
        # A single number may have been saved with a dimension.
        fits = tensor is not None and (list(tensor.shape) == shape or (tensor.dim() == 0 and shape == [1]))
        return tensor if tensor is not None and fits else torch.empty(shape, device="meta")

    file = {name: stand_in(name, shape) for name, shape in shapes.items()}
    # A name is there too if another of the same tensor is.
    file |= {name: state[name] for name, kept in same.items() if kept in shapes and name not in file}
    keys = module.load_state_dict(file, strict=strict)
    return list(keys.missing_keys), list(keys.unexpected_keys)


def _takes_bytes(tensor: torch.Tensor, code: str) -> bool:
    """Whether a file's bytes are the tensor's, as they are."""
    plain = type(tensor) is torch.Tensor and tensor.device.type in ("cpu", "cuda") and tensor.layout == torch.strided
    return plain and tensor.is_contiguous() and tensor.dtype == _tensors.DTYPES.get(code)


def _bytes_of(tensor: torch.Tensor, memory: str) -> Bytes:
    return memory, tensor.data_ptr(), tensor.nbytes, tensor


def _cut(shapes: dict[str, list[int]], shards: dict[str, tuple[int, int, int]]) -> dict[str, list[int]]:
    """The shapes of what is loaded."""
    cut = dict(shapes)
    for name, (dimension, first, last) in _select.cuts(shapes, shards).items():
        cut[name] = [*shapes[name][:dimension], last - first, *shapes[name][dimension + 1 :]]
    return cut


def _those(shards: dict[str, tuple[int, int, int]], names: list[str]) -> dict[str, tuple[int, int, int]]:
    return {name: shards[name] for name in names if name in shards}
