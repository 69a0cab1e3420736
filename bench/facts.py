"""The facts of a machine that stand beside what was measured on it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path


def _field(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), None)


def _gpu() -> dict[str, str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    asked = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(asked.split(","), map(str.strip, told[0].split(",")), strict=False)) if told else None


def filesystem(directory: Path) -> str:
    """The type and the source of the mount that a directory lies on."""
    place, best = directory.resolve(), ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, point, kind = line.split()[:3]
        if place.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, f"{kind} on {source}")
    return best[1]


def machine(directory: Path) -> dict:
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": filesystem(directory),
        "gpu": _gpu(),
    }
