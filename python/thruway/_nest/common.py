"""What both ways through a state have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

FORMAT, VERSION = "thruway nest", 1

# JSON inside a checkpoint's manifest may be nested 128 deep (the limit of the parser there), and some of that is around
# and below a value.
LEVELS_MAX = 100

FACTORIES: dict[str, Any] = {
    one.__name__: one for one in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}


class Leaf(NamedTuple):
    """A tensor or an array of a state."""

    value: Any
    path: tuple[str, ...]
    # What the JSON says of it, filled in when it is known what is stored.
    node: dict[str, Any]


class Stored(NamedTuple):
    """A tensor or an array as it is stored, and the leaves that are made of it."""

    value: Any
    # The number of the leaf that it is named after.
    owner: int
    # What a file cannot say of it.
    notes: dict[str, Any]
    # The number of each leaf, and how it is had of the stored one if it is not just that.
    leaves: list[tuple[int, dict[str, Any]]]


def text_of(key: Any) -> str:
    """A key as text."""
    try:
        return repr(key)
    except ValueError:
        # Python writes out no integers of very many digits.
        return f"a very large {type(key).__name__}"


def at(where: str, key: Any) -> str:
    """A place in a state, for messages."""
    text = text_of(key)
    return f"{where}[{text if len(text) <= 80 else text[:77] + '...'}]"


def short(where: str) -> str:
    """A place that is not too long to be read."""
    return where if len(where) <= 400 else f"{where[:200]} … {where[-190:]}"
