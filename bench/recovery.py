#!/usr/bin/env python3
"""Kills a training at random moments, and measures what that costs: steps lost, and seconds to the first step again.

    recovery.py DIRECTORY [--device cuda:0] [--bytes N] [--every 10] [--step-seconds 0.2] [--rounds 5] [--json FILE]

The training is that of bench/checkpoint_train.py, in a process of its own that is killed by SIGKILL, at a moment chosen
at random from two periods of saves, so that it hits some saves as well. The next process restores what is there and
trains on. Systems take turns:

    thruway        Checkpointer.save_async with `guard`, and restore_into
    torch.save     torch.save into a fresh file, synced, renamed, and its directory synced; torch.load

A lost step is one that was done before the kill and is to be done again. Seconds count from the start of the new
process to the end of its first step; `start` of them are the interpreter, imports and the GPU, `restore` is reading the
state back, after the model was made. Exit status 1 if a step that was reported saved was not there afterwards.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import checkpoint_train
import facts
import tables
from harness import StepError, say

SYSTEMS = ("thruway", "torch.save")
# What a process may need to its first step: imports, the GPU, a model and its state.
START_SECONDS_MAX = 300.0
KEPT = 2


# ---------------------------------------------------------------------------------- the training, in a child


class Saver(Protocol):
    def restore(self) -> int: ...

    def save(self, step: int) -> None: ...

    def saved(self) -> int | None: ...


class Thruway:
    def __init__(self, training: checkpoint_train.Training, directory: Path, device: str) -> None:
        from thruway.torch import Checkpointer

        parameters = sum(one.numel() for one in training.model.parameters())
        pool = checkpoint_train.STATE_BYTES * parameters + (64 << 20)
        self.training, self.saving = training, None
        self.checkpoints = Checkpointer(directory, keep=KEPT, pool_bytes=pool, device=device)

    def restore(self) -> int:
        if not self.checkpoints.steps():
            return 0
        return self.checkpoints.restore_into({"model": self.training.model, "optimizer": self.training.optimizer})[0]

    def save(self, step: int) -> None:
        self.saving = self.checkpoints.save_async(step, self.training.state(), guard=self.training.optimizer)

    def saved(self) -> int | None:
        if self.saving is None or not self.saving.done():
            return None
        step, self.saving = self.saving.wait().step, None
        return step


class TorchSave:
    def __init__(self, training: checkpoint_train.Training, directory: Path, device: str) -> None:
        self.training, self.directory, self.device, self.last = training, directory, device, None
        directory.mkdir(exist_ok=True)

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("step-*.pt"))

    def restore(self) -> int:
        import torch

        if not (files := self.files()):
            return 0
        state = torch.load(files[-1], map_location=self.device, weights_only=True)
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])
        return int(files[-1].stem.removeprefix("step-"))

    def save(self, step: int) -> None:
        import torch

        beside = self.directory / "being-written"
        with beside.open("wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(self.directory / f"step-{step:08}.pt")
        descriptor = os.open(self.directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        for old in self.files()[:-KEPT]:
            old.unlink()
        self.last = step

    def saved(self) -> int | None:
        step, self.last = self.last, None
        return step


def tell(what: str, value: object = "") -> None:
    print(f"{what} {value}".rstrip(), flush=True)


def train(args: argparse.Namespace) -> None:
    """Trains until it is killed; says on standard output how far it has come."""
    import torch

    if args.device != "cpu":
        torch.zeros(1, device=args.device)
    tell("started")
    training = checkpoint_train.Training(args.bytes, args.device)
    training.batches = args.batches
    if args.calibrate:
        training.step()
        training.calibrate(args.step_seconds)
        tell("batches", training.batches)
        return
    saver: Saver = (Thruway if args.child == "thruway" else TorchSave)(
        training, args.directory / args.child, args.device
    )
    begun = time.perf_counter()
    step = saver.restore()
    if args.device != "cpu":
        torch.cuda.synchronize(args.device)
    tell("restored", f"{step} {time.perf_counter() - begun:.6f}")
    while True:
        training.step()
        step += 1
        tell("step", step)
        if (saved := saver.saved()) is not None:
            tell("saved", saved)
        if step % args.every == 0:
            saver.save(step)


# ---------------------------------------------------------------------------------- outside


class Run:
    """One process of a training. It is killed when its time is up, and in any case at the end."""

    def __init__(self, args: argparse.Namespace, place: Path, system: str, batches: int, *more: str) -> None:
        command = [sys.executable, __file__, place, "--child", system, "--batches", batches]
        for name in ("device", "bytes", "every", "step_seconds"):
            command += [f"--{name.replace('_', '-')}", getattr(args, name)]
        self.log, self.begun = place / f"{system}.log", time.perf_counter()
        # What it said last, and when it first said it.
        self.told: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(part) for part in [*command, *more]], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.timer = threading.Timer(START_SECONDS_MAX, self.process.kill)
        self.timer.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        self.process.kill()
        self.process.wait()

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what, _, value = line.strip().partition(" ")
            self.told[what] = value
            self.seconds.setdefault(what, time.perf_counter() - self.begun)
            yield what

    def wait_for(self, wanted: str) -> None:
        if all(what != wanted for what in self.lines()):
            said = self.log.read_text(errors="replace").strip()[-400:]
            raise StepError(f"a training ended with {self.process.wait()} before it said '{wanted}': {said}")

    def killed_after(self, seconds: float) -> None:
        """Lets it train on, reads what it says, and kills it at this moment, whatever it is at."""
        self.timer.cancel()
        self.timer = threading.Timer(seconds, self.process.kill)
        self.timer.start()
        for _ in self.lines():
            pass
        if self.process.wait() != -signal.SIGKILL:
            raise StepError(f"a training ended by itself: {self.log.read_text(errors='replace').strip()[-400:]}")

    def number(self, what: str) -> int:
        return int(self.told.get(what, "0").split()[0])


def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """What each kill cost each system."""
    chance = random.Random(args.seed)
    with Run(args, place, SYSTEMS[0], 1, "--calibrate") as run:
        run.wait_for("batches")
        batches = run.number("batches")
    found: dict[str, Any] = {
        name: {"version": importlib.metadata.version(name.partition(".")[0]), "kills": []} for name in SYSTEMS
    }
    # The last step that was done, and the last that was reported saved.
    newest = dict.fromkeys(SYSTEMS, (0, 0))
    for number in range(args.rounds + 1):
        moment = chance.uniform(0, 2 * args.every * args.step_seconds)
        for name in SYSTEMS:
            say(f"{name}: {'begins' if number == 0 else f'after kill {number} of {args.rounds}'} …")
            with Run(args, place, name, batches) as run:
                run.wait_for("step")
                (done, saved), restored = newest[name], run.number("restored")
                if restored < saved:
                    raise StepError(f"{name}: step {saved} was reported saved, and {restored} is the newest there")
                if number == 0:
                    # There is nothing yet that could come back.
                    run.wait_for("saved")
                else:
                    found[name]["kills"].append(
                        {
                            "lost_steps": done - restored,
                            "first_step_seconds": run.seconds["step"],
                            "start_seconds": run.seconds["started"],
                            "restore_seconds": float(run.told["restored"].split()[1]),
                        }
                    )
                run.killed_after(moment)
                newest[name] = (run.number("step"), max(run.number("saved"), restored))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the drive that checkpoints go to")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu")
    parser.add_argument("--bytes", type=int, default=8_000_000_000, help="of a state, about")
    parser.add_argument("--every", type=int, default=10, help="steps from save to save")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="of a step, about")
    parser.add_argument("--rounds", type=int, default=5, help="kills of each system")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which it is killed")
    parser.add_argument("--json", type=Path, help="where all figures go, for bench/tables.py")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(args)
        return 0
    if min(args.bytes, args.every, args.rounds) < 1 or not 0 < args.step_seconds < 60:
        parser.error("sizes and counts are at least 1, and a step takes less than a minute")
    place = Path(tempfile.mkdtemp(prefix="recovery-", dir=args.directory))
    try:
        result: dict[str, Any] = {"suite": "recovery", "facts": facts.machine(place)}
        result["data"] = {key: getattr(args, key) for key in ("device", "bytes", "every", "step_seconds", "seed")}
        result["data"]["systems"] = measure(args, place)
    except StepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    for table in tables.recovery(result["data"]):
        print("\n".join(table.plain()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
