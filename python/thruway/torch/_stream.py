"""Streaming: the tensors of a model one after another, while those behind them are on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from thruway import _progress, _select
from thruway._errors import InvalidInputError
from thruway._flight import Flight, Part, Window
from thruway._thruway import Model, Receipt
from thruway.torch import _tensors

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]

# Enough that the drive and the link never wait for the next window, and little beside any GPU's memory.
_BUDGET_BYTES = 1 << 30


class Opened:
    """Models that were opened together.

    Raises:
        InvalidInputError: a tensor stands in two of them.
    """

    def __init__(self, paths: Paths, memory: str, path: str) -> None:
        listed = [paths] if isinstance(paths, str | PathLike) else list(paths)
        self.memory = memory
        self.models = [Model(one, memory, path) for one in listed]
        self.entries: dict[str, Any] = {}
        self._model_of: dict[str, int] = {}
        for number, model in enumerate(self.models):
            for entry in model.entries():
                if (other := self._model_of.setdefault(entry[0], number)) != number:
                    both = f"{listed[other]} and {listed[number]}"
                    raise InvalidInputError(f"the tensor {entry[0]!r} stands in two of the models: {both}")
                self.entries[entry[0]] = entry

    def parts(self, names: _select.Names = None, shard: _select.Shard | None = None) -> list[Part]:
        """What is wanted of each model, if anything is."""
        parts = [Part(model, []) for model in self.models]
        for one in wanted_of(self.entries, names, shard):
            parts[self._model_of[one.name]].wanted.append(one)
        return [part for part in parts if part.wanted]


def wanted_of(entries: Mapping[str, Any], names: _select.Names, shard: _select.Shard | None) -> list[_select.Wanted]:
    """Which tensors are wanted, in the order of their bytes, and which part of each."""
    chosen = _select.chosen(entries, names)
    shapes = {name: _tensors.shape_of(*entries[name][1:3]) for name in chosen} if shard else {}
    cuts, wanted = _select.cuts(shapes, shard, entries), []
    for name in chosen:
        _, code, shape, _, start, end = entries[name]
        narrowed = None
        if name in cuts:
            dimension, first, last = cuts[name]
            # Two of the format's F4 are one element of torch's.
            each = shape[dimension] // shapes[name][dimension] if shape[dimension] else 1
            narrowed = (dimension, first * each, last * each)
        wanted.append(_select.Wanted(name, code, narrowed, _select.part_bytes(end - start, shape, narrowed)))
    return wanted


def converts(source: torch.dtype, dtype: torch.dtype | None) -> bool:
    """Whether tensors are to be converted: those of floating-point numbers are, but for pairs of 4-bit ones."""
    return dtype not in (None, source) and source.is_floating_point and source != _tensors.DTYPES.get("F4")


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor in another dtype, if it is to be converted."""
    return tensor.to(dtype) if converts(tensor.dtype, dtype) else tensor


def check_dtype(dtype: Any) -> None:
    """Raises for what numbers cannot be converted to."""
    numbers = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != _tensors.DTYPES.get("F4")
    if dtype is not None and not numbers:
        raise InvalidInputError(f"dtype is one of torch's floating-point dtypes, not {dtype!r}")


