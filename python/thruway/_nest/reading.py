"""From JSON to a state."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from thruway._errors import InvalidInputError, MalformedError, ThruwayError, UnsupportedError
from thruway._nest.common import FACTORIES, FORMAT, LEVELS_MAX, VERSION, at, short


def malformed(where: str, what: str) -> MalformedError:
    return MalformedError(f"the structure of this state is not valid at {short(where)}: {what}")


def parsed(structure: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key is given twice")
        return made

    def refused(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        whole = json.loads(structure, object_pairs_hook=unique, parse_constant=refused)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the structure of this state is not valid: {error}") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise MalformedError("this is not the structure of a state")
    if whole.get("version") != VERSION:
        raise UnsupportedError(
            f"the structure of this state has version {whole.get('version')!r}, and this program knows {VERSION}",
            hint="update thruway",
        )
    if whole.keys() != {"format", "version", "state", "stored"} or not isinstance(whole["stored"], dict):
        raise MalformedError("the structure of this state is not valid: it has other parts than it should")
    return whole


def tagged(node: dict[str, Any]) -> tuple[str | None, Any]:
    """What an object is, and the rest; nothing for a dict."""
    if len(node) == 1:
        ((tag, body),) = node.items()
        if tag.startswith("!"):
            return tag, body
    return None, node


def chosen(root: Any, only: Collection[str] | None) -> Any:
    """The state with these of its outermost keys."""
    if only is None:
        return root
    tag, body = tagged(root) if isinstance(root, dict) else ("", None)
    inner = body[0] if tag == "!state_dict" and isinstance(body, list) and body else body
    if tag not in (None, "!dict", "!OrderedDict", "!state_dict"):
        raise InvalidInputError("this state is no dict, so that there are no keys of it to choose from")
    pairs = list(inner.items()) if isinstance(inner, dict) else [pair for pair in inner or [] if isinstance(pair, list)]
    missing = set(only) - {key for key, *_ in pairs if isinstance(key, str)}
    if missing:
        raise InvalidInputError(f"this state has no {', '.join(sorted(map(repr, missing)))}")
    kept = [[key, *rest] for key, *rest in pairs if isinstance(key, str) and key in only]
    return {"!OrderedDict" if tag == "!OrderedDict" else "!dict": kept}


def reference(body: Any, where: str) -> tuple[str, str, dict[str, Any]]:
    """The group and the name of a tensor, and how a value is had of it."""
    if isinstance(body, list) and len(body) in (2, 3) and all(isinstance(part, str) for part in body[:2]):
        how = body[2] if len(body) == 3 else {}
        if isinstance(how, dict):
            return body[0], body[1], how
    raise malformed(where, "a tensor is a group and a name")


def notes_of(stored: dict[str, Any], group: str, name: str) -> dict[str, Any]:
    of_group = stored.get(group, {})
    notes = of_group.get(name, {}) if isinstance(of_group, dict) else None
    if not isinstance(notes, dict):
        raise MalformedError("the structure of this state is not valid: what it notes of tensors is no object")
    return notes


class Reader:
    """One way through the JSON of a state, which leaves the state behind."""

    def __init__(
        self,
        decode: Callable[[Any], Any] | None,
        tensors: Mapping[str, Mapping[str, Any]],
        stored: dict[str, Any],
    ) -> None:
        self._decode, self._tensors, self._stored = decode, tensors, stored
        # Tensors as they were before they were stored, by group and name.
        self._whole: dict[tuple[str, str], Any] = {}

    def value(self, node: Any, where: str, level: int) -> Any:
        """The value of a piece of JSON."""
        if level > 2 * LEVELS_MAX:
            raise malformed(where, "it is nested too deep")
        if isinstance(node, list):
            return self.items(node, where, level)
        if not isinstance(node, dict):
            if isinstance(node, float) and not math.isfinite(node):
                raise malformed(where, "a number is out of range")
            return node
        tag, body = tagged(node)
        if tag is None:
            return self.pairs(node, where, level)
        if tag in _NESTS:
            return _NESTS[tag](self, body, where, level)
        try:
            return _plain(tag, body)
        except (ValueError, TypeError, OverflowError, AttributeError, struct.error) as error:
            raise malformed(where, f"{tag}: {error}") from None

    def items(self, nodes: Any, where: str, level: int, count: int | None = None) -> list[Any]:
        """The values of a list."""
        if not isinstance(nodes, list) or (count is not None and len(nodes) != count):
            raise malformed(where, "there is no such list as there should be")
        return [self.value(node, f"{where}[{number}]", level + 1) for number, node in enumerate(nodes)]

    def pairs(self, body: Any, where: str, level: int) -> dict[Any, Any]:
        """The keys and values of what is some kind of dict."""
        if isinstance(body, dict):
            return {key: self.value(node, at(where, key), level + 1) for key, node in body.items()}
        if not isinstance(body, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in body):
            raise malformed(where, "there are no pairs of keys and values where they should be")
        made: dict[Any, Any] = {}
        for key_node, node in body:
            key = self.hashed(key_node, where, level + 2)
            if key in made:
                raise malformed(where, f"{at('the key ', key)} is there twice")
            made[key] = self.value(node, at(where, key), level + 2)
        return made

    def hashed(self, node: Any, where: str, level: int) -> Any:
        """The value of a key or of a member of a set."""
        value = self.value(node, f"a key of {where}", level)
        try:
            hash(value)
        except TypeError:
            raise malformed(where, "a key is of a type that no key can be of") from None
        return value

    def members(self, nodes: Any, where: str, level: int) -> set[Any]:
        """The values of a set."""
        if not isinstance(nodes, list):
            raise malformed(where, "there is no list where one should be")
        return {self.hashed(node, where, level + 1) for node in nodes}

    def encoded(self, node: Any, where: str, level: int) -> Any:
        """What the user's encoder makes of a value."""
        if self._decode is None:
            hint = "pass the encoder that it was saved with"
            raise InvalidInputError(f"{short(where)} was encoded by an encoder of the user's", hint=hint)
        return self._decode(self.value(node, where, level + 1))

    def leaf(self, body: Any, where: str, is_array: bool) -> Any:
        """A tensor or an array."""
        group, name, how = reference(body, where)
        if name not in self._tensors.get(group, {}):
            raise MalformedError(f"{short(where)} is the tensor {name!r} of the group {group!r}, which is not there")
        framework = _framework(is_array)
        try:
            if (group, name) not in self._whole:
                notes = notes_of(self._stored, group, name)
                self._whole[group, name] = framework.restored(self._tensors[group][name], notes)
            return framework.part(self._whole[group, name], how)
        except ThruwayError:
            raise
        except (KeyError, ValueError, TypeError, OverflowError, AttributeError, RuntimeError) as error:
            raise malformed(where, f"it does not fit the tensor {name!r} of {group!r}: {error}") from None


