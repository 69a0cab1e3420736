"""Restoring: of each group what is wanted, to where it belongs, and then the state put together again."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from thruway import _nest, _thruway
from thruway._errors import (
    ChangedError,
    InvalidInputError,
    MalformedError,
    MismatchError,
    NoSpaceError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from thruway._open import Bytes, Load
from thruway.torch import _opened, _tensors
from thruway.torch._opened import Part
from thruway.torch._ranks import OUTCOME, Party

_T = TypeVar("_T")

# What is about one checkpoint, so that another may be better.
_DAMAGE = (NotFoundError, MalformedError, ChangedError, MismatchError, StorageError, UnsupportedError)


# Given the checkpoint of a step, what is wanted of it.
Take = Callable[[_opened.Checkpoint], _T]


def newest(
    native: _thruway.Checkpointer, party: Party | None, step: int | None, fallback: bool, take: Take[_T]
) -> tuple[int, _T]:
    """The step, or the newest, and what is taken of it; with `fallback` the newest that is whole, on all ranks."""
    if party is not None:
        return _agreed(native, party, step, fallback, take)
    steps = _steps(native, step)
    while True:
        step = steps.pop()
        try:
            return step, take(_opened.checkpoint(native, step, None))
        except _DAMAGE as error:
            if not fallback or not steps or isinstance(error, NoSpaceError):
                raise
            warnings.warn(f"step {step} is damaged, taking step {steps[-1]}: {error}", RuntimeWarning, stacklevel=4)


def _steps(native: _thruway.Checkpointer, step: int | None) -> list[int]:
    """The steps up to this one, which must be there, oldest first."""
    steps = [one for one in native.steps() if step is None or one <= step]
    if step is not None and step not in steps:
        raise NotFoundError(f"there is no checkpoint of step {step}", hint="`steps()` tells which there are")
    if not steps:
        raise NotFoundError("there is no checkpoint here")
    return steps


def _agreed(
    native: _thruway.Checkpointer, party: Party, step: int | None, fallback: bool, take: Take[_T]
) -> tuple[int, _T]:
    """The same on all ranks: the first says which step, and it is the one if all could take it."""
    with party.turn() as ranks:
        steps = _steps(native, step) if party.rank == 0 else []
        for turn in itertools.count():
            if party.rank == 0:
                ranks.put(
                    f"step-{turn}", json.dumps({"asked": [step, fallback], "step": steps.pop(), "left": len(steps)})
                )
            told = json.loads(ranks.wait(f"step-{turn}", 0))
            if told["asked"] != [step, fallback]:
                theirs = f"rank 0 restores step {told['asked'][0]} with fallback={told['asked'][1]}"
                raise InvalidInputError(f"{theirs}, and rank {party.rank} step {step} with fallback={fallback}")
            damage, taken = "", None
            try:
                taken = take(_opened.checkpoint(native, told["step"], party))
            except _DAMAGE as error:
                if not fallback or not told["left"] or isinstance(error, NoSpaceError):
                    raise
                damage = f"rank {party.rank}: {error}"
            ranks.put(f"took-{turn}-{party.rank}", damage)
            if party.rank == 0:
                all_damage = [ranks.wait(f"took-{turn}-{rank}", rank) for rank in range(party.count)]
                found = next(filter(None, all_damage), "")
                ranks.put(f"all-{turn}", found)
                if not found:
                    ranks.put(OUTCOME, "restored")
            damage = ranks.wait(f"all-{turn}", 0)
            if not damage:
                return told["step"], cast(_T, taken)
            message = f"step {told['step']} is damaged, taking the one before: {damage}"
            warnings.warn(message, RuntimeWarning, stacklevel=5)
    raise AssertionError


def state(checkpoint: _opened.Checkpoint, device: Any, only: Collection[str] | None, encoder: _nest.Encoding) -> Any:
    """The state, or some keys of it."""
    parts = checkpoint.parts(only)
    wanted = [_nest.wanted(part.structure, only=keys) for part, keys in parts]
    on_gpu = any((was or "cpu") != "cpu" for one in wanted for names in one.values() for was in names.values())
    states = []
    for (part, keys), one in zip(parts, wanted, strict=True):
        homes: dict[str, dict[str, Any]] = {}
        for group, names in one.items():
            for name, was in names.items():
                stays = device is None or (on_gpu and (was or "cpu") == "cpu")
                homes.setdefault(group, {})[name] = part.home(was) if stays else device
        states.append(_nest.decode(part.structure, load(part, homes), encoder, only=keys))
    return checkpoint.joined(states)


def load(
    opened: Part, homes: Mapping[str, Mapping[str, Any]], into: Mapping[tuple[str, str], Bytes] | None = None
) -> dict[str, dict[str, Any]]:
    """The tensors of each group by name, each where it is to be: a device."""
    into, loaded = into or {}, dict[str, dict[str, Any]]()
    for group, names in homes.items():
        loaded[group] = {}
        places: dict[Any, list[str]] = {}
        for name, device in names.items():
            places.setdefault(device, []).append(name)
        for device, chosen in places.items():
            memory, target = _tensors.place(device)
            given = [(name, into[group, name]) for name in chosen if (group, name) in into]
            tensors = _begin(opened, group, memory, chosen, given).wait()[0]
            loaded[group] |= {name: _tensors.to(tensor, target) for name, tensor in tensors.items()}
    return loaded


def _begin(opened: Part, group: str, memory: str, names: list[str], into: Sequence[tuple[str, Bytes]]) -> Load:
    checkpoint = opened.native.open(opened.step, memory)

    def begin(*, slices: Any, progress: Any, **options: Any) -> _thruway.Loading:
        return checkpoint.load(opened.group(group), **options)

    model = cast(_thruway.Model, SimpleNamespace(load=begin))
    return Load(_tensors, model, memory, names, [], into=into)


def into(checkpoint: _opened.Checkpoint, objects: Mapping[str, Any], encoder: _nest.Encoding) -> dict[str, Any]:
    """Restores the objects in place, key by key, so that no more than one is in memory twice."""
    values: dict[str, Any] = {}
    for key, value in objects.items():
        ((opened, _),) = checkpoint.parts([key])
        wanted = _nest.wanted(opened.structure, only=[key])
        homes = {group: {name: opened.home(was) for name, was in names.items()} for group, names in wanted.items()}
        given: dict[tuple[str, str], Bytes] = {}
        if isinstance(value, torch.nn.Module):
            given = _own_memory(opened, value, key, homes)
        elif value is not None:
            # Whoever takes them copies them to where his own lie.
            homes = {group: dict.fromkeys(names, _device_of(value)) for group, names in homes.items()}
        with torch.no_grad():
            tensors = load(opened, homes, given)
            restored = _nest.decode(opened.structure, tensors, encoder, only=[key])[key]
            if value is None:
                values[key] = restored
            else:
                _put(value, restored, f"objects[{key!r}]")
    return values


def _device_of(value: Any) -> str:
    """The device of the only tensor that is to be filled; else they come by way of the CPU."""
    return str(value.device) if isinstance(value, torch.Tensor) and value.device.type == "cuda" else "cpu"


def _own_memory(
    opened: Part, module: torch.nn.Module, key: str, homes: dict[str, dict[str, Any]]
) -> dict[tuple[str, str], Bytes]:
    """The memory of a module's tensors that takes the bytes of stored ones as they are.

    All go to the device of theirs.
    """
    entries = opened.native.open(opened.step, "host").entries(opened.group(key)) if key in homes else []
    stored = {name: (code, shape) for name, code, shape in entries}
    given: dict[tuple[str, str], Bytes] = {}
    own = module.state_dict(keep_vars=True)
    for name in homes.get(key, {}):
        tensor = own.get(name)
        if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        if tensor.device.type not in ("cpu", "cuda"):
            continue
        homes[key][name] = str(tensor.device)
        code, shape = stored[name]
        fits = _tensors.DTYPES.get(code) == tensor.dtype and _tensors.shape_of(code, shape) == list(tensor.shape)
        if fits and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and tensor.numel():
            memory = "host" if tensor.device.type == "cpu" else f"cuda:{tensor.get_device()}"
            given[key, name] = (memory, tensor.data_ptr(), tensor.nbytes, tensor)
    return given


def _put(target: Any, value: Any, where: str) -> None:
    """Gives an object its state."""
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(value)
    elif isinstance(target, torch.Tensor):
        if not isinstance(value, torch.Tensor) or value.shape != target.shape:
            raise InvalidInputError(f"{where} has another shape than what was saved")
        target.copy_(value)
    elif isinstance(target, Mapping) and isinstance(value, Mapping):
        if missing := [name for name in target if name not in value]:
            raise InvalidInputError(f"{where}: nothing was saved under {missing[0]!r}")
        for name, one in target.items():
            _put(one, value[name], f"{where}[{name!r}]")
    elif isinstance(target, list | tuple) and isinstance(value, list | tuple) and len(target) == len(value):
        for number, (one, other) in enumerate(zip(target, value, strict=True)):
            _put(one, other, f"{where}[{number}]")
    else:
        hint = "give `None` for it to have its value"
        raise InvalidInputError(f"{where} is nothing that can be restored in place", hint=hint)
