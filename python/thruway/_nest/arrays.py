"""numpy's arrays and scalars in a state."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from thruway import _arrays
from thruway._errors import UnsupportedError
from thruway._nest.common import Stored

# Dtypes whose name says all of them: of numbers, truth values, times, text and bytes.
_SIMPLE = re.compile(r"[<>|][biufcmMSU][0-9]+(\[[0-9A-Za-zμ/]+\])?")


def check(array: np.ndarray) -> None:
    """Raises for an array that cannot be saved."""
    if type(array) is not np.ndarray:
        raise UnsupportedError(f"there is no place for a {type(array).__module__}.{type(array).__qualname__}")
    _name_of(array.dtype)


def _name_of(dtype: np.dtype[Any]) -> str:
    if _SIMPLE.fullmatch(dtype.str):
        return dtype.str
    if dtype.name in _arrays.CODES:
        return dtype.name
    raise UnsupportedError(f"there is no place for arrays of {dtype}")


def _named(name: Any) -> np.dtype[Any]:
    """The dtype of such a name."""
    if isinstance(name, str) and _SIMPLE.fullmatch(name):
        return np.dtype(name)
    if isinstance(name, str) and name in _arrays.CODES:
        return _arrays.dtype_of(_arrays.CODES[name])
    raise ValueError(f"{name!r} is no dtype of numpy's")


def node(value: Any) -> Any:
    """The JSON of a value of numpy's that is no array, if it is one."""
    if isinstance(value, np.dtype):
        return {"!numpy.dtype": _name_of(value)}
    if isinstance(value, np.generic):
        # Only numpy's own scalars: a class made from one may hold more.
        if type(value) is not value.dtype.type:
            raise UnsupportedError(f"there is no place for a {type(value).__module__}.{type(value).__qualname__}")
        # Text of no length has bytes, though its dtype has none.
        return {"!numpy.scalar": [_name_of(value.dtype), value.tobytes()[: value.dtype.itemsize].hex()]}
    return None


def value(tag: str, body: Any) -> Any:
    """The value with this JSON."""
    if tag == "!numpy.dtype":
        return _named(body)
    if tag != "!numpy.scalar":
        raise ValueError("nothing is called so")
    name, raw = body
    dtype, data = _named(name), bytes.fromhex(raw)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype}")
    return np.frombuffer(data, dtype)[0] if data else dtype.type()


def stored(arrays: list[tuple[int, np.ndarray]]) -> list[Stored]:
    """How arrays are stored: each for itself."""
    return [_stored(number, array) for number, array in arrays]


def _stored(number: int, array: np.ndarray) -> Stored:
    notes: dict[str, Any] = {}
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        notes["order"] = "F"
    # The same without gaps; numpy would make an array of what has no dimensions.
    packed = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name not in _arrays.CODES or array.dtype.byteorder == ">":
        notes |= {"dtype": _name_of(array.dtype), "shape": list(array.shape)}
        packed = np.frombuffer(packed.tobytes(), np.uint8)
    return Stored(packed, number, notes, [(number, {})])


def restored(loaded: Any, notes: dict[str, Any]) -> np.ndarray:
    """An array as it was, from what was stored."""
    array = loaded if isinstance(loaded, np.ndarray) else _of_torch(loaded)
    if "dtype" in notes:
        dtype, shape = _named(notes["dtype"]), notes["shape"]
        if array.dtype != np.uint8 or array.size != dtype.itemsize * int(np.prod(shape, dtype=object)):
            raise ValueError(f"{array.nbytes} bytes are no {dtype} of the shape {shape}")
        # Of no bytes there is no view.
        array = array.view(dtype).reshape(shape) if array.size else np.zeros(shape, dtype)
    if notes.get("order") == "F":
        array = np.asfortranarray(array)
    return array


def part(whole: np.ndarray, how: dict[str, Any]) -> np.ndarray:
    """An array of the state."""
    if how:
        raise ValueError(f"an array is all of what is stored, and not {how}")
    return whole


def _of_torch(tensor: Any) -> np.ndarray:
    """A tensor as an array; on the CPU the two share their memory."""
    import torch

    from thruway.torch import _tensors

    packed = tensor.detach().cpu().contiguous()
    if packed.dtype not in _tensors.CODES:
        raise ValueError(f"numpy has no {packed.dtype}")
    dtype = _arrays.dtype_of(_tensors.CODES[packed.dtype])
    array: np.ndarray = packed.reshape(-1).view(torch.uint8).numpy()
    return array.view(dtype).reshape(packed.shape)
