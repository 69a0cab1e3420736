"""Loading in place: bytes go from storage to where a module's parameters and buffers lie already."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch

from thruway import _progress, _select
from thruway._errors import InvalidInputError, UnsupportedError
from thruway._flight import load_of
from thruway._open import Bytes
from thruway._thruway import Receipt
from thruway.torch import _stream, _tensors
from thruway.torch._module import aliases, one_tensor


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
    read. A tensor with several names is loaded once: if the files have several, the last in the module's order counts,
    as for torch. What a submodule loads in a way of its own (it has hooks for that, overrides torch's method, or has an
    extra state) is loaded apart and given to it, all at once.

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
        RuntimeError: torch's own, of what is missing, unexpected or of another shape. Nothing is changed then, but for
            what submodules with a way of their own have taken; after any other failure parts of the module may have
            been overwritten.
        InvalidInputError: a parameter without memory: if it has none yet, see `torch.nn.Module.to_empty`.
    """
    # FSDP, for one, brings its parameters back to shards here.
    module.state_dict(keep_vars=True)
    own = _own_tensors(module)
    memories = {name: _memory_of(tensor) for name, tensor in own.items()}
    opened = {memory: _stream.Opened(paths, memory, path) for memory in {*memories.values()} or {"host"}}
    entries = next(iter(opened.values())).entries
    shapes = {name: _tensors.shape_of(entry[1], entry[2]) for name, entry in entries.items()}
    shards = _select.resolved(shapes, shard)
    apart = _apart(module, entries)
    homes = {name: _home(name, tensor, memories[name]) for name, tensor in own.items() if name not in apart}
    same = aliases({name: home.tensor for name, home in homes.items()}, entries)
    wanted = _wanted(homes, entries)
    began, receipts, moved = (time.perf_counter(), time.process_time()), list[Receipt](), 0
    with _progress.shown(progress, sum(home.tensor.nbytes for home in wanted.values())) as tell, torch.no_grad():
        given: dict[str, torch.Tensor] = {}
        for one in opened.values():
            names = [name for name in apart if memories.get(name, next(iter(opened))) == one.memory]
            if names:
                given |= _stream.streamed(one, names=names, shard=_those(shards, names), receipt=receipts.append)
        missing, unexpected = _report(module, own, given, _cut(shapes, shards), same, strict)
        shards |= {name: home.shard for name, home in wanted.items() if home.shard is not None}
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


def _own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that torch saves, by all their names."""
    own: dict[str, torch.Tensor] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        buffers = {key: part._buffers[key] for key in part._buffers if key not in part._non_persistent_buffers_set}
        for key, tensor in (part._parameters | buffers).items():
            if tensor is not None:
                own[prefix + key] = tensor
    for name, tensor in own.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidInputError(f"{name!r} has no shape before the module has run once: run it, then load")
    return own


def _apart(module: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """Those names of the files whose tensors are given to `load_state_dict` itself.

    They are extra states, or of submodules that load in a way of their own, which would miss bytes put in place.
    """
    parts = module.named_modules(remove_duplicate=False)
    prefixes = tuple(f"{name}." if name else "" for name, part in parts if _has_its_own_way(part))
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        prefixes = ("",)
    return {name for name in names if name.startswith(prefixes) or name.rpartition(".")[2] == "_extra_state"}


def _has_its_own_way(module: torch.nn.Module) -> bool:
    # What batch normalisation adds is a buffer that old files lack, and FSDP only brings its parameters back to shards.
    known = (torch.nn.Module._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict)
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    modules = [getattr(getattr(hook, "hook", hook), "__module__", None) or "" for hook in hooks]
    foreign = [name for name in modules if not name.startswith("torch.distributed.fsdp.")]
    return type(module)._load_from_state_dict not in known or bool(foreign)


def _wanted(homes: dict[str, _Home], entries: Container[str]) -> dict[str, _Home]:
    """What is to be filled, once each.

    Raises:
        InvalidInputError: a tensor that cannot be.
    """
    last = {one_tensor(home.tensor): name for name, home in homes.items() if name in entries}
    wanted = {name: homes[name] for name in last.values()}
    for name, home in wanted.items():
        if home.tensor.is_meta:
            hint = "give the module memory first: module.to_empty(device=...)"
            raise InvalidInputError(f"{name!r} lies on meta, where nothing can be loaded", hint=hint)
        dimensions = zip(home.tensor.shape, home.tensor.stride(), strict=True) if _is_strided(home.tensor) else ()
        if any(length > 1 and stride == 0 for length, stride in dimensions):
            hint = "make a tensor of its own of it first: .clone()"
            raise InvalidInputError(f"{name!r} is expanded: several of its elements are one", hint=hint)
        if _is_plain(home.tensor):
            _tensors.check_memory(name, home.tensor)
    return wanted


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


def _memory_of(tensor: torch.Tensor) -> str:
    return f"cuda:{tensor.get_device()}" if tensor.device.type == "cuda" else "host"


def _home(name: str, tensor: Any, memory: str) -> _Home:
    sharded = _is_dtensor(tensor)
    local = (tensor.to_local() if sharded else tensor).detach()
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
    own: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
    shapes: dict[str, list[int]],
    same: dict[str, str],
    strict: bool,
) -> tuple[list[str], list[str]]:
    """What torch says of a file with tensors of these shapes.

    But for what is `given`, it gets the module's own, and copies them to themselves.
    """

    def stand_in(name: str, shape: list[int]) -> torch.Tensor:
        if name in given:
            return given[name]
        tensor = own.get(name)
        # A single number may have been saved with a dimension.
        fits = tensor is not None and (list(tensor.shape) == shape or (tensor.dim() == 0 and shape == [1]))
        return tensor if tensor is not None and fits else torch.empty(shape, device="meta")

    file = {name: stand_in(name, shape) for name, shape in shapes.items()}
    # A name is there too if another of the same tensor is.
    file |= {name: own[name] for name, kept in same.items() if kept in shapes and name not in file}
    keys = module.load_state_dict(file, strict=strict)
    return list(keys.missing_keys), list(keys.unexpected_keys)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but memory that can be filled."""
    return type(tensor) is torch.Tensor and tensor.device.type in ("cpu", "cuda") and _is_strided(tensor)


def _takes_bytes(tensor: torch.Tensor, code: str) -> bool:
    """Whether a file's bytes are the tensor's, as they are."""
    as_it_reads = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return _is_plain(tensor) and as_it_reads and tensor.dtype == _tensors.DTYPES.get(code)


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
