#!/usr/bin/env python3
"""Makes the tables of a page from the JSON of measurements.

    tables.py docs/benchmarks.md RESULT.json...     rewrites what stands between the markers of each result's kind
    tables.py --print RESULT.json...                prints the tables

A kind is what measured it: `host-load` (bench/host_load.py), `peers` (bench/run_peers.py), `checkpoint` (the suite of
scripts/gpu-check), `recovery` (bench/recovery.py), `speed` (other suites of gpu-check).
Several results of the kind `peers` are put together, so that its scenarios may be measured in several runs on the same
machine. The markers are HTML comments, `<!-- begin KIND -->` and `<!-- end KIND -->`, and figures between them are not
to be edited by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

KINDS = ("host-load", "peers", "speed", "checkpoint", "recovery")
LIMIT, OURS = "limit", "thruway"
# So small that a rate says little: these are told in milliseconds.
IN_MILLISECONDS = ("many", "small")


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def plain(self) -> list[str]:
        cells = [[name.upper() for name in self.header], *self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return ["", self.title, *lines, *self.remarks]

    def markdown(self) -> list[str]:
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.header) + " |", "|---" * len(self.header) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        return [
            *lines,
            "",
            *[f"{remark[:1].upper()}{remark[1:]}." for remark in self.remarks],
            *[""] * bool(self.remarks),
        ]


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def ranged(values: Sequence[float]) -> str:
    """The median, and the range where there is one."""
    if not values:
        return ""
    if len(values) == 1:
        return number(values[0])
    return f"{number(median(values))} ({number(min(values))} to {number(max(values))})"


# ------------------------------------------------------------------------------------ peers


def is_peer(label: str) -> bool:
    """Whether a system is another's and gives tensors, as Thruway does: it is what Thruway is held against."""
    return not label.startswith((OURS, LIMIT)) and "raw" not in label


def seconds_of(system: dict[str, Any], repeated: bool) -> list[float]:
    """What the first load took in each process of a system, or those that followed it."""
    chosen = slice(1, None) if repeated else slice(1)
    return [run["seconds"] for process in system["processes"] for run in process["runs"][chosen]]


def peers(data: dict[str, Any]) -> list[Table]:
    """One table for each scenario of bench/run_peers.py."""
    return [scenario_table(name, scenario) for name, scenario in data.get("scenarios", {}).items()]


def scenario_table(name: str, scenario: dict[str, Any]) -> Table:
    timed = name in IN_MILLISECONDS
    unit = "ms" if timed else "GB/s"
    header = [
        "system",
        "version",
        f"first, {unit}",
        f"repeated, {unit}",
        "CPU, s/GB",
        "host memory, GB",
        "GPU memory, GB",
    ]
    table = Table(scenario["title"], [*header, "processes", "note"])
    firsts, repeats = {}, {}
    for label, entry in scenario["systems"].items():
        processes = entry["processes"]
        if not processes:
            table.rows.append([label, *[""] * 7, f"SKIP: {short(entry['skipped'])}"])
            continue
        is_limit = label.startswith(LIMIT)
        size = processes[0]["bytes"] if is_limit or name == "save" else scenario["bytes"]
        first, later = (
            [seconds * 1e3 if timed else size / seconds / 1e9 for seconds in seconds_of(entry, repeated)]
            for repeated in (False, True)
        )
        cpu = median(process["runs"][0]["cpu_seconds"] for process in processes) / size * 1e9
        notes = sorted({way for process in processes for way in process.get("taken", [])})
        notes += [f"once failed: {short(entry['failure'])}"] if entry.get("failure") else []
        if is_limit:
            first = []
        else:
            firsts[label], repeats[label] = first, later
        table.rows.append(
            [
                label,
                processes[0]["version"],
                ranged(first),
                ranged(later),
                number(cpu),
                most(processes, "peak_host_bytes"),
                most(processes, "peak_device_bytes"),
                str(len(processes)),
                "; ".join(notes),
            ]
        )
    if scenario.get("limits"):
        what = "O_DIRECT write of fresh files, synced" if name == "save" else "O_DIRECT read of the same files"
        shape = f"best of several shapes: {scenario['limit_shape']}" if scenario.get("limit_shape") else ""
        table.rows.append([f"{LIMIT}: {what}", "", "", ranged(scenario["limits"]), *[""] * 4, shape])
    if scenario.get("device") == "cpu":
        table.remarks.append("a trial without a GPU: these figures say nothing about loads to one")
        return table
    for what, found in (("first", firsts), ("repeated", repeats)):
        table.remarks += beside(what, found, timed)
    return table


def most(processes: list[dict[str, Any]], what: str) -> str:
    """The most that any process took, in GB; nothing if none was asked."""
    told = [process[what] for process in processes if process.get(what) is not None]
    return number(max(told) / 1e9) if told else ""