def _framework(is_array: bool) -> Any:
    if is_array:
        from thruway._nest import arrays

        return arrays
    from thruway.torch import _nest

    return _nest


def _state_dict(reader: Reader, body: Any, where: str, level: int) -> Any:
    pairs, metadata = _two(body, where)
    made: Any = OrderedDict(reader.pairs(pairs, where, level + 2))
    made._metadata = reader.value(metadata, f"{where}._metadata", level + 2)
    return made


def _default_dict(reader: Reader, body: Any, where: str, level: int) -> Any:
    name, pairs = _two(body, where)
    if name is not None and (not isinstance(name, str) or name not in FACTORIES):
        raise malformed(where, f"{name!r} makes no values of a defaultdict")
    return defaultdict(None if name is None else FACTORIES[name], reader.pairs(pairs, where, level + 2))


def _deque(reader: Reader, body: Any, where: str, level: int) -> Any:
    length, nodes = _two(body, where)
    values = reader.items(nodes, where, level + 2)
    if length is not None and (type(length) is not int or not len(values) <= length < 1 << 63):
        raise malformed(where, "the greatest length of a deque is a number, and not less than its length")
    return deque(values, length)


def _counter(reader: Reader, body: Any, where: str, level: int) -> Any:
    made: Any = Counter()
    # Not by its constructor, which would count what is given.
    dict.update(made, reader.pairs(body, where, level + 1))
    return made


def _two(body: Any, where: str) -> list[Any]:
    if not isinstance(body, list) or len(body) != 2:
        raise malformed(where, "there are no two values where they should be")
    return body


_NESTS: dict[str, Callable[[Reader, Any, str, int], Any]] = {
    "!tensor": lambda reader, body, where, level: reader.leaf(body, where, is_array=False),
    "!array": lambda reader, body, where, level: reader.leaf(body, where, is_array=True),
    "!encoded": lambda reader, body, where, level: reader.encoded(body, where, level),
    "!tuple": lambda reader, body, where, level: tuple(reader.items(body, where, level + 1)),
    "!set": lambda reader, body, where, level: reader.members(body, where, level + 1),
    "!frozenset": lambda reader, body, where, level: frozenset(reader.members(body, where, level + 1)),
    "!dict": lambda reader, body, where, level: reader.pairs(body, where, level + 1),
    "!OrderedDict": lambda reader, body, where, level: OrderedDict(reader.pairs(body, where, level + 1)),
    "!state_dict": _state_dict,
    "!defaultdict": _default_dict,
    "!Counter": _counter,
    "!deque": _deque,
}


def _plain(tag: str, body: Any) -> Any:
    """A value that holds no others."""
    if tag in _PLAIN:
        return _PLAIN[tag](body)
    if tag.startswith("!numpy."):
        from thruway._nest import arrays

        return arrays.value(tag, body)
    if tag.startswith("!torch."):
        from thruway.torch import _nest

        return _nest.value(tag, body)
    raise ValueError("nothing is called so")


def _number(node: Any) -> int:
    if isinstance(node, dict) and node.keys() == {"!int"}:
        return int(node["!int"], 16)
    if type(node) is not int:
        raise ValueError("this is no integer")
    return node


def _float(node: Any) -> float:
    if isinstance(node, dict) and node.keys() == {"!float"}:
        node = struct.unpack(">d", bytes.fromhex(node["!float"]))[0]
    if type(node) is not float:
        raise ValueError("this is no float")
    return node


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "!int": lambda body: _number({"!int": body}),
    "!float": lambda body: _float({"!float": body}),
    "!complex": lambda body: complex(*map(_float, body)),
    "!str": lambda body: bytes.fromhex(body).decode("utf-8", "surrogatepass"),
    "!bytes": lambda body: base64.b64decode(body, validate=True),
    "!bytearray": lambda body: bytearray(base64.b64decode(body, validate=True)),
    "!range": lambda body: range(*map(_number, body)),
}
