#!/usr/bin/env python3
"""Runs other software beside Thruway on the same files, and prints one table of all.

    run_peers.py --wheels DIR --candidate DIR --dir DIR --thruway BINARY --json FILE [--seconds N] [--scale X]

Each system runs in processes of its own (peers.py and save_peers.py; Thruway's command beside its Python package).
Systems take turns, round after round, for as long as the time allows. The first round is everybody's; of the others
those that are far behind the best of them are not tried again. A step that hangs is killed and costs its own figures
alone. What cannot run is listed with the reason.

    cached        8.72 GB, 4 shards, 180 bf16 tensors, in the page cache
    transformers  the same, read tensor by tensor as Hugging Face's transformers reads a checkpoint
    many          20,000 bf16 tensors of 64 KiB in one file, in the page cache
    small         38 tensors, 90 MB, one file, in the page cache
    cold          as cached, but on the drive only: the page cache forgets the model before every load
    save          4.3 GB from the GPU, synced

How much of the GPU's memory a load takes is watched in the first process of each system but the command, in one more
load that is not timed; a cold load takes what a cached one takes, and is not watched.

--wheels and --candidate hold the peers' wheels, the latter those that replace a package of the same name. `--device
cpu` tries this script without a GPU, with whatever peers can do that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import direct_io
import facts
import gen_model
import peers
import tables
from harness import StepError, Suite, run, say

HERE = Path(__file__).resolve().parent
NO_TIME = "no time was left"
# So many times the best of the others' seconds: more than noise makes of two that are alike.
FAR_BEHIND = 1.3


@dataclass(frozen=True)
class System:
    """One row of a table: a program, and how it is set."""

    label: str
    name: str
    env: dict[str, str] = field(default_factory=dict)
    # Its wheel replaces a package that others use too.
    candidate: bool = False
    # It passes the page cache by, so that a repetition tells nothing new and takes long.
    slow: bool = False


def instanttensor(backend: str, slow: bool = False) -> System:
    env = {"INSTANTTENSOR_BACKEND": backend} if backend else {}
    return System(f"instanttensor {backend or 'default'}", "instanttensor", env, slow=slow)


THRUWAY = System("thruway", "thruway")
COMMAND = System("thruway, command", "command")
SAFETENSORS = System("safetensors", "safetensors")
PREFETCH = System("safetensors prefetch", "safetensors-prefetch", candidate=True)
FASTSAFETENSORS = System("fastsafetensors", "fastsafetensors", slow=True)
RUNAI = System("runai-model-streamer", "runai", slow=True)
KVIKIO = System("kvikio, raw bytes", "kvikio")
LIMIT = System("limit: pinned host to GPU", "limit")

MANY = (
    THRUWAY,
    COMMAND,
    instanttensor("MMAP"),
    instanttensor("URING_BUFFERED"),
    PREFETCH,
    KVIKIO,
    SAFETENSORS,
    FASTSAFETENSORS,
)
# The last three pass the page cache by: tried in all scenarios, they would take the time that the others need.
CACHED = (*MANY, LIMIT, RUNAI, instanttensor("", slow=True), instanttensor("URING", slow=True))
TRANSFORMERS = (
    System("thruway", "thruway-slices"),
    System("thruway, file by file", "thruway-slices-files"),
    System("safetensors", "safetensors-slices"),
)
COLD = (
    THRUWAY,
    COMMAND,
    instanttensor("URING"),
    PREFETCH,
    KVIKIO,
    instanttensor(""),
    instanttensor("URING_BUFFERED"),
    instanttensor("MMAP"),
    SAFETENSORS,
    FASTSAFETENSORS,
    RUNAI,
)
SAVE = (
    THRUWAY,
    System("torch.save", "torch.save"),
    System("safetensors save_file", "safetensors"),
    System("torch DCP", "dcp"),
    System("kvikio, raw bytes", "kvikio"),
)
# What these can do on a machine without a GPU.
ON_CPU = (
    *("thruway", "command", "safetensors", "fastsafetensors", "runai", "torch.save", "dcp"),
    *(system.name for system in TRANSFORMERS),
)


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    systems: tuple[System, ...]
    # Loads in one process, the first included.
    repeat: int
    # Of one step, seconds.
    limit: float
    # The share of the time, beside the other scenarios'.
    weight: float


SCENARIOS = (
    Scenario("cached", "4 files, in the page cache", CACHED, 3, 75, 4.5),
    Scenario("transformers", "4 files, in the page cache, tensor by tensor", TRANSFORMERS, 3, 75, 1.0),
    Scenario("many", "1 file, in the page cache", MANY, 4, 60, 2.0),
    Scenario("small", "1 file, in the page cache", MANY, 5, 45, 1.7),
    Scenario("cold", "4 files, on the drive only", COLD, 1, 90, 4.0),
    Scenario("save", "from the GPU, synced to the drive", SAVE, 2, 120, 1.3),
)


# ----------------------------------------------------------------------- the peers' packages


def unpack(wheels: Path | None, folder: Path) -> None:
    """Installs wheels into a folder, without pip and without network: a wheel is an archive."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(wheels.glob("*.whl")) if wheels else []:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    for data in folder.glob("*.data"):
        for part in ("purelib", "platlib"):
            if (data / part).is_dir():
                shutil.copytree(data / part, folder, dirs_exist_ok=True)
        shutil.rmtree(data)