def beside(what: str, found: dict[str, list[float]], timed: bool) -> list[str]:
    """How Thruway stands beside the best of those that give tensors as it does."""
    others = {label: median(values) for label, values in found.items() if values and is_peer(label)}
    if not found.get(OURS) or not others:
        return []
    ours = median(found[OURS])
    best = (min if timed else max)(others, key=lambda label: others[label])
    ratio = others[best] / ours if timed else ours / others[best]
    return [f"{what}: thruway is {ratio:.2f} times as fast as the best of the others ({best})"]


def short(text: str | None) -> str:
    """The last line of a message, which is where Python says what was wrong."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return re.sub(r"(/[\w.+-]+){2,}/", "", lines[-1])[:120] if lines else "no reason was told"


# -------------------------------------------------------------------------------- host loads


def host_load(data: dict[str, Any]) -> list[Table]:
    """Two tables for each model of bench/host_load.py."""
    found = []
    titles = data.get("titles", {})
    header = ["load", "GB/s", "runs", "CPU, s/GB", "thruway beside it"]
    for label, model in data.get("models", {}).items():
        size = model["bytes"]

        def rates(runs: list[dict], size: int = size) -> list[float]:
            return [size / one["seconds"] / 1e9 for one in runs]

        def ours(runs: list[dict], size: int = size) -> list[str]:
            cpu = median(one["cpu_seconds"] for one in runs) / size * 1e9
            return [ranged(rates(runs)), str(len(runs)), number(cpu)]

        if model.get("cached"):
            middle = {name: median(rates(runs)) for name, runs in model["cached"].items()}
            found.append(Table(f"{label}, cached", header))
            for name, runs in model["cached"].items():
                beside = f"by {ways(runs)}" if name == OURS else f"{middle[OURS] / middle[name]:.2f} times as fast"
                found[-1].rows.append([titles[name], *ours(runs), beside])
        if model.get("cold"):
            runs = model["cold"]["runs"]
            found.append(Table(f"{label}, cold", header))
            found[-1].rows.append([titles[OURS], *ours(runs), f"by {ways(runs)}"])
            again = ", into the same buffers again and again"
            reads = [(shape, "", values) for shape, values in model["cold"]["limits"].items()]
            reads += [(shape, again, values) for shape, values in model["cold"].get("recycled", {}).items()]
            for shape, into, values in reads:
                # Of the same round: a drive that others use too changes more from minute to minute.
                ratio = f"{median(one / beside for one, beside in zip(rates(runs), values, strict=True)):.3f} of it"
                found[-1].rows.append([f"O_DIRECT read, {shape}{into}", ranged(values), str(len(values)), "", ratio])
    return found


def ways(runs: list[dict[str, Any]]) -> str:
    """The paths that the bytes of all runs took."""
    sums: dict[str, int] = {}
    for one in runs:
        for way, count in one["taken"].items():
            path = f"`{way.split(' ')[0]}`"
            sums[path] = sums.get(path, 0) + count
    total = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return ordered[0][0] if len(ordered) == 1 else ", ".join(f"{path} {count / total:.1%}" for path, count in ordered)


# ------------------------------------------------------------------------------- checkpoints


def checkpoint_seconds(system: dict[str, Any]) -> list[float]:
    """What each save of a system took until it was synced."""
    return [run["seconds"] for process in system["processes"] for run in process["runs"]]


def checkpoint(result: dict[str, Any]) -> list[Table]:
    """All systems side by side, and what is held against bars."""
    data, found = result["data"], []
    for title, key in (("synced", "runs"), ("in the background", "background")):
        columns = BACKGROUND_COLUMNS if key == "background" else {}
        header = ["system", "version", *columns.values(), "durable after, s", "GB/s", "CPU, s/GB", "runs", "note"]
        table = Table(f"A state of {data['bytes'] / 1e9:.3g} GB saved {title}", header)
        for label, system in data["systems"].items():
            if ("async" in label) == (key == "background"):
                table.rows.append(checkpoint_row(label, system, columns))
        if key == "runs" and data["systems"][OURS]["processes"]:
            process = data["systems"][OURS]["processes"][0]
            shape = f"best of several shapes: {process['limit_shape']}"
            what = f"{LIMIT}: O_DIRECT write of fresh files, synced"
            table.rows.append([what, "", "", ranged(process["limits"]), "", str(len(process["limits"])), shape])
        if data.get("device") == "cpu":
            table.remarks.append("a trial without a GPU: these figures say nothing about saves from one")
        found.append(table)
    return [*found, *(speed(result["rows"], "What checkpoints are held against") if result["rows"] else [])]


BACKGROUND_COLUMNS = {
    "blocked_seconds": "call returns after, s",
    "stream_free_seconds": "stream free after, s",
    "staged_seconds": "tensors may change after, s",
}


def checkpoint_row(label: str, system: dict[str, Any], columns: dict[str, str]) -> list[str]:
    processes = system["processes"]
    if not processes:
        return [label, *[""] * (len(columns) + 5), f"SKIP: {short(system['skipped'])}"]
    runs, size = [run for process in processes for run in process["runs"]], processes[0]["bytes"]
    seconds = [run["seconds"] for run in runs]
    pinned = [process["prepare_seconds"] for process in processes if columns and "prepare_seconds" in process]
    note = f"memory pinned before, in {number(median(pinned))} s" if pinned else ""
    cells = [ranged([run[column] for run in runs]) for column in columns]
    cells += [ranged(seconds), ranged([size / one / 1e9 for one in seconds])]
    cells += [number(median(run["cpu_seconds"] for run in runs) / size * 1e9), str(len(runs))]
    note += f"; once failed: {short(system['failure'])}" if system.get("failure") else ""
    return [label, processes[0]["version"], *cells, note.removeprefix("; ")]


# ---------------------------------------------------------------------------------- recovery


def recovery(data: dict[str, Any]) -> list[Table]:
    """What a kill costs a training, for each system of bench/recovery.py."""
    columns = {
        "lost_steps": "steps lost",
        "first_step_seconds": "first step after, s",
        "start_seconds": "of it start, s",
        "restore_seconds": "of it restore, s",
    }
    saves = f"saved every {data['every']} steps of about {number(data['step_seconds'])} s"
    title = f"A training on {data['device']} that is killed; its state of about {data['bytes'] / 1e9:.3g} GB is {saves}"
    table = Table(title, ["system", "version", *columns.values(), "kills"])
    for label, system in data["systems"].items():
        cells = [ranged([kill[column] for kill in system["kills"]]) for column in columns]
        table.rows.append([label, system["version"], *cells, str(len(system["kills"]))])
    return [table]


# -------------------------------------------------------------------------- the checks on a GPU


def speed(rows: list[dict[str, Any]], title: str = "Speed on a GPU") -> list[Table]:
    """The rows of a suite as they are."""
    table = Table(title, ["what", "figure", "bar", "", "note"])
    for row in rows:
        figure = "" if row["figure"] is None else f"{row['figure']:.4g} {row['unit']}".strip()
        table.rows.append([row["what"], figure, row["bar"], row["verdict"], short(row["note"]) if row["note"] else ""])
    return [table]


# ------------------------------------------------------------------------------------ the page


def kind_of(result: dict[str, Any]) -> str:
    data = result.get("data", {})
    if "scenarios" in data:
        return "peers"
    if result.get("suite") in ("checkpoint", "recovery"):
        return result["suite"]
    return "host-load" if "models" in data else "speed"


def machine(known: dict[str, Any]) -> str:
    """The facts that stand above the figures."""
    gpu = (known.get("gpu") or {}).get("name")
    driver = (known.get("gpu") or {}).get("driver_version")
    parts = [f"{known['cpu']}, {known['cores']} cores", f"{gigabytes(known['memory'])} of memory", known["filesystem"]]
    parts += [f"Linux {known['kernel']}", f"Python {known['python']}"]
    parts += [f"{gpu}, driver {driver}"] if gpu else ["no GPU"]
    if known.get("load_before"):
        loads = [f"{known[key][0]:.1f}" for key in ("load_before", "load_after") if known.get(key)]
        parts.append(f"load average {' before, '.join(loads)} after")
    if known.get("thruway"):
        parts.append(known["thruway"])
    return "; ".join(parts) + "."


def gigabytes(memory: str | None) -> str:
    """As /proc/meminfo says it, `24684084 kB`."""
    return f"{int(memory.split()[0]) * 1024 / 1e9:.1f} GB" if memory else "an unknown amount"


def section(kind: str, results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for known in {machine(result["facts"]): result["facts"] for result in results}.values():
        lines += [f"Machine: {machine(known)}"]
        lines += [f"Command: `{known['command']}`", ""] if known.get("command") else [""]
    return [*lines, *(line for table in made(kind, results) for line in table.markdown())]


def made(kind: str, results: list[dict[str, Any]]) -> list[Table]:
    if kind == "peers":
        merged: dict[str, Any] = {}
        for result in results:
            merged.update(result["data"]["scenarios"])
        return peers({"scenarios": merged})
    if kind == "host-load":
        return [table for result in results for table in host_load(result["data"])]
    if kind == "checkpoint":
        return [table for result in results for table in checkpoint(result)]
    if kind == "recovery":
        return [table for result in results for table in recovery(result["data"])]
    return [table for result in results for table in speed(result["rows"])]


def replace(text: str, kind: str, lines: list[str]) -> str:
    begin, end = f"<!-- begin {kind} -->", f"<!-- end {kind} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"error: the page has no place for '{kind}': it needs {begin} and {end}, in this order, once")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    body = "\n".join(lines).strip()
    return f"{head}{begin}\n{body}\n{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the tables; change no page")
    parser.add_argument("files", type=Path, nargs="+", help="the page, then the results")
    args = parser.parse_args()
    page, sources = (None, args.files) if args.print else (args.files[0], args.files[1:])
    if not sources:
        parser.error("there is no result to make tables from")
    results: dict[str, list[dict[str, Any]]] = {}
    for source in sources:
        result = json.loads(source.read_text())
        results.setdefault(kind_of(result), []).append(result)
    if page is None:
        for kind, group in results.items():
            print("\n".join(line for table in made(kind, group) for line in table.plain()))
        return 0
    text = page.read_text()
    for kind, group in results.items():
        text = replace(text, kind, section(kind, group))
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
