"""Progress: how much of a load has moved, for people."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from thruway._errors import InvalidInputError

# True shows it on stderr; a function is called now and then with the bytes moved so far.
Progress = bool | Callable[[int], object] | None

_BETWEEN_SECONDS = 0.1
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@contextlib.contextmanager
def shown(progress: Progress, total: int) -> Iterator[Callable[[int], object] | None]:
    """What is to be called with the bytes moved so far: the caller's function, one that tells it on stderr, or none.

    Raises:
        InvalidInputError: it is neither a bool nor a function.
    """
    if progress is not True:
        if progress and not callable(progress):
            raise InvalidInputError(f"progress is True, False or a function, not {type(progress).__name__}")
        yield progress or None
        return
    line = _Line(total)
    try:
        yield line.tell
    finally:
        line.end()


class _Line:
    """A line of stderr that is written again and again; to a file, once at the end."""

    def __init__(self, total: int) -> None:
        self._total, self._begun, self._told, self._moved = total, time.monotonic(), 0.0, 0

    def tell(self, moved: int) -> None:
        self._moved, now = moved, time.monotonic()
        if now - self._told >= _BETWEEN_SECONDS and sys.stderr.isatty():
            self._told = now
            sys.stderr.write(f"\r{self._text()}")
            sys.stderr.flush()

    def end(self) -> None:
        sys.stderr.write(f"\r{self._text()}\n" if sys.stderr.isatty() else f"{self._text()}\n")

    def _text(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        unit, name = next((one for one in _UNITS if self._total >= one[0]), _UNITS[-1])
        return f"{self._moved / unit:.2f} of {self._total / unit:.2f} {name}, {self._moved / seconds / 1e9:.2f} GB/s "
