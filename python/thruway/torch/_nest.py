"""torch's tensors in a state.

Tensors that overlap in memory are stored once, and come back as views of one storage. What is stored is one of them, if
it covers the others, so that it stands in the file under its own name and shape; else it is the bytes that they span.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from thruway._errors import InvalidInputError, UnsupportedError
from thruway._nest.common import Stored
from thruway.torch import _tensors

_BY_NAME = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}

# A dtype of each size in which torch copies anything bit by bit.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def check(tensor: torch.Tensor) -> None:
    """Raises for a tensor that cannot be saved."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        if type(tensor).__name__ == "DTensor":
            raise UnsupportedError(f"a {kind} is part of a tensor: save such states with thruway.torch.dcp")
        raise UnsupportedError(f"there is no place for a {kind}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise UnsupportedError("sparse and nested tensors have no place in safetensors files: save their parts")
    if tensor.is_quantized:
        raise UnsupportedError("quantized tensors are saved as their int_repr(), scale and zero point")
    if tensor.device.type == "meta":
        raise UnsupportedError("a meta tensor has no bytes")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UnsupportedError("a tensor inside of a torch.func transform has no bytes of its own")
    try:
        _tensors.check_memory("it", tensor)
    except InvalidInputError as error:
        raise UnsupportedError(str(error)) from None


def node(value: Any) -> Any:
    """The JSON of a value of torch's that is no tensor, if it is one."""
    if isinstance(value, torch.dtype):
        return {"!torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"!torch.device": str(value)}
    if isinstance(value, torch.Size):
        return {"!torch.Size": list(value)}
    return None


def value(tag: str, body: Any) -> Any:
    """The value with this JSON."""
    if tag == "!torch.dtype":
        return _dtype(body)
    try:
        if tag == "!torch.device" and isinstance(body, str):
            return torch.device(body)
        if tag == "!torch.Size":
            return torch.Size(_numbers(body))
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    raise ValueError("nothing is called so")


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str):
        raise ValueError("the name of a dtype is text")
    if name not in _BY_NAME:
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {name!r}")
    return _BY_NAME[name]


def _numbers(body: Any) -> list[int]:
    if not isinstance(body, list) or not all(type(one) is int and 0 <= one < 1 << 63 for one in body):
        raise ValueError("these are no lengths")
    return body


class _Held(NamedTuple):
    """A tensor of a state: its number, itself and the bytes of its storage that it spans."""

    number: int
    tensor: torch.Tensor
    start: int
    end: int


def stored(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[Stored]:
    """How tensors are stored."""
    flags = {number: _flags(tensor) for number, tensor in tensors}
    storages: dict[tuple[torch.device, int], list[_Held]] = {}
    made: list[Stored] = []
    elsewhere: dict[int, torch.Tensor] = {}
    for number, tensor in tensors:
        plain = tensor.detach()
        if plain.device.type not in ("cpu", "cuda"):
            plain = elsewhere.setdefault(id(tensor), plain.cpu())
        plain = plain.resolve_conj().resolve_neg()
        if not plain.numel():
            made.append(_one([_Held(number, torch.empty_like(plain, memory_format=torch.contiguous_format), 0, 0)]))
            continue
        start = _start(plain)
        held = _Held(number, plain, start, start + _span(plain.shape, plain.stride()) * plain.itemsize)
        storages.setdefault((plain.device, plain.untyped_storage().data_ptr()), []).append(held)
    for of_storage in storages.values():
        made.extend(_together(group) for group in _overlapping(of_storage))
    devices = {number: tensor.device for number, tensor in tensors if tensor.device.type != "cpu"}
    for one in made:
        if one.owner in devices:
            one.notes["device"] = str(devices[one.owner])
        for number, how in one.leaves:
            how.update(flags[number])
    return made


def _flags(tensor: torch.Tensor) -> dict[str, Any]:
    flags: dict[str, Any] = {"parameter": True} if isinstance(tensor, torch.nn.Parameter) else {}
    return flags | ({"requires_grad": True} if tensor.requires_grad else {})


def _start(tensor: torch.Tensor) -> int:
    """The byte of its storage at which a tensor begins."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first one to the last one."""
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def _overlapping(tensors: list[_Held]) -> Iterator[list[_Held]]:
    """The tensors of one storage, as groups that have no byte in common."""
    group: list[_Held] = []
    end = 0
    for held in sorted(tensors, key=lambda one: (one.start, one.number)):
        if group and held.start >= end:
            yield group
            group = []
        group.append(held)
        end = max(end, held.end) if len(group) > 1 else held.end
    yield group


def _together(group: list[_Held]) -> Stored:
    """How tensors that overlap are stored."""
    group = sorted(group, key=lambda one: one.number)
    first = group[0].tensor
    layouts = {(one.tensor.dtype, one.tensor.shape, one.tensor.stride(), one.start) for one in group}
    if len(layouts) == 1 and _is_plain(_unexpanded(first)):
        return _one(group)
    start, end = min(one.start for one in group), max(one.end for one in group)
    for one in group:
        covers = (one.start, one.end) == (start, end) and one.tensor.nbytes == end - start
        if covers and _is_plain(one.tensor):
            return _views(one.number, one.tensor, one.tensor, group, start)
    # None covers all: what is stored is the memory that they span.
    dtype, size = first.dtype, first.itemsize
    if any(one.tensor.dtype != dtype or (one.start - start) % size for one in group) or dtype not in _tensors.CODES:
        dtype, size = torch.uint8, 1
    widest = max((one.tensor for one in group), key=lambda one: one.untyped_storage().nbytes())
    count = (end - start) // size
    memory = _over(widest, dtype, start, [count], [1])
    return _views(group[0].number, memory, None, group, start)


def _one(group: list[_Held]) -> Stored:
    """How a tensor is stored that is alone, or the same as all others."""
    tensor = group[0].tensor
    kept = _unexpanded(tensor)
    stored_as, notes = packed(kept)
    how = {} if kept.shape == tensor.shape else {"expand": list(tensor.shape)}
    return Stored(stored_as, group[0].number, notes, [(one.number, dict(how)) for one in group])


def _views(owner: int, memory: torch.Tensor, whole: torch.Tensor | None, group: list[_Held], start: int) -> Stored:
    """How tensors are stored that are views of what is stored, of which one may be all."""
    stored_as, notes = packed(memory)
    leaves = []
    for one in group:
        same = whole is not None and (one.tensor.dtype, one.tensor.shape, one.tensor.stride(), one.start) == (
            whole.dtype,
            whole.shape,
            whole.stride(),
            start,
        )
        how: dict[str, Any] = {}
        if not same:
            how["view"] = [one.start - start, list(one.tensor.shape), list(one.tensor.stride())]
            if one.tensor.dtype != memory.dtype:
                how["dtype"] = str(one.tensor.dtype).removeprefix("torch.")
        leaves.append((one.number, how))
    if any(one.tensor.dtype != stored_as.dtype for one in group):
        # In a file, and so in memory that a file is mapped to, elements begin where those of its own dtype may.
        notes["align"] = max(one.tensor.itemsize for one in group)
    return Stored(stored_as, owner, notes, leaves)


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each dimension once that repeats the same elements."""
    for dimension, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if length > 1 and stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether no two of its elements are provably the same one."""
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return False
            reach += stride * (length - 1)
    return True


def _dense_strides(tensor: torch.Tensor) -> list[int]:
    """Strides in the same order of dimensions, without gaps."""
    strides, step = [0] * tensor.dim(), 1
    order = sorted(range(tensor.dim()), key=lambda one: (tensor.stride(one), -one))
    # Where a dimension of one element is does not matter, and anything may stand there.
    for dimension in [one for one in order if tensor.shape[one] != 1]:
        strides[dimension] = step
        step *= tensor.shape[dimension]
    for dimension in range(tensor.dim() - 1, -1, -1):
        if tensor.shape[dimension] == 1:
            strides[dimension] = tensor.stride(dimension) if tensor.numel() == 1 else max(tensor.stride(dimension), 1)
    return strides


def _over(
    tensor: torch.Tensor, dtype: torch.dtype, start: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Another tensor over the storage of one, from a byte of it on."""
    made = torch.empty(0, dtype=dtype, device=tensor.device)
    with torch.no_grad():
        return made.set_(tensor.untyped_storage(), start // dtype.itemsize, list(shape), list(strides))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as elements that torch can copy, whatever the dtype."""
    start = _start(tensor)
    return _over(tensor, _RAW[tensor.itemsize], start, tensor.shape, tensor.stride())


def packed(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The tensor as a file can hold it, and what the file does not say of it."""
    notes: dict[str, Any] = {}
    if not tensor.is_contiguous():
        notes["strides"] = _dense_strides(tensor)
        raw = _raw(tensor).contiguous()
        tensor = _over(raw, tensor.dtype, 0, raw.shape, raw.stride())
        if notes["strides"] == list(tensor.stride()):
            del notes["strides"]
    has_code = tensor.dtype in _tensors.CODES and (tensor.dim() or _tensors.CODES[tensor.dtype] != "F4")
    if has_code:
        return tensor, notes
    notes |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return _over(tensor, torch.uint8, _start(tensor), [tensor.nbytes], [1]), notes


def restored(loaded: Any, notes: dict[str, Any]) -> torch.Tensor:
    """A tensor as it was, from what was stored."""
    tensor = loaded if isinstance(loaded, torch.Tensor) else torch.from_numpy(loaded)
    tensor = tensor.detach()
    if "dtype" in notes:
        dtype, shape = _dtype(notes["dtype"]), _numbers(notes["shape"])
        if tensor.dtype != torch.uint8 or tensor.nbytes != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{tensor.nbytes} bytes are no {dtype} of the shape {shape}")
        tensor = _aligned(tensor.contiguous().reshape(-1), dtype.itemsize)
        tensor = _over(tensor, dtype, _start(tensor), shape, torch.empty(shape, device="meta").stride())
    if "strides" in notes:
        strides = _numbers(notes["strides"])
        if len(strides) != tensor.dim() or (tensor.numel() and _span(tensor.shape, strides) != tensor.numel()):
            raise ValueError(f"the strides {strides} leave gaps in the shape {list(tensor.shape)}")
        raw = _raw(tensor)
        dense = torch.empty_strided(raw.shape, strides, dtype=raw.dtype, device=raw.device).copy_(raw)
        tensor = _over(dense, tensor.dtype, 0, dense.shape, dense.stride())
    return _aligned(tensor, max(_numbers([notes["align"]]))) if "align" in notes else tensor


def _aligned(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The same at an address at which elements of this size may begin."""
    start = _start(tensor)
    return tensor.clone() if size and (start % size or tensor.data_ptr() % size) else tensor


def part(whole: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """A tensor of the state."""
    tensor = whole.detach()
    if "view" in how:
        tensor = _view(tensor, how)
    if "expand" in how:
        tensor = tensor.expand(_numbers(how["expand"]))
    if how.get("parameter") is True:
        return torch.nn.Parameter(tensor, requires_grad=how.get("requires_grad") is True)
    return tensor.requires_grad_() if how.get("requires_grad") is True else tensor


def _view(whole: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    start, shape, strides = how["view"]
    shape, strides, (start,) = _numbers(shape), _numbers(strides), _numbers([start])
    dtype = _dtype(how["dtype"]) if "dtype" in how else whole.dtype
    # Not what the storage has: it may hold other tensors, behind and before this one.
    if start + _span(shape, strides) * dtype.itemsize > whole.nbytes or len(shape) != len(strides):
        raise ValueError(f"a view of the shape {shape} at byte {start} is not within {whole.nbytes} bytes")
    start += _start(whole)
    if start % dtype.itemsize:
        raise ValueError(f"no {dtype} begins at byte {start}")
    return _over(whole, dtype, start, shape, strides)
