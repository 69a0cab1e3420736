"""A training state as tensors and text, and back.

A state is any nest of dicts, lists, tuples and the like that holds tensors, arrays and plain values. `encode` takes the
tensors and arrays out, by name, and describes all else as JSON; `decode` puts the state together again. Nothing is
pickled, and nothing that the JSON says is imported or called.

The JSON of a value is the value's own where JSON has it: `null`, truth values, text, lists, finite floats, integers of
64 bits, and dicts whose keys are text that does not begin with "!". Everything else is an object with one key, which
begins with "!" and says what it is:

    {"!tuple": [1, 2]}      {"!dict": [[3, "a key that is no text"]]}      {"!bytes": "base64"}
    {"!tensor": ["model", "layers.0.weight"]}          which tensor of which group, and if it is only part of it, which

The whole is `{"format": …, "version": 1, "state": …, "stored": …}`; `stored` notes for a tensor what its entry in a
safetensors file cannot say, such as its strides. A list or a dict that stands in two places of the state comes back as
two; tensors that shared memory share it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from thruway._nest import reading
from thruway._nest.common import FORMAT, VERSION, Leaf, Stored
from thruway._nest.writing import Walk

# The group of tensors that stand under no key of their own, and the name of one that is the whole state.
_NO_GROUP, _NO_NAME = "state", "tensor"


class Encoder(Protocol):
    """What turns values that have no place in a state into values that have, and back."""

    def encode(self, value: Any) -> Any:
        """Any nest that stands for the value, or `NotImplemented` to have it refused."""

    def decode(self, value: Any) -> Any:
        """The value that such a nest stands for."""


# An object, or its two functions.
Encoding = Encoder | tuple[Callable[[Any], Any], Callable[[Any], Any]] | None


class Nest(NamedTuple):
    """A state, taken apart."""

    # For each group its tensors and arrays by name, without gaps and with dtypes that safetensors files have.
    groups: dict[str, dict[str, Any]]
    # All else, as JSON.
    structure: str


def encode(state: Any, encoder: Encoding = None, *, grouped: bool = True) -> Nest:
    """Takes a state apart. Its tensors are not copied unless they have gaps or another device than CPUs and GPUs.

    Args:
        state: what is to be saved.
        encoder: for values of types that have no place in a state.
        grouped: groups tensors by the state's outermost keys, under which their names begin. Otherwise all are in one
            group, "", and their names begin with that key.

    Raises:
        InvalidInputError: a value that cannot be saved, with its path in the state.
    """
    walk = Walk(_functions(encoder)[0])
    root = walk.node(state, (), "state", 0)
    groups: dict[str, dict[str, Any]] = {}
    notes: dict[str, dict[str, Any]] = {}
    has_keys = isinstance(state, dict)
    for stored in sorted(_stored(walk.leaves), key=lambda one: one.owner):
        group, name = _place_of(walk.leaves[stored.owner].path, grouped, has_keys)
        tensors = groups.setdefault(group, {})
        name = _free(name, tensors)
        tensors[name] = stored.value
        if stored.notes:
            notes.setdefault(group, {})[name] = stored.notes
        for number, how in stored.leaves:
            node = walk.leaves[number].node
            (tag,) = node
            node[tag] = [group, name, how] if how else [group, name]
    whole = {"format": FORMAT, "version": VERSION, "state": root, "stored": notes}
    return Nest(groups, json.dumps(whole, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def decode(
    structure: str,
    tensors: Mapping[str, Mapping[str, Any]],
    encoder: Encoding = None,
    *,
    only: Collection[str] | None = None,
) -> Any:
    """Puts a state together again.

    Args:
        structure: of `encode`.
        tensors: for each group its tensors, or arrays, by name, as `wanted` lists them.
        encoder: the one that it was encoded with, if any.
        only: of a state that is a dict, the keys that are wanted.

    Raises:
        MalformedError: a structure that `encode` does not make, or one that these tensors do not fit.
    """
    whole = reading.parsed(structure)
    reader = reading.Reader(_functions(encoder)[1], tensors, whole["stored"])
    try:
        return reader.value(reading.chosen(whole["state"], only), "state", 0)
    except RecursionError:
        raise reading.malformed("state", "it is nested too deep") from None


def wanted(structure: str, *, only: Collection[str] | None = None) -> dict[str, dict[str, str | None]]:
    """For each group the tensors that `decode` needs, and the device that each was on; of numpy's arrays, `None`."""
    whole = reading.parsed(structure)
    found: dict[str, dict[str, str | None]] = {}
    waiting = [reading.chosen(whole["state"], only)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(reversed(node))
        elif isinstance(node, dict):
            tag, body = reading.tagged(node)
            if tag in ("!tensor", "!array"):
                group, name, _ = reading.reference(body, "state")
                device = reading.notes_of(whole["stored"], group, name).get("device", "cpu")
                if not isinstance(device, str):
                    raise reading.malformed("state", "a device is text")
                found.setdefault(group, {})[name] = device if tag == "!tensor" else None
            else:
                waiting.extend(reversed(list(node.values())))
    return found


def _functions(encoder: Encoding) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    if encoder is None or isinstance(encoder, tuple):
        return encoder or (None, None)
    return encoder.encode, encoder.decode


def _place_of(path: tuple[str, ...], grouped: bool, has_keys: bool) -> tuple[str, str]:
    """The group and the name of a tensor."""
    if not grouped:
        return "", ".".join(path) or _NO_NAME
    if has_keys and len(path) > 1:
        return path[0], ".".join(path[1:])
    return _NO_GROUP, ".".join(path) or _NO_NAME


def name_of(path: str) -> str:
    """A name for a tensor that files can hold."""
    return _free(path.encode("utf-8", "backslashreplace").decode(), ())


def _free(name: str, taken: Collection[str]) -> str:
    """The name, or if it is taken the first that is not. Safetensors headers have a use of their own for one."""
    number, free = 1, name
    while free in taken or free == "__metadata__":
        number += 1
        free = f"{name}~{number}"
    return free


def _stored(leaves: list[Leaf]) -> list[Stored]:
    numbered = list(enumerate(leaves))
    arrays = [(number, leaf.value) for number, leaf in numbered if "!array" in leaf.node]
    tensors = [(number, leaf.value) for number, leaf in numbered if "!tensor" in leaf.node]
    stored: list[Stored] = []
    if arrays:
        from thruway._nest import arrays as numpys

        stored += numpys.stored(arrays)
    if tensors:
        from thruway.torch import _nest

        stored += _nest.stored(tensors)
    return stored