def cuda_libraries(python: str) -> list[str]:
    """Where CUDA's libraries may lie that the loader does not look for: some peers open them by name alone."""
    program = "import sys, json; print(json.dumps(sys.path))"
    told = run([python, "-c", program], 30)
    packages = [Path(path) for path in json.loads(told.stdout or "[]") if path]
    found = [lib for path in packages for lib in sorted(path.glob("nvidia/*/lib"))]
    found += [lib for root in sorted(Path("/usr/local").glob("cuda*")) for lib in sorted(root.glob("targets/*/lib"))]
    return [str(lib) for lib in found if lib.is_dir()]


def python_with_torch(wanted: str | None) -> str:
    """An interpreter that has torch: this one, or the one that the machine calls python3."""
    tried = [wanted] if wanted else [sys.executable, shutil.which("python3"), shutil.which("python3.12")]
    for python in dict.fromkeys(filter(None, tried)):
        if run([python, "-c", "import torch"], 90).code == 0:
            return python
    return wanted or sys.executable


def environment(packages: list[Path], libraries: list[str]) -> dict[str, str]:
    """What a process finds packages and CUDA's libraries by."""
    paths = [*packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    joined = {"PYTHONPATH": ":".join(map(str, paths)), "LD_LIBRARY_PATH": ":".join(libraries)}
    return {**joined, "PYTHONDONTWRITEBYTECODE": "1"}


# ------------------------------------------------------------------------------ the driver


def far_behind(systems: dict[str, dict], label: str) -> bool:
    """Whether the first load of a system and those that followed were far slower than the best of the others'."""
    for repeated in (False, True):
        mine = tables.seconds_of(systems[label], repeated)
        best = min(
            one for other in filter(tables.is_peer, systems) for one in tables.seconds_of(systems[other], repeated)
        )
        if mine and min(mine) <= FAR_BEHIND * best:
            return False
    return True


class Driver:
    """All scenarios on one machine."""

    def __init__(self, suite: Suite, args: argparse.Namespace) -> None:
        self.suite, self.args = suite, args
        self.place: Path = args.dir / "peers"
        self.place.mkdir(parents=True, exist_ok=True)
        self.python = python_with_torch(args.python)
        self.models: dict[str, Path] = {}
        self.data = suite.data.setdefault("scenarios", {})
        self.seconds: dict[tuple[str, str], float] = {}
        unpack(args.wheels, self.place / "packages")
        unpack(args.own, self.place / "packages")
        unpack(args.candidate, self.place / "packages-candidate")
        self.libraries = cuda_libraries(self.python)
        told = run([args.thruway, "--version"], 30).stdout.split()
        self.version = told[-1] if told else "unknown"
        suite.facts["thruway"] = f"thruway {self.version}"

    def drive(self, scenarios: list[Scenario]) -> None:
        for number, scenario in enumerate(scenarios):
            share = self.suite.left(1e9) * scenario.weight / sum(one.weight for one in scenarios[number:])
            self.suite.step(scenario.name, lambda scenario=scenario, share=share: self.scenario(scenario, share))

    def scenario(self, scenario: Scenario, share: float) -> None:
        until = time.monotonic() + share
        data = {"systems": {}, "repeat": scenario.repeat, "device": self.args.device}
        self.data[scenario.name] = data
        if scenario.name == "save":
            data["bytes"] = max(1, round(4.3e9 * self.args.scale))
        else:
            model = self.model(scenario.name)
            files = sorted(model.glob("*.safetensors"))
            data["bytes"] = sum(path.stat().st_size for path in files)
            data["tensors"] = len(peers.expected_bytes(files))
        what = f"{data['tensors']:,} tensors, " if "tensors" in data else ""
        data["title"] = f"{what}{data['bytes'] / 1e9:.3g} GB, {scenario.title}"
        systems = [system for system in scenario.systems if self.args.device != "cpu" or system.name in ON_CPU]
        for system in systems:
            data["systems"][system.label] = {"processes": [], "skipped": NO_TIME}
        for number in range(self.args.rounds):
            if scenario.name == "cold":
                self.drive_limit(data, number)
            for system in systems:
                entry = data["systems"][system.label]
                expected = self.seconds.get((scenario.name, system.label), 0.0)
                # The first round is everybody's; after it only what fits into the scenario's share.
                if number > 0 and (
                    not entry["processes"]
                    or time.monotonic() + expected > until
                    or (tables.is_peer(system.label) and far_behind(data["systems"], system.label))
                ):
                    continue
                self.step(scenario, system, entry, number)
                self.suite.write()

    def step(self, scenario: Scenario, system: System, entry: dict, number: int) -> None:
        begun = time.monotonic()
        try:
            told = self.once(scenario, system, number)
            entry["processes"].append({"round": number, **told})
            entry["skipped"] = None
            outcome = f"{told['runs'][0]['seconds']:.3f} s, first"
        except Exception as error:
            text = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
            outcome = entry["failure"] = text
            if not entry["processes"]:
                entry["skipped"] = text
        seconds = time.monotonic() - begun
        self.seconds[scenario.name, system.label] = seconds
        say(f"peers: {scenario.name}: {system.label}: {outcome} ({seconds:.1f} s in all)")

    def once(self, scenario: Scenario, system: System, number: int) -> dict:
        """One process of one system; gives its runs."""
        if scenario.name == "save":
            return self.save(scenario, system)
        model = self.models[scenario.name]
        files = sorted(model.glob("*.safetensors"))
        repeat = 1 if system.slow else scenario.repeat
        cold = scenario.name == "cold"
        if not cold and system.name != "limit":
            self.warm(files)
        if system.name == "command":
            return self.command(scenario, model, files, repeat)
        command = [self.python, HERE / "peers.py", system.name, model, "--repeat", str(repeat)]
        command += ["--device", self.args.device, *(["--cold"] if cold else ["--memory"] if number == 0 else [])]
        return self.suite.run(command, scenario.limit, self.environment(system)).json()

    def command(self, scenario: Scenario, model: Path, files: list[Path], repeat: int) -> dict:
        if scenario.name == "cold":
            peers.drop_page_cache(files)
        device = "host" if self.args.device == "cpu" else self.args.device
        command = [self.args.thruway, "--json", "load", model, "--device", device, "--repeat", str(repeat)]
        told = self.suite.run(command, scenario.limit).json()
        runs = [{"seconds": one["elapsed_seconds"], "cpu_seconds": one["cpu_seconds"]} for one in told["runs"]]
        known = {"name": "command", "version": self.version, "bytes": told["bytes"], "tensors": told["tensors"]}
        return {**known, "runs": runs, "peak_host_bytes": told["peak_host_bytes"], "taken": peers.taken([told])}

    def save(self, scenario: Scenario, system: System) -> dict:
        size, count = self.data["save"]["bytes"], str(scenario.repeat)
        command = [self.python, HERE / "save_peers.py", system.name, self.place, "--bytes", str(size)]
        command += ["--repeat", count, "--device", self.args.device]
        return self.suite.run(command, scenario.limit, self.environment(system)).json()

    # ------------------------------------------------------------------ the same start for all

    def environment(self, system: System) -> dict[str, str]:
        packages = [self.place / "packages-candidate"] if system.candidate else []
        return {**environment([*packages, self.place / "packages"], self.libraries), **system.env}

    def model(self, scenario: str) -> Path:
        """Makes the model of a scenario. Three of them have the same."""
        kind = "llama" if scenario in ("cached", "transformers", "cold") else scenario
        directory = self.place / kind
        if not directory.exists():
            if kind == "llama":
                width = max(64, round(4096 * self.args.scale**0.5 / 64) * 64)
                gen_model.make(directory, "4", 20, width=width)
            else:
                gen_model.make(directory, kind, scale=self.args.scale)
        self.models[scenario] = directory
        return directory

    def warm(self, files: list[Path]) -> None:
        """Whatever ran before, all of the model is in the page cache now."""
        total = sum(path.stat().st_size for path in files)
        if sum(map(direct_io.resident_bytes, files)) < total:
            direct_io.warm(files)
            left = total - sum(map(direct_io.resident_bytes, files))
            if left > total // 100:
                raise StepError(f"{left} bytes of the model do not stay in the page cache")

    def drive_limit(self, data: dict, number: int) -> None:
        """The drive's rate on the same files, beside: the best shape is sought once and tried again in each round."""
        files = sorted(self.models["cold"].glob("*.safetensors"))
        try:
            direct_io.evict_wholly(files)
            if number == 0:
                rate, self.shape = direct_io.best_shape(lambda shape: direct_io.read_rate(files, shape))
                data["limit_shape"] = str(self.shape)
            else:
                rate = direct_io.read_rate(files, self.shape)
            data.setdefault("limits", []).append(rate)
        except OSError as error:
            say(f"peers: cold: the drive's limit is not known: {error}")


def main() -> int:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of the peers' wheels")
    parser.add_argument("--own", type=Path, help="folder of Thruway's wheel, if the interpreter has not got it")
    parser.add_argument("--candidate", type=Path, help="folder of wheels that replace others")
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the drive, with 20 GB free")
    parser.add_argument("--thruway", type=Path, required=True, help="the release binary")
    parser.add_argument("--json", type=Path, required=True, help="where all figures go")
    parser.add_argument("--seconds", type=float, default=3600, help="the most time that all may take")
    parser.add_argument("--scale", type=float, default=1.0, help="of all models")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each system in each scenario, at most")
    parser.add_argument("--scenarios", default=",".join(names), help="those to run, with commas between")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu to try the script")
    parser.add_argument("--python", help="an interpreter with torch; looked for by default")
    args = parser.parse_args()
    chosen = args.scenarios.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"no such scenarios: {', '.join(sorted(unknown))}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    known = {**facts.machine(args.dir), "scale": args.scale, "device": args.device, "rounds": args.rounds}
    known["command"] = f"bench/run_peers.py --scenarios {args.scenarios} --rounds {args.rounds} --scale {args.scale:g}"
    suite = Suite(args.json.stem, args.seconds, args.json.resolve().parent, known)
    place = args.dir / "peers"
    try:
        Driver(suite, args).drive([scenario for scenario in SCENARIOS if scenario.name in chosen])
    finally:
        shutil.rmtree(place, ignore_errors=True)
        suite.write()
    for table in tables.peers(suite.data):
        print("\n".join(table.plain()), flush=True)
    ours = [
        one["systems"]["thruway"] for one in suite.data.get("scenarios", {}).values() if "thruway" in one["systems"]
    ]
    return int(not ours or any(not entry["processes"] for entry in ours))


if __name__ == "__main__":
    sys.exit(main())
