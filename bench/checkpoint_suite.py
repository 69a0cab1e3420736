"""The suite of checkpoints: Thruway beside other software in one run, and what of it is held against bars.

bench/checkpoint.py measures; each system runs in a process of its own. First Thruway, which everything is held against;
then once each of the others; and for the time that is left a larger state, and the others again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_peers
import tables
from harness import Bar, StepError, Suite, middle, say, spread

HERE = Path(__file__).resolve().parent
# Of a state, at scale 1.
STATE_BYTES = 8e9
LARGE_BYTES = 32e9
SMALL_BYTES = 4e6
# The 1T `subset` of MLPerf Storage is about as much for each node.
NODE_BYTES = 140e9
NODE_GB_PER_S = 3.3
ROUNDS = 3
# Others again, so many times at most.
ROUNDS_OTHERS = 3
# The share of the time from save to save that the drive may be at work: a training that saves more than the drive takes
# waits for the drive, whoever saves.
DRIVE_SHARE = 0.7
# Of a drive, and of Python with torch and a GPU, before anything is known. They decide what is begun, and no figure.
GUESS_BYTES_PER_S = 2e9
START_SECONDS = 8

SAVE = Bar("synced save, of the O_DIRECT write beside it", 0.95, True)
TORCH_SAVE = Bar("synced save, times as fast as torch.save", 4, True)
DCP = Bar("synced save, times as fast as the best of DCP", 3, True)
NODE = Bar("140 GB at the measured rate", 45, False, "s")
RETURNS = Bar("save_async returns", 20, False, "ms")
STREAM_FREE = Bar("the stream is free after, of what the copies take at the limit GPU to host", 1.1, False)
ENDS = Bar("save_async is durable after, of the synced save beside it", 1.1, False)
STEPS = Bar("a step with saves in the background, of one without", 1.01, False)
RESTORE_CACHED = Bar("restore with checksums from the page cache, of the plain load's rate", 0.95, True)
RESTORE_COLD = Bar("restore with checksums from the drive, of the plain load's rate", 0.95, True)


@dataclass(frozen=True)
class System:
    label: str
    name: str
    # Saves in the background.
    background: bool = False


# The order in which they are measured: what a bar needs comes first.
OTHERS = (
    System("torch.save", "torch.save"),
    System("torch DCP, 16 threads", "dcp-16"),
    System("torch DCP, 4 threads", "dcp-4"),
    System("torch DCP, 1 thread", "dcp-1"),
    System("torch DCP async_save, pinned stager", "dcp-async-pinned", background=True),
    System("torch DCP async_save", "dcp-async", background=True),
    System("safetensors save_file", "safetensors"),
    System("kvikio, raw bytes", "kvikio"),
)
# These need a GPU.
NOT_ON_CPU = ("dcp-async-pinned", "kvikio")
ASYNC = f"{tables.OURS}, save_async"
NO_TIME = "no time was left"


class Checkpoints:
    """Everything in turn, each within the time that the suite has left."""

    def __init__(self, suite: Suite, place: Path, wheels: Path, own: Path, scale: float, device: str) -> None:
        self.suite, self.place, self.scale, self.device = suite, place, scale, device
        packages = place / "packages"
        run_peers.unpack(wheels, packages)
        run_peers.unpack(own, packages)
        self.python = run_peers.python_with_torch(None)
        self.env = run_peers.environment([packages], run_peers.cuda_libraries(self.python))
        self.systems: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        suite.data |= {"systems": self.systems, "device": device, "bytes": self.scaled(STATE_BYTES)}
        for label in (tables.OURS, ASYNC, *(system.label for system in OTHERS)):
            self.systems[label] = {"processes": [], "skipped": NO_TIME}

    def drive(self) -> None:
        self.suite.step("saves", self.saves)
        self.suite.step("training", self.training)
        self.suite.step("restores", self.restores)
        for system in OTHERS:
            self.other(system)
        self.held_against_others()
        # What is left of the time; a step is only begun if it is likely to be finished.
        if self.suite.left(1e9) > 3 * START_SECONDS + 2 * self.scaled(LARGE_BYTES) / self.rate():
            self.suite.step("a larger state", self.large)
        if self.suite.left(1e9) > 60:
            self.suite.step("training, the whole state", self.training_whole)
        for _ in range(1, ROUNDS_OTHERS):
            for system in OTHERS:
                if system.name in self.seconds and self.suite.left(1e9) > 1.5 * self.seconds[system.name] + 5:
                    self.other(system)
        self.held_against_others()
        for table in tables.checkpoint({"data": self.suite.data, "rows": []}):
            print("\n".join(table.plain()), flush=True)

    # ------------------------------------------------------------------------------ measuring

    def scaled(self, size: float) -> int:
        return max(int(SMALL_BYTES), round(size * self.scale))

    def measure(self, name: str, limit: float, *options: object) -> dict[str, Any]:
        command = [self.python, HERE / "checkpoint.py", name, self.place, "--device", self.device]
        return self.suite.run([*command, *map(str, options)], limit, self.env).json()

    def other(self, system: System) -> None:
        """One process of another system. That it cannot run is no fault of what is checked here."""
        entry, begun = self.systems[system.label], time.monotonic()
        if self.device == "cpu" and system.name in NOT_ON_CPU:
            entry["skipped"] = "it needs a GPU"
            return
        size = self.suite.data["bytes"]
        if self.suite.left(1e9) < START_SECONDS + size / GUESS_BYTES_PER_S:
            return
        try:
            entry["processes"].append(self.measure(system.name, 75, "--bytes", size))
            entry["skipped"] = None
            self.seconds[system.name] = time.monotonic() - begun
            outcome = "done"
        except StepError as error:
            outcome = entry["failure"] = str(error)
            if not entry["processes"]:
                entry["skipped"] = str(error)
        say(f"{self.suite.name}: {system.label}: {outcome} ({time.monotonic() - begun:.1f} s)")
        self.suite.write()

    def saves(self) -> None:
        size = self.suite.data["bytes"]
        told = self.measure("thruway", 120, "--bytes", size, "--repeat", ROUNDS, "--background")
        known = {key: value for key, value in told.items() if key not in ("runs", "background")}
        for label, runs in ((tables.OURS, told["runs"]), (ASYNC, told["background"])):
            self.systems[label] = {"processes": [{**known, "runs": runs}], "skipped": None}
        self.hold_save(SAVE, told)
        seconds = middle([run["seconds"] for run in told["runs"]]) * NODE_BYTES / told["bytes"]
        if middle(told["limits"]) >= NODE_GB_PER_S:
            self.suite.hold(NODE, seconds)
        else:
            limit = f"the drive gives {middle(told['limits']):.3g} GB/s"
            self.suite.add(
                NODE.what, seconds, NODE.unit, note=f"{NODE} is held where it gives {NODE_GB_PER_S}; {limit}"
            )
        self.hold_background(told)

    def hold_save(self, bar: Bar, told: dict[str, Any]) -> None:
        rates = [told["bytes"] / run["seconds"] / 1e9 for run in told["runs"]]
        # Of the same moment: the drive changes more from minute to minute than a save differs from it.
        ratio = middle([rate / beside for rate, beside in zip(rates, told["limits"], strict=True)])
        cpu = middle([run["cpu_seconds"] for run in told["runs"]]) / told["bytes"] * 1e9
        note = f"{middle(rates):.4g} of {middle(told['limits']):.4g} GB/s ({spread(rates)}); {told['limit_shape']}"
        self.suite.hold(bar, ratio, f"{note}; CPU {cpu:.3f} s/GB")

    def hold_background(self, told: dict[str, Any]) -> None:
        runs = told["background"]
        blocked = [run["blocked_seconds"] * 1e3 for run in runs]
        self.suite.hold(
            RETURNS, middle(blocked), f"{spread(blocked)}; pinned before in {told['prepare_seconds']:.3g} s"
        )
        free, limit = [run["stream_free_seconds"] for run in runs], told["limit_from_device"]
        if limit is None:
            self.suite.add(STREAM_FREE.what, verdict="SKIP", note="there is no GPU")
        else:
            least = told["bytes"] / limit / 1e9
            note = f"{middle(free) * 1e3:.4g} of {least * 1e3:.4g} ms, at {limit:.4g} GB/s"
            self.suite.hold(STREAM_FREE, middle(free) / least, f"{note}; {spread([one * 1e3 for one in free])}")
        pairs = zip(runs, told["runs"], strict=True)
        ratio = middle([one["seconds"] / beside["seconds"] for one, beside in pairs])
        self.suite.hold(ENDS, ratio, f"seconds: {spread([run['seconds'] for run in runs])}")

    def large(self) -> None:
        """As much more, once: what a state of many gigabytes does not change."""
        told = self.measure("thruway", 120, "--bytes", self.scaled(LARGE_BYTES))
        self.suite.data["large"] = told
        self.hold_save(Bar(f"{told['bytes'] / 1e9:.3g} GB: {SAVE.what}", SAVE.bar, SAVE.at_least), told)

    def rate(self) -> float:
        """Bytes a second of a synced save, or a guess if none was measured."""
        processes = self.systems[tables.OURS]["processes"]
        runs = [(process["bytes"], run["seconds"]) for process in processes for run in process["runs"]]
        return middle([size / seconds for size, seconds in runs]) if runs else GUESS_BYTES_PER_S

    def training(self) -> None:
        """Every ten steps, with a state that the drive can take meanwhile."""
        every, step = 10, self.step_seconds()
        size = min(self.suite.data["bytes"], DRIVE_SHARE * every * step * self.rate())
        self.train("training", STEPS, round(size), every)

    def training_whole(self) -> None:
        """The whole state, as often as the drive can take it."""
        size, step = self.suite.data["bytes"], self.step_seconds()
        every = max(10, -(-round(size / self.rate() / DRIVE_SHARE / step) // 5) * 5)
        bar = Bar(f"{size / 1e9:.3g} GB every {every} steps: {STEPS.what}", STEPS.bar, STEPS.at_least)
        self.train("training, the whole state", bar, size, every)

    def step_seconds(self) -> float:
        return 0.2 if self.scale > 0.1 else 0.02

    def train(self, name: str, bar: Bar, size: int, every: int) -> None:
        told = self.measure("train", 100, "--bytes", size, "--every", every, "--step-seconds", self.step_seconds())
        self.suite.data[name] = told
        plain, saving = told["plain_step_seconds"], told["saving_step_seconds"]
        mean = sum(plain) / len(plain)
        turns = [one / beside for one, beside in zip(saving, plain, strict=True)]
        blocked = [save["blocked_seconds"] * 1e3 for save in told["saves"]]
        late = sum(save["late"] for save in told["saves"])
        note = f"steps of {mean * 1e3:.4g} ms, {told['bytes'] / 1e9:.3g} GB every {every}; turns {spread(turns)}"
        note += f"; the call, ms: {spread(blocked)}; {late} of {len(blocked)} found one under way"
        self.suite.hold(bar, sum(saving) / sum(plain), note)

    def restores(self) -> None:
        told = self.measure("restore", 90, "--bytes", self.suite.data["bytes"], "--repeat", 3)
        self.suite.data["restore"] = told
        for bar, pairs in ((RESTORE_CACHED, told["cached"]), (RESTORE_COLD, told["cold"])):
            ratio = middle([pair["load"]["seconds"] / pair["restore"]["seconds"] for pair in pairs])
            rates = {
                name: [told["bytes"] / pair[name]["seconds"] / 1e9 for pair in pairs] for name in ("restore", "load")
            }
            note = f"{middle(rates['restore']):.4g} of {middle(rates['load']):.4g} GB/s"
            self.suite.hold(bar, ratio, f"{note}; {spread(rates['restore'])}; compared bit by bit")

    # ------------------------------------------------------------------------- beside the others

    def held_against_others(self) -> None:
        """Once after the first round, so that the figures are there whatever comes; again after the last."""
        again = {TORCH_SAVE.what, DCP.what}
        self.suite.rows[:] = [row for row in self.suite.rows if row["what"] not in again]
        self.hold(TORCH_SAVE, lambda: self.times(["torch.save"]))
        labels = [system.label for system in OTHERS if system.name.startswith("dcp-") and not system.background]
        self.hold(DCP, lambda: self.times(labels))

    def hold(self, bar: Bar, found: Callable[[], tuple[float, str]]) -> None:
        """What was not measured fails its own bar alone."""
        self.suite.step(bar.what, lambda: self.suite.hold(bar, *found()))

    def times(self, labels: list[str]) -> tuple[float, str]:
        """How many times as fast as the best of these."""
        seconds = {label: middle(tables.checkpoint_seconds(self.systems[label])) for label in labels if self.ran(label)}
        if not seconds:
            reasons = [f"{label}: {self.systems[label]['skipped']}" for label in labels]
            raise StepError(f"none of them ran: {'; '.join(reasons)}")
        if not self.ran(tables.OURS):
            raise StepError("thruway's save was not measured")
        ours, best = middle(tables.checkpoint_seconds(self.systems[tables.OURS])), min(seconds, key=seconds.__getitem__)
        count = len(tables.checkpoint_seconds(self.systems[best]))
        return seconds[best] / ours, f"{ours:.4g} s; {best}: {seconds[best]:.4g} s, {count} runs"

    def ran(self, label: str) -> bool:
        return bool(self.systems[label]["processes"])
