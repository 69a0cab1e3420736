"""Tensors of an opened model that load while the program does something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Any

from thruway import _index
from thruway._errors import InvalidInputError, ThruwayError
from thruway._flight import Flight, Part
from thruway._select import Wanted, part_bytes
from thruway._thruway import Model

# How much is loaded ahead of what is taken: as much as it takes to keep drives and links busy.
_BUDGET_BYTES = 1 << 30


class PrefetchLoader:
    """Tensors on their way, which are taken by name or one after another. At most 1 GiB is loaded ahead of that.

    Made by `safe_open.prefetch`. Each is handed out once; a tensor that is needed again is to be had from the handle.
    """

    def __init__(
        self,
        framework: ModuleType,
        model: Model,
        memory: str,
        device: Any,
        entries: Mapping[str, tuple[str, str, list[int], int, int, int]],
        plan: Mapping[str, Any] | None,
    ) -> None:
        if plan is not None and not isinstance(plan, Mapping):
            raise InvalidInputError(f"a plan is a dict of names and indices, not {type(plan).__name__}")
        planned = dict.fromkeys(entries) if plan is None else plan
        if unknown := [name for name in planned if name not in entries]:
            raise InvalidInputError(f"File does not contain tensor {unknown[0]}")
        self._framework, self._device = framework, device
        # What is cut out of what is read, if that is not all of it.
        self._indices: dict[str, tuple[int | slice, ...] | None] = {}
        wanted = []
        for name, (_, code, shape, _, start, end) in entries.items():
            if name not in planned:
                continue
            narrowed, self._indices[name] = _narrowed(framework, code, shape, planned[name])
            wanted.append(Wanted(name, code, narrowed, part_bytes(end - start, shape, narrowed)))
        self._ready: dict[str, Any] = {}
        # Several threads may take tensors; one of them waits for what is under way.
        self._turn = threading.Lock()
        self._flight = Flight(framework, [Part(model, wanted)], memory, _BUDGET_BYTES, lambda one: one.nbytes)
        self._flight.begin()

    def names(self) -> list[str]:
        """The names of those that were not taken yet, in the order of their bytes."""
        return list(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, name: str) -> Any:
        """A tensor, or the part of it that was planned; waits until it is there.

        Raises:
            InvalidInputError: it was not planned, or was taken already.
        """
        with self._turn:
            while name in self._indices and name not in self._ready:
                self._arrive()
            if name not in self._indices:
                raise InvalidInputError(f"tensor {name} was not planned, or was already delivered")
            tensor, index = self._ready.pop(name), self._indices.pop(name)
        tensor = self._framework.to(tensor, self._device)
        return tensor if index is None else self._framework.packed(tensor[index])

    def _arrive(self) -> None:
        under_way = self._flight.next()
        if under_way is None:
            raise ThruwayError("the loader is closed")
        window, tensors, _ = under_way
        self._ready.update(tensors)
        self._flight.release(window)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Names and tensors in the order of their bytes; those that were taken are passed over."""
        for name in self.names():
            if name in self._indices:
                yield name, self.take(name)

    def close(self) -> None:
        """Stops what is under way and lets go of what was not taken. What was taken stays."""
        with self._turn:
            self._flight.cancel()
            self._ready.clear()

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _narrowed(
    framework: ModuleType, code: str, shape: list[int], index: Any
) -> tuple[tuple[int, int, int] | None, tuple[int | slice, ...] | None]:
    """Which part is read of a tensor, and which is then cut out of that."""
    if index is None:
        return None, None
    lengths = framework.shape_of(code, shape)
    parts = _index.parts_of(index, lengths)
    # Two elements of the format in one of torch's: what lies between two of those cannot be told apart.
    narrowed = _index.narrowest(parts, lengths) if lengths == shape else None
    return narrowed, _index.within(parts, narrowed)
