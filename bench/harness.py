"""Steps that cannot hang, and a table of what they found.

A suite is a list of steps. Each has a time limit of its own within the suite's, and what is known is written down after
each, so that a step which hangs or dies costs its own figures and no others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

TAIL = 4000


class StepError(Exception):
    """A step that could not be carried out; the message is for the report."""


@dataclass
class Done:
    """A program that ended, or was ended."""

    code: int | None
    seconds: float
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        """The one object on standard output of a program that must have succeeded."""
        try:
            value = json.loads(self.stdout)
        except ValueError:
            value = None
        if self.code != 0 or not isinstance(value, dict):
            told = value.get("error", {}).get("message") if isinstance(value, dict) else None
            raise StepError(f"status {self.code}: {told or (self.stderr or self.stdout).strip()[-300:]}")
        return value


def run(command: Sequence[str | Path], timeout: float, env: dict[str, str] | None = None) -> Done:
    """Runs a program to its end, or kills it and all that it started when its time is up."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=max(timeout, 0.1))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            stdout, stderr = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            # A process that the kernel does not let go of: leave it behind rather than wait with it.
            stdout, stderr = "", ""
        stderr += f"\nkilled after {timeout:.0f} s"
        code = None
    return Done(code, time.perf_counter() - begun, stdout, stderr)


@dataclass(frozen=True)
class Bar:
    """What a figure is held against: at least, or at most, so much."""

    what: str
    bar: float
    at_least: bool
    unit: str = ""

    def holds(self, figure: float) -> bool:
        return figure >= self.bar if self.at_least else figure <= self.bar

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bar:g}"


class Suite:
    """One suite under way: its time, its rows, its file."""

    def __init__(self, name: str, seconds: float, out: Path, facts: dict[str, Any]) -> None:
        self.name, self.out = name, out
        self.deadline = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.data: dict[str, Any] = {}
        self.facts = facts

    def left(self, limit: float) -> float:
        """So many seconds, or what the suite has left."""
        return min(limit, self.deadline - time.monotonic())

    def run(self, command: Sequence[str | Path], limit: float, env: dict[str, str] | None = None) -> Done:
        seconds = self.left(limit)
        if seconds < 1:
            raise StepError("no time is left in this suite")
        return run(command, seconds, env)

    def step(self, name: str, work: Callable[[], None]) -> bool:
        """Does one piece of work; whatever it raises becomes a failed row and ends nothing else."""
        begun, failure = time.monotonic(), None
        say(f"{self.name}: {name} …")
        try:
            if self.left(1e9) < 1:
                raise StepError("no time is left in this suite")
            work()
        except StepError as error:
            failure = str(error)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        seconds = time.monotonic() - begun
        self.steps.append({"step": name, "seconds": round(seconds, 2), "failure": failure})
        if failure is not None:
            self.add(name, verdict="FAIL", note=failure)
        say(f"{self.name}: {name}: {'failed: ' + failure if failure else 'done'} ({seconds:.1f} s)")
        self.write()
        return failure is None

    def add(self, what: str, figure: float | None = None, unit: str = "", verdict: str = "", note: str = "") -> None:
        self.rows.append({"what": what, "figure": figure, "unit": unit, "bar": "", "verdict": verdict, "note": note})

    def hold(self, bar: Bar, figure: float, note: str = "") -> None:
        """Adds a figure that is held against a bar."""
        verdict = "PASS" if bar.holds(figure) else "FAIL"
        self.rows.append(
            {"what": bar.what, "figure": figure, "unit": bar.unit, "bar": str(bar), "verdict": verdict, "note": note}
        )

    def check(self, what: str, holds: bool, trouble: str = "", note: str = "") -> None:
        self.add(what, verdict="PASS" if holds else "FAIL", note=note if holds else trouble)

    def write(self) -> None:
        text = json.dumps(
            {"suite": self.name, "facts": self.facts, "rows": self.rows, "steps": self.steps, "data": self.data},
            indent=1,
        )
        whole = self.out / f"{self.name}.json"
        part = whole.with_suffix(".part")
        part.write_text(text)
        part.replace(whole)

    def table(self) -> list[str]:
        cells = [["WHAT", "FIGURE", "", "BAR", "", "NOTE"]]
        for row in self.rows:
            figure = "" if row["figure"] is None else f"{row['figure']:.4g}"
            cells.append(
                [row["what"], figure, row["unit"], row["bar"], row["verdict"], row["note"].replace("\n", " ")[:160]]
            )
        widths = [max(len(line[column]) for line in cells) for column in range(5)]
        return [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[5]]).rstrip() for line in cells
        ]

    def failed(self) -> bool:
        return not self.rows or any(row["verdict"] == "FAIL" for row in self.rows)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(figures: Sequence[float]) -> str:
    """The figures' range, for a note."""
    return f"median of {len(figures)}, {min(figures):.4g} to {max(figures):.4g}" if figures else ""


def middle(figures: Sequence[float]) -> float:
    if not figures:
        raise StepError("nothing was measured")
    return median(figures)