def stream(
    paths: Paths,
    device: str | int | torch.device = "cpu",
    *,
    names: _select.Names = None,
    shard: _select.Shard | None = None,
    dtype: torch.dtype | None = None,
    device_budget_bytes: int | None = None,
    path: str = "auto",
    receipt: Callable[[Receipt], object] | None = None,
    progress: _progress.Progress = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Loads tensors one after another, and hands each over while the next are on the way.

    Args:
        paths: a file, a directory of shards or an index, or a list of these.
        device: where to.
        names: the tensors that are wanted, or a function that picks them by name; all by default.
        shard: of tensors by name, or by the end of their names, the part that a rank needs: (dimension, rank, world).
            Only that part is read, and what lies in small gaps between its rows.
        dtype: what floating-point tensors are converted to.
        device_budget_bytes: the most memory that tensors under way take, 1 GiB by default. Those of a window, which is
            half of it at most, count until the first of the next is asked for.
        path: which way the bytes go: "auto", "staged" or "cached".
        receipt: called with what all loads did, at the end.
        progress: `True` shows it on stderr; a function is called now and then with the bytes handed over so far.

    Yields:
        A name and its tensor, in the order of the bytes. Tensors own their memory; small ones share some of 2 MiB.

    Raises:
        InvalidInputError: a name, a shard or a budget that cannot be; said before anything is read.
    """
    if device_budget_bytes is not None and (type(device_budget_bytes) is not int or device_budget_bytes < 1):
        raise InvalidInputError(f"device_budget_bytes is a number of bytes, not {device_budget_bytes!r}")
    check_dtype(dtype)
    memory, target = _tensors.place(device)
    opened = Opened(paths, memory, path)
    tensors = streamed(
        opened,
        names=names,
        shard=shard,
        dtype=dtype,
        device_budget_bytes=device_budget_bytes,
        receipt=receipt,
        progress=progress,
    )
    return tensors if target is None else ((name, tensor.to(target)) for name, tensor in tensors)


def streamed(
    opened: Opened,
    *,
    names: _select.Names = None,
    shard: _select.Shard | None = None,
    dtype: torch.dtype | None = None,
    device_budget_bytes: int | None = None,
    receipt: Callable[[Receipt], object] | None = None,
    progress: _progress.Progress = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """`stream`, of models that are open."""
    parts = opened.parts(names, shard)
    flight = _flight(parts, opened.memory, dtype, device_budget_bytes)
    total = sum(one.nbytes for part in parts for one in part.wanted)
    return _handed_over(flight, dtype, total, receipt, progress)


def _flight(parts: list[Part], memory: str, dtype: torch.dtype | None, device_budget_bytes: int | None) -> Flight:
    """Deals what is wanted into windows of half the budget."""

    def takes(one: _select.Wanted) -> int:
        """What it takes of a GPU: torch rounds up to 512 bytes. While it is converted both copies are there."""
        source = _tensors.dtype_of(one.name, one.dtype)
        copy = one.nbytes // source.itemsize * dtype.itemsize if dtype and converts(source, dtype) else 0
        return sum(-(-nbytes // 512) * 512 for nbytes in (one.nbytes, copy))

    budget = device_budget_bytes or _BUDGET_BYTES
    for one in (one for part in parts for one in part.wanted if takes(one) > budget):
        if device_budget_bytes is not None:
            raise InvalidInputError(
                f"{one.name!r} takes {takes(one)} bytes, more than a device_budget_bytes of {budget}"
            )
        budget = takes(one)
    return Flight(_tensors, parts, memory, budget, takes)


def _handed_over(
    flight: Flight,
    dtype: torch.dtype | None,
    total: int,
    receipt: Callable[[Receipt], object] | None,
    progress: _progress.Progress,
) -> Iterator[tuple[str, torch.Tensor]]:
    seconds, cpu, moved = time.perf_counter(), time.process_time(), 0
    receipts: list[Receipt] = []
    before: Window | None = None
    with contextlib.ExitStack() as stack:
        stack.callback(flight.cancel)
        tell = stack.enter_context(_progress.shown(progress, total))
        while (under_way := flight.next()) is not None:
            window, tensors, told = under_way
            receipts.append(told)
            for name in list(tensors):
                moved += tensors[name].nbytes
                yield name, cast(tensors.pop(name), dtype)
                # The caller asks for another, so it has let go of the one before, unless it keeps it.
                if before is not None:
                    flight.release(before)
                    before = None
                if tell is not None:
                    tell(moved)
            before = window
    if receipt is not None:
        receipt(Receipt.joined(receipts, time.perf_counter() - seconds, time.process_time() - cpu))
