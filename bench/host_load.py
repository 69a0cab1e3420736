#!/usr/bin/env python3
"""Loads into host memory: Thruway beside a plain read, the reference library, and the drive itself. Needs no GPU.

    cargo build --release -p thruway-cli
    THRUWAY_TEST_MODEL=MODEL .venv/bin/python bench/host_load.py

Cached: the file is in the page cache. Every load runs in a process of its own; the contenders take turns; the clock
runs inside the process, from before the file is opened until all its bytes lie in memory that was fresh before.

Cold: the file is on the drive alone, which is looked at and not assumed. Beside each load the same file is read with
O_DIRECT in several shapes of requests (bench/direct_io.py, no code of Thruway's), into as much memory as the model
takes, touched before; the best median of a shape is the limit. Also told, and no limit for a load: the same into a few
buffers used again and again, which stay in the processor's caches. The bar is one for a rate, so it is held against
models of a gigabyte or more; of a smaller one the fixed costs (opening, the first request's way to the drive) are told.

The models are a generated one of 2 GB, laid out as the format's reference writer lays it out; the same as `thruway
copy` writes it; and, if it is set, THRUWAY_TEST_MODEL. Needs Python with numpy and safetensors for the reference
(without them it is skipped, and said so). Other work on the machine disturbs: before each load the
script waits a while for idle processors, and tells how busy they were; `--first` gives all contenders alike the highest
priority, so that other work waits for them instead (root only). Exit status: 0 if every bar holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import direct_io
import facts
import gen_model
from direct_io import Shape
from harness import Bar, StepError, Suite, middle, run, say, spread

PIECE_BYTES = 4 << 20
# 38 float32 tensors, 2.0 GB: numpy knows no bfloat16, so the reference could not read a bfloat16 model.
GENERATED_SCALE = 22.0
SHAPES = (Shape(8, 4 << 20), Shape(16, 1 << 20), Shape(16, 512 << 10), Shape(32, 512 << 10))
# The best shape for one buffer a thread.
RECYCLED = Shape(4, 4 << 20)
# Smaller models are not a matter of rate.
RATE_BYTES_MIN = 1 << 30
# What a contender may need beside the model itself.
BESIDE_BYTES = 512 << 20
IDLE_BUSY = 0.10
RUN_SECONDS = 120.0


# ------------------------------------------------- contenders, each in a process of its own


def plain(paths: list[Path], advise: bool) -> int:
    """One thread, read after read, into anonymous memory that was never touched."""
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        length = os.fstat(descriptor).st_size
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if advise:
            memory.madvise(mmap.MADV_HUGEPAGE)
        view, done = memoryview(memory), 0
        while done < length:
            count = os.preadv(descriptor, [view[done : done + PIECE_BYTES]], done)
            if count == 0:
                raise OSError(f"{path} ended early")
            done += count
        os.close(descriptor)
        KEPT.append(memory)
        total += length
    return total


# What was loaded stays until the clock is stopped: giving memory back is not part of a load.
KEPT: list[object] = []


def reference(paths: list[Path], way: str) -> int:
    """The reference library, made to read every byte.

    Its default maps the file and hands out views that nobody has read yet: `copy` copies each tensor into fresh memory,
    `sum` only looks at every byte. `pread` is its other backend, which reads into memory of its own.
    """
    import numpy
    from safetensors.numpy import load_file

    CLOCK.start()
    total = 0
    for path in paths:
        for tensor in load_file(path, backend="pread" if way == "pread" else "mmap").values():
            KEPT.append(tensor.copy() if way == "copy" else tensor)
            total += tensor.nbytes
            if way == "sum":
                raw = tensor.reshape(-1).view(numpy.uint8)
                whole = len(raw) // 8 * 8
                KEPT.append(raw[:whole].view(numpy.uint64).sum() + raw[whole:].sum())
    return total


class Clock:
    def start(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu}


# Started again once everything is imported: starting Python is not part of a load either.
CLOCK = Clock()


def anonymous_bytes() -> int:
    """The anonymous memory of this process that is really there."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def contend(name: str, paths: list[Path]) -> None:
    """The whole of a contender's process: loads once and tells how it went, as JSON."""
    before = anonymous_bytes()
    CLOCK.start()
    kind, _, way = name.partition("-")
    total = reference(paths, way) if kind == "reference" else plain(paths, way == "huge")
    took = CLOCK.read()
    grown = anonymous_bytes() - before
    if way != "sum" and grown < total * 0.95:
        raise SystemExit(f"error: only {grown} of {total} bytes lie in memory of this process")
    print(json.dumps({"bytes": total, **took}))


