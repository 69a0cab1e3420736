"""From a state to JSON."""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from thruway._errors import InvalidInputError, UnsupportedError
from thruway._nest.common import FACTORIES, LEVELS_MAX, Leaf, at, short, text_of


class Walk:
    """One way through a state, which leaves JSON behind."""

    def __init__(self, encoder: Callable[[Any], Any] | None) -> None:
        self._encoder = encoder
        self.leaves: list[Leaf] = []
        # The containers that the present value lies in.
        self._around: set[int] = set()

    def node(self, value: Any, path: tuple[str, ...], where: str, level: int) -> Any:
        """The JSON of a value, which stands so many levels deep."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _PLAIN:
            return _PLAIN[kind](value)
        if level > LEVELS_MAX:
            raise InvalidInputError(f"{short(where)} is nested too deep to be saved")
        if kind in _CONTAINERS:
            if id(value) in self._around:
                raise InvalidInputError(f"{short(where)} contains itself")
            self._around.add(id(value))
            made = _CONTAINERS[kind](self, value, path, where, level)
            self._around.discard(id(value))
            return made
        made, reason = self._of_framework(value, path)
        return made if reason is None else self._encoded(value, reason, path, where, level)

    def _of_framework(self, value: Any, path: tuple[str, ...]) -> tuple[Any, str | None]:
        """The JSON of what is numpy's or torch's, or why there is none."""
        reason = f"there is no place for a {type(value).__module__}.{type(value).__qualname__}"
        try:
            if (numpy := sys.modules.get("numpy")) is not None:
                from thruway._nest import arrays

                if isinstance(value, numpy.ndarray):
                    arrays.check(value)
                    return self._leaf("!array", value, path), None
                if (made := arrays.node(value)) is not None:
                    return made, None
            if (torch := sys.modules.get("torch")) is not None:
                from thruway.torch import _nest

                if isinstance(value, torch.Tensor):
                    _nest.check(value)
                    return self._leaf("!tensor", value, path), None
                if (made := _nest.node(value)) is not None:
                    return made, None
        except UnsupportedError as error:
            reason = str(error)
        return None, reason

    def _leaf(self, tag: str, value: Any, path: tuple[str, ...]) -> dict[str, Any]:
        node: dict[str, Any] = {tag: None}
        self.leaves.append(Leaf(value, path, node))
        return node

    def _encoded(self, value: Any, reason: str, path: tuple[str, ...], where: str, level: int) -> Any:
        made = NotImplemented if self._encoder is None else self._encoder(value)
        if made is NotImplemented:
            hint = "leave it out, turn it into plain values, or pass an encoder that does"
            raise InvalidInputError(f"{short(where)} cannot be saved: {reason}", hint=hint)
        return {"!encoded": self.node(made, path, where, level + 1)}

    def items(self, values: Iterable[Any], path: tuple[str, ...], where: str, level: int) -> list[Any]:
        """The JSON of values in their order."""
        return [
            self.node(value, (*path, str(number)), f"{where}[{number}]", level + 1)
            for number, value in enumerate(list(values))
        ]

    def pairs(self, mapping: dict[Any, Any], path: tuple[str, ...], where: str, level: int) -> Any:
        """The JSON of what a dict holds: an object if all keys are text."""
        if all(type(key) is str and not _has_half_pair(key) for key in mapping):
            return {key: self.node(value, (*path, key), at(where, key), level + 1) for key, value in mapping.items()}
        return [
            [self._key(key, where, level + 2), self.node(value, (*path, _named(key)), at(where, key), level + 2)]
            for key, value in mapping.items()
        ]

    def _key(self, key: Any, where: str, level: int) -> Any:
        before = len(self.leaves)
        node = self.node(key, (), f"a key of {where}", level)
        if len(self.leaves) > before:
            raise InvalidInputError(f"a key of {short(where)} is a tensor or an array, which would not be found again")
        return node


def _dict(walk: Walk, value: Any, path: tuple[str, ...], where: str, level: int) -> Any:
    if any(type(key) is not str or key.startswith("!") or _has_half_pair(key) for key in value):
        return {"!dict": walk.pairs(value, path, where, level + 1)}
    return walk.pairs(value, path, where, level)


def _ordered(walk: Walk, value: Any, path: tuple[str, ...], where: str, level: int) -> Any:
    extra = dict(vars(value))
    pairs = walk.pairs(value, path, where, level + 1)
    if not extra:
        return {"!OrderedDict": pairs}
    # The versions of its modules, which `Module.state_dict` leaves on what it returns.
    metadata = walk.node(extra.pop("_metadata", None), (*path, "_metadata"), f"{where}._metadata", level + 2)
    if extra:
        raise InvalidInputError(f"{short(where)} has attributes, which cannot be saved: {', '.join(sorted(extra))}")
    return {"!state_dict": [pairs, metadata]}


def _default(walk: Walk, value: Any, path: tuple[str, ...], where: str, level: int) -> Any:
    made = value.default_factory
    name = None if made is None else getattr(made, "__name__", "")
    if name is not None and FACTORIES.get(name) is not made:
        hint = "make it a dict first, or let it make a built-in type"
        raise InvalidInputError(f"{short(where)} cannot be saved: it makes its values with {made!r}", hint=hint)
    return {"!defaultdict": [name, walk.pairs(value, path, where, level + 2)]}


def _set(walk: Walk, value: Any, path: tuple[str, ...], where: str, level: int) -> Any:
    # Sorted, since two equal sets may be in two orders.
    nodes = [walk._key(one, where, level + 2) for one in value]
    return {f"!{type(value).__name__}": sorted(nodes, key=json.dumps)}


_CONTAINERS: dict[type, Callable[[Walk, Any, tuple[str, ...], str, int], Any]] = {
    dict: _dict,
    list: lambda walk, value, path, where, level: walk.items(value, path, where, level),
    tuple: lambda walk, value, path, where, level: {"!tuple": walk.items(value, path, where, level + 1)},
    OrderedDict: _ordered,
    defaultdict: _default,
    Counter: lambda walk, value, path, where, level: {"!Counter": walk.pairs(value, path, where, level + 1)},
    deque: lambda walk, value, path, where, level: {
        "!deque": [value.maxlen, walk.items(value, path, where, level + 2)]
    },
    set: _set,
    frozenset: _set,
}


def _int(value: int) -> Any:
    return value if -(1 << 63) <= value < 1 << 64 else {"!int": hex(value)}


def _float(value: float) -> Any:
    # By its bits, since a NaN has some to say.
    return value if math.isfinite(value) else {"!float": struct.pack(">d", value).hex()}


def _text(value: str) -> Any:
    return {"!str": value.encode("utf-8", "surrogatepass").hex()} if _has_half_pair(value) else value


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    str: _text,
    complex: lambda value: {"!complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"!bytes": base64.b64encode(value).decode()},
    bytearray: lambda value: {"!bytearray": base64.b64encode(value).decode()},
    range: lambda value: {"!range": [_int(one) for one in (value.start, value.stop, value.step)]},
}


def _has_half_pair(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _named(key: Any) -> str:
    """A key as part of a tensor's name."""
    text = key if isinstance(key, str) else text_of(key)
    return text.encode("utf-8", "backslashreplace").decode()
