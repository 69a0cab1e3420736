"""Which tensors of a model are wanted, and which part of each. Pure: it sees no file and no framework."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thruway._errors import InvalidInputError

# Of each dimension of a tensor that a shard is cut from: which, which rank's, of how many.
Shard = Mapping[str, tuple[int, int, int]]
Names = Iterable[str] | Callable[[str], bool] | None

# Among so many names the nearest is found in 0.1 s.
_NEAR_AMONG = 1000


class Wanted(NamedTuple):
    """A tensor, or of one dimension a range, in elements of the format."""

    name: str
    dtype: str
    narrowed: tuple[int, int, int] | None
    nbytes: int


def chosen(names: Collection[str], wanted: Names) -> list[str]:
    """Those of `names` that `wanted` lists or accepts, in their own order; all if it is `None`.

    Raises:
        InvalidInputError: a name is listed that is not there.
    """
    if wanted is None:
        return list(names)
    if callable(wanted):
        return [name for name in names if wanted(name)]
    if isinstance(wanted, str):
        raise InvalidInputError(f"names is a list of names, or a function that picks them, not the text {wanted!r}")
    try:
        listed = set(wanted)
    except TypeError:
        raise InvalidInputError(
            f"names is a list of names, or a function that picks them, not {wanted!r:.100}"
        ) from None
    found = [name for name in names if name in listed]
    if missing := sorted(map(str, listed.difference(found))):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        named = ", ".join(missing[:5]) + more
        raise InvalidInputError(f"there are no tensors with these names: {named}", hint=near(missing[0], names))
    return found


def near(wanted: Any, names: Collection[str]) -> str | None:
    """A hint for a name that is not there: those that are most like it, if finding them takes no time that shows."""
    if not isinstance(wanted, str) or len(names) > _NEAR_AMONG:
        return None
    from difflib import get_close_matches

    found = get_close_matches(wanted, names, n=3)
    return f"there is {' and '.join(map(repr, found))}" if found else None


def share(length: int, rank: int, world: int) -> tuple[int, int]:
    """A rank's part of `length` elements, as `torch.chunk` deals them: equal parts, of which the last are shorter."""
    each = -(-length // world)
    return min(rank * each, length), min((rank + 1) * each, length)


def _checked(key: str, cut: Any) -> tuple[int, int, int]:
    try:
        dimension, rank, world = map(operator.index, cut)
    except (TypeError, ValueError):
        raise InvalidInputError(f"shard[{key!r}] is (dimension, rank, world), not {cut!r}") from None
    if not 0 <= rank < world:
        raise InvalidInputError(f"shard[{key!r}]: there is no rank {rank} of {world}")
    return dimension, rank, world


def resolved(
    shapes: Mapping[str, list[int]], shard: Shard | None, others: Iterable[str] = ()
) -> dict[str, tuple[int, int, int]]:
    """For each tensor of which only a shard is wanted which: its dimension, rank and world.

    A key of `shard` is a tensor's name, or the end of it after a dot: "q_proj.weight" is that of every layer. The
    longest key counts. `others` are names of tensors that a key may be meant for, too.

    Raises:
        InvalidInputError: a key fits no name, a dimension that is not there, a rank that is not.
    """
    if shard is None:
        return {}
    if not isinstance(shard, Mapping):
        raise InvalidInputError(f"shard is a dict of (dimension, rank, world), not {type(shard).__name__}")
    checked = {key: _checked(key, cut) for key, cut in shard.items()}
    unused, found = set(checked), {}
    for name, shape in shapes.items():
        pieces = name.split(".")
        endings = (".".join(pieces[start:]) for start in range(len(pieces)))
        key = next((ending for ending in endings if ending in checked), None)
        if key is None:
            continue
        unused.discard(key)
        dimension, rank, world = checked[key]
        if not -len(shape) <= dimension < len(shape):
            raise InvalidInputError(
                f"{name} has {len(shape)} dimensions, and shard[{key!r}] cuts dimension {dimension}"
            )
        found[name] = (dimension % len(shape), rank, world)
    unused = {key for key in unused if not any(f".{name}".endswith(f".{key}") for name in others)}
    if unused:
        hint = "a key is a tensor's name or whole parts of its end: 'q_proj.weight', not 'proj.weight'"
        raise InvalidInputError(
            f"no tensor has a name that shard gives: {', '.join(sorted(map(repr, unused)))}", hint=hint
        )
    return found


def cuts(
    shapes: Mapping[str, list[int]], shard: Shard | None, others: Iterable[str] = ()
) -> dict[str, tuple[int, int, int]]:
    """Likewise its dimension, and where the shard starts and stops in it."""
    found = resolved(shapes, shard, others).items()
    return {name: (dimension, *share(shapes[name][dimension], rank, world)) for name, (dimension, rank, world) in found}


def part_bytes(nbytes: int, shape: list[int], narrowed: tuple[int, int, int] | None) -> int:
    """The bytes of a part of a tensor that has `nbytes`."""
    if narrowed is None:
        return nbytes
    dimension, first, last = narrowed
    return nbytes // max(shape[dimension], 1) * (last - first)


def cut(tensor: Any, shape: list[int], narrowed: tuple[int, int, int]) -> Any:
    """A view of a part of a tensor which has this shape in the format."""
    dimension, first, last = narrowed
    # Two of the format's F4 are one element of torch's.
    each = shape[dimension] // tensor.shape[dimension] if shape[dimension] else 1
    return tensor[(*[slice(None)] * dimension, slice(first // each, last // each))]


def expert_names(names: Sequence[str], rank: int, world: int, pattern: str = r"\.experts\.(\d+)\.") -> list[str]:
    """The names without the experts of other ranks: each rank has neighbours, as many as the others or fewer.

    Args:
        names: those of a model with a mixture of experts.
        rank: whose experts are wanted.
        world: how many ranks there are.
        pattern: finds an expert's number in a name.
    """
    _checked("experts", (0, rank, world))
    if isinstance(names, str):
        raise InvalidInputError(f"names is a list of names, not the text {names!r:.100}")
    try:
        numbers = {name: int(found[1]) for name in names if (found := re.search(pattern, name))}
    except (re.error, IndexError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"the pattern {pattern!r} finds no expert's number as its first group: {error}"
        ) from None
    first, last = share(max(numbers.values(), default=-1) + 1, rank, world)
    return [name for name in names if name not in numbers or first <= numbers[name] < last]


def windows(wanted: Iterable[Wanted], most_bytes: int, takes: Callable[[Wanted], int]) -> list[list[Wanted]]:
    """Tensors dealt into windows that take at most so many bytes, in order. A larger tensor is a window by itself."""
    dealt: list[list[Wanted]] = []
    room = 0
    for one in wanted:
        if not dealt or takes(one) > room:
            dealt.append([])
            room = most_bytes
        room -= takes(one)
        dealt[-1].append(one)
    return dealt