# What each row of the table is called.
TITLES = {
    "thruway": "thruway load",
    "plain": "plain read, one thread",
    "plain-huge": "plain read, one thread, huge pages asked for",
    "reference-copy": "safetensors numpy, every tensor copied",
    "reference-pread": "safetensors numpy, backend pread",
    "reference-sum": "safetensors numpy, every tensor only summed",
}


# ------------------------------------------------------------------------- the same start for all

# In a session of its own (as harness.run makes them) a process competes as a member of that session's group.
FIRST = ("sh", "-c", 'echo -20 2>/dev/null >/proc/self/autogroup; exec nice -n -20 "$@"', "first")


def put_first() -> None:
    """This process too: the O_DIRECT limit is measured in it."""
    with contextlib.suppress(PermissionError):
        os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20")
    os.setpriority(os.PRIO_PROCESS, 0, -20)


def back_memory(size: int) -> None:
    """Touches so much memory and gives it back.

    A virtual machine may have to fetch memory from its host when it is touched, which is slower than any load, and
    gives back what stays free for seconds. So every contender starts right after this, and none pays for the host.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:: mmap.PAGESIZE] = bytes(-(-size // mmap.PAGESIZE))
    memory.close()


def _ticks() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def busy(seconds: float = 0.25) -> float:
    """The share of all processors that was at work during the next moment."""
    total, idle = _ticks()
    time.sleep(seconds)
    total_after, idle_after = _ticks()
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def wait_for_idle(patience: float) -> float:
    """Waits until the processors are idle, or for so long; gives how busy they were at the end."""
    until = time.monotonic() + patience
    while (share := busy()) > IDLE_BUSY and time.monotonic() < until:
        time.sleep(0.5)
    return share


# ------------------------------------------------------------------------------- the measurements


class Comparison:
    """One model, measured cached and cold."""

    def __init__(self, suite: Suite, args: argparse.Namespace, label: str, path: Path) -> None:
        self.suite, self.args, self.label, self.path = suite, args, label, path
        self.prefix = FIRST if args.first else ()
        self.files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        self.bytes = sum(file.stat().st_size for file in self.files)
        self.busy: list[float] = []
        self.data: dict = {"bytes": self.bytes, "files": len(self.files)}
        suite.data.setdefault("models", {})[label] = self.data

    def thruway(self) -> dict:
        command = [*self.prefix, self.args.thruway, "--json", "load", self.path, "--device", "host"]
        told = run(command, self.suite.left(RUN_SECONDS)).json()
        taken: dict[str, int] = {}
        for file in told["files"]:
            for part in file["parts"]:
                key = f"{part['path']} ({part['engine']}): {part['reason']}"
                taken[key] = taken.get(key, 0) + part["bytes"]
        # From before the model is opened until the last byte is in place: a little more than both parts added up.
        return {
            "seconds": told["elapsed_seconds"],
            "added_seconds": told["open_seconds"] + told["seconds"],
            "cpu_seconds": told["cpu_seconds"],
            "taken": taken,
        }

    def contender(self, name: str) -> dict:
        if name == "thruway":
            return self.thruway()
        command = [*self.prefix, sys.executable, __file__, "--contender", name, *self.files]
        return run(command, self.suite.left(RUN_SECONDS)).json()

    def quiet(self) -> float:
        share = wait_for_idle(self.args.patience)
        self.busy.append(share)
        return share

    def warm(self) -> None:
        """Brings the whole model into the page cache, just before a load: a kernel may reclaim what lies unused."""
        for _ in range(5):
            direct_io.warm(self.files)
            back_memory(self.bytes + BESIDE_BYTES)
            if (left := self.bytes - sum(map(direct_io.resident_bytes, self.files))) == 0:
                return
        raise StepError(f"{left} bytes of the model do not stay in the page cache, so nothing cached can be measured")

    def cached(self) -> None:
        names = list(TITLES)
        try:
            self.contender("reference-copy")
        except StepError as error:
            names = [name for name in names if not name.startswith("reference")]
            self.suite.add(f"{self.label}, cached: reference", verdict="SKIP", note=str(error))
        runs: dict[str, list[dict]] = {name: [] for name in names}
        self.data["cached"] = runs
        for number in range(self.args.runs):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                share = self.quiet()
                self.warm()
                runs[name].append({**self.contender(name), "busy_before": share})
        rates = {name: middle([self.rate(one) for one in runs[name]]) for name in names}
        for name in names:
            cpu = middle([one["cpu_seconds"] for one in runs[name]]) / self.bytes * 1e9
            note = f"{spread([self.rate(one) for one in runs[name]])}; CPU {cpu:.3f} s/GB"
            if name == "thruway":
                note += f"; {taken(runs[name])}"
            self.suite.add(f"{self.label}, cached: {TITLES[name]}", rates[name], "GB/s", note=note)
        self.bar("cached, of a plain read", 1.0, "thruway", ["plain"], rates)
        loaders = [name for name in ("reference-copy", "reference-pread") if name in rates]
        if loaders:
            self.bar("cached, of the reference (the faster of its ways to load)", 1.0, "thruway", loaders, rates)

    def rate(self, one: dict) -> float:
        return self.bytes / one["seconds"] / 1e9

    def bar(self, what: str, least: float, ours: str, theirs: list[str], rates: dict[str, float]) -> None:
        best = max(rates[name] for name in theirs)
        note = f"{rates[ours]:.4g} of {best:.4g} GB/s"
        self.suite.hold(Bar(f"{self.label}, {what}", least, True), rates[ours] / best, note)

    def cold(self) -> None:
        limits: dict[Shape, list[float]] = {shape: [] for shape in SHAPES}
        recycled: list[float] = []
        runs: list[dict] = []
        for number in range(self.args.runs):
            turn = number % (len(SHAPES) + 2)
            jobs: list[Callable[[], None]] = [self.limit_job(limits[shape], shape, keep=True) for shape in SHAPES]
            jobs.append(self.limit_job(recycled, RECYCLED, keep=False))
            jobs.append(lambda: runs.append(self.cold_load()))
            for job in jobs[turn:] + jobs[:turn]:
                job()
        self.data["cold"] = {"limits": {str(shape): rates for shape, rates in limits.items()}, "runs": runs}
        self.data["cold"]["recycled"] = {str(RECYCLED): recycled}
        for shape, found in limits.items():
            self.suite.add(f"{self.label}: O_DIRECT read, {shape}", middle(found), "GB/s", note=spread(found))
        title = f"{self.label}: O_DIRECT read, {RECYCLED}, into the same buffers again and again"
        self.suite.add(title, middle(recycled), "GB/s", note=spread(recycled))
        best = max(limits, key=lambda shape: middle(limits[shape]))
        limit, rates = middle(limits[best]), [self.rate(one) for one in runs]
        # Of the same round: a drive that others use too changes more from minute to minute than loads differ from it.
        ratio = middle([rate / beside for rate, beside in zip(rates, limits[best], strict=True)])
        cpu = middle([one["cpu_seconds"] for one in runs]) / self.bytes * 1e9
        note = f"{spread(rates)}; CPU {cpu:.3f} s/GB; {taken(runs)}"
        self.suite.add(f"{self.label}, cold: thruway load", middle(rates), "GB/s", note=note)
        note = f"median of the rounds' ratios to {best}; medians: {middle(rates):.4g} of {limit:.4g} GB/s"
        if self.bytes >= RATE_BYTES_MIN:
            self.suite.hold(Bar(f"{self.label}, cold, of the best O_DIRECT read", 0.95, True), ratio, note)
        else:
            beyond = (self.bytes / middle(rates) - self.bytes / limit) / 1e6
            title = f"{self.label}, cold: beyond the best O_DIRECT read"
            self.suite.add(title, beyond, "ms", note=f"{ratio:.3f} of it: {note}")

    def limit_job(self, rates: list[float], shape: Shape, keep: bool) -> Callable[[], None]:
        def job() -> None:
            self.quiet()
            direct_io.evict_wholly(self.files)
            rates.append(direct_io.read_rate(self.files, shape, keep))

        return job

    def cold_load(self) -> dict:
        share = self.quiet()
        left = direct_io.evict_wholly(self.files)
        if left:
            raise StepError(f"the page cache keeps {left} bytes of the model, so nothing cold can be measured")
        back_memory(self.bytes + BESIDE_BYTES)
        return {**self.thruway(), "busy_before": share}


def taken(runs: list[dict]) -> str:
    """Which way the bytes went, over all runs."""
    sums: dict[str, int] = {}
    for one in runs:
        for way, count in one["taken"].items():
            path = way.split(" ")[0]
            sums[path] = sums.get(path, 0) + count
    total = sum(sums.values())
    return ", ".join(f"{path} {count / total:.1%}" for path, count in sorted(sums.items(), key=lambda item: -item[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thruway", type=Path, default=Path("target/release/thruway"), help="the release binary")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="a directory on the drive to measure")
    parser.add_argument("--runs", type=int, default=7, help="loads of each kind, at least 5 for figures to publish")
    parser.add_argument("--scale", type=float, default=1.0, help="of the generated model; 0 leaves it out")
    parser.add_argument("--only", choices=["cached", "cold"], help="one half of the measurements")
    parser.add_argument("--patience", type=float, default=10, help="seconds to wait for idle processors, each time")
    parser.add_argument("--first", action="store_true", help="give all contenders the highest priority")
    parser.add_argument("--seconds", type=float, default=3600, help="the most time that all may take")
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("files", type=Path, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        contend(args.contender, args.files)
        return 0
    if not args.thruway.exists():
        parser.error(
            f"{args.thruway} is not there: run `cargo build --release -p thruway-cli`, or name it by --thruway"
        )
    if args.first:
        put_first()
    with tempfile.TemporaryDirectory(prefix="thruway-host-load-", dir=args.dir) as place:
        out = args.json or Path(place) / "host-load.json"
        suite = Suite(out.stem, args.seconds, out.resolve().parent, {**facts.machine(Path(place)), **conditions()})
        suite.data["titles"] = TITLES
        suite.facts["thruway"] = run([args.thruway, "--version"], 30).stdout.strip()
        models: dict[str, Path] = {}
        if os.environ.get("THRUWAY_TEST_MODEL"):
            # A copy: tests that run at the same time throw the original out of the page cache.
            size = Path(os.environ["THRUWAY_TEST_MODEL"]).stat().st_size
            models[f"test model, {size / 1e6:.1f} MB"] = copied(
                Path(os.environ["THRUWAY_TEST_MODEL"]), Path(place) / "test"
            )
        if args.scale:
            generated = Path(place) / "generated"
            size = gen_model.make(generated, "small", scale=GENERATED_SCALE * args.scale)
            models[f"generated {size / 1e9:.1f} GB"] = generated
            written = Path(place) / "written.safetensors"
            run([args.thruway, "--json", "copy", generated / "model.safetensors", written], 300).json()
            models[f"generated {size / 1e9:.1f} GB, as Thruway writes it"] = written
        for label, path in models.items():
            one = Comparison(suite, args, label, path)
            if args.only != "cold":
                suite.step(f"{label}, cached", one.cached)
            if args.only != "cached":
                suite.step(f"{label}, cold", one.cold)
            one.data["busy"] = one.busy
            if one.busy:
                note = f"of {len(one.busy)} measurements {sum(share > IDLE_BUSY for share in one.busy)} began while"
                note += f" more than {IDLE_BUSY:.0%} of the processors were at other work"
                suite.add(f"{label}: the machine was busy, most", max(one.busy), note=note)
        suite.facts["load_after"] = os.getloadavg()
        suite.write()
        known = suite.facts
        print(
            f"{known['cpu']}, {known['cores']} cores, {known['memory']}, Linux {known['kernel']}, {known['filesystem']}"
        )
        before, after = (" ".join(f"{load:.2f}" for load in known[key]) for key in ("load_before", "load_after"))
        print(f"load average before: {before}; after: {after}; transparent huge pages: {known['huge_pages']}")
        print("\n".join(suite.table()), flush=True)
    if args.json:
        say(f"host_load: all figures are in {args.json}")
    return int(suite.failed())


def copied(model: Path, directory: Path) -> Path:
    directory.mkdir()
    for file in [model] if model.is_file() else sorted(model.glob("*.safetensors")):
        shutil.copyfile(file, directory / file.name)
        with (directory / file.name).open("r+b") as copy:
            os.fsync(copy.fileno())
    return directory


def conditions() -> dict:
    """What the machine was set to, and how busy it was, when the measurements began."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = setting.read_text().split("[")[1].split("]")[0] if setting.exists() else "unknown"
    command = " ".join(["bench/host_load.py", *sys.argv[1:]])
    # Where things lie tells nobody anything.
    command = re.sub(r" --(thruway|json|dir)[ =]\S+", "", command)
    return {"load_before": os.getloadavg(), "huge_pages": chosen, "command": command}


if __name__ == "__main__":
    sys.exit(main())
