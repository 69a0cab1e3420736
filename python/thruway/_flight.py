"""Loads under way one behind the other, with a bound on the memory that they take together.

What is wanted is dealt into windows. While the tensors of one are handed over the next ones load:

    window 1   [ load ][ handed over ]
    window 2      [ load  ]          [ handed over ]
    window 3                [ load ]               [ handed over ]
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from thruway._open import Bytes, Load
from thruway._select import Wanted, windows
from thruway._thruway import Model, Receipt


class Part(NamedTuple):
    """What is wanted of a model."""

    model: Model
    wanted: list[Wanted]


def load_of(
    framework: ModuleType,
    part: Part,
    memory: str,
    progress: Callable[[int], object] | None = None,
    into: Sequence[tuple[str, Bytes]] = (),
) -> Load:
    """Begins to load it."""
    select = [one.name for one in part.wanted if one.narrowed is None]
    slices = [(one.name, *one.narrowed) for one in part.wanted if one.narrowed is not None]
    return Load(framework, part.model, memory, select, slices, into=into, progress=progress)


class Window(NamedTuple):
    """Tensors that are loaded together, and the bytes that they take."""

    part: Part
    takes: int


class Flight:
    """The windows that are under way, as many as the budget holds, and those that wait. Half of it holds one."""

    def __init__(
        self, framework: ModuleType, parts: list[Part], memory: str, budget: int, takes: Callable[[Wanted], int]
    ) -> None:
        self._framework, self._memory, self._room = framework, memory, budget
        self._waiting = collections.deque(
            Window(Part(part.model, window), sum(map(takes, window)))
            for part in parts
            for window in windows(part.wanted, budget // 2, takes)
        )
        self._loads: collections.deque[tuple[Window, Load]] = collections.deque()

    def begin(self) -> None:
        """Begins what there is room for; if nothing is under way, the next whatever room there is."""
        while self._waiting and (not self._loads or self._waiting[0].takes <= self._room):
            window = self._waiting.popleft()
            self._room -= window.takes
            load = load_of(self._framework, window.part, self._memory)
            self._loads.append((window, load))
            load.place(len(window.part.wanted))

    def next(self) -> tuple[Window, dict[str, Any], Receipt] | None:
        """Waits for the oldest: what was loaded, and what that did. After a failure it can be asked for again."""
        self.begin()
        if not self._loads:
            return None
        window, load = self._loads[0]
        try:
            tensors, receipt = load.wait()
        except BaseException:
            self._loads.popleft()
            self._room += window.takes
            self._waiting.appendleft(window)
            raise
        self._loads.popleft()
        return window, tensors, receipt

    def release(self, window: Window) -> None:
        """Its memory is free."""
        self._room += window.takes
        self.begin()

    def cancel(self) -> None:
        """Stops all, and waits until nothing moves any more."""
        self._waiting.clear()
        while self._loads:
            self._loads.popleft()[1].cancel()
