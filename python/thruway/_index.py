"""Indexing a tensor that is not in memory: which part of it is meant."""

from __future__ import annotations

import operator
from typing import Any

from thruway._errors import BadIndexError

# Of one dimension: the elements from start to stop, every step-th, or a single one (then the dimension goes).
Part = tuple[int, int, int] | int


def parts_of(index: Any, shape: list[int]) -> list[Part]:
    """What `index` means for a tensor of this shape, one part for each dimension. Bounds follow numpy's rules.

    Raises:
        BadIndexError: more indices than dimensions, an index out of bounds, a step below 1, or what is no index.
    """
    indices = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, one in enumerate(indices) if one is Ellipsis]
    if len(ellipses) > 1:
        raise BadIndexError("an index can only have a single ellipsis ('...')")
    if len(indices) - len(ellipses) > len(shape):
        raise BadIndexError(f"too many indices: {len(indices)} for a tensor with {len(shape)} dimensions")
    missing = [slice(None)] * (len(shape) - len(indices) + len(ellipses))
    if ellipses:
        indices[ellipses[0] : ellipses[0] + 1] = missing
    else:
        indices += missing
    return [_part(one, length, dimension) for dimension, (one, length) in enumerate(zip(indices, shape, strict=True))]


def _part(one: Any, length: int, dimension: int) -> Part:
    if isinstance(one, slice):
        try:
            step = 1 if one.step is None else operator.index(one.step)
            start, stop, _ = one.indices(length) if step > 0 else (0, 0, 0)
        except TypeError:
            raise BadIndexError(f"the bounds of a slice are integers: {one}") from None
        if step < 1:
            raise BadIndexError(f"Slice step must be a positive integer, got {step}")
        # Frameworks hold steps in 64 bits.
        return start, max(start, stop), min(step, max(length, 1))
    if isinstance(one, list):
        if not one:
            return 0, 0, 1
        raise BadIndexError("lists of indices are not supported: load the tensor and index it")
    if isinstance(one, bool) or getattr(one, "ndim", None) or "bool" in str(getattr(one, "dtype", "")):
        raise BadIndexError("masks and arrays of indices are not supported: load the tensor and index it")
    try:
        number = operator.index(one)
    except TypeError:
        raise BadIndexError(f"a tensor is indexed by integers, slices and '...', not by {type(one).__name__}") from None
    if number < -length:
        raise BadIndexError(f"Invalid index {number} for dimension {dimension} of size {length}")
    if number >= length:
        raise BadIndexError(f"index {number} out of bounds for tensor dimension #{dimension} of size {length}")
    return number % length


def narrowest(parts: list[Part], shape: list[int]) -> tuple[int, int, int] | None:
    """The outermost dimension of which not all is wanted, and the range of it that holds what is; `None` if all is."""
    for dimension, (part, length) in enumerate(zip(parts, shape, strict=True)):
        start, stop = (part, part + 1) if isinstance(part, int) else part[:2]
        if (start, stop) != (0, length):
            return dimension, start, stop
    return None


def within(parts: list[Part], narrowed: tuple[int, int, int] | None) -> tuple[int | slice, ...]:
    """The index that takes the wanted part out of what `narrowest` says was read."""

    def one(dimension: int, part: Part) -> int | slice:
        moved = narrowed[1] if narrowed is not None and narrowed[0] == dimension else 0
        if isinstance(part, int):
            return part - moved
        return slice(part[0] - moved, part[1] - moved, part[2])

    return tuple(one(dimension, part) for dimension, part in enumerate(parts))
