"""The package in a process: imports, threads, forks, signals, memory, and the command."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import thruway
import thruway.numpy as ours


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ours.save_file(
        {f"t{number}": np.full(50_000, number, np.int32) for number in range(20)}, tmp_path / "model.safetensors"
    )
    return tmp_path / "model.safetensors"


def assert_right(arrays: dict[str, np.ndarray]) -> None:
    assert len(arrays) == 20
    assert all((array == int(name[1:])).all() for name, array in arrays.items())


def test_importing_brings_neither_torch_nor_numpy_along() -> None:
    program = "import sys, thruway; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_threads_load_at_once(path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for arrays in threads.map(lambda _: ours.load_file(path, backend="pread"), range(64)):
            assert_right(arrays)


def _in_child(path: Path) -> None:
    assert_right(ours.load_file(path, backend="pread"))
    os._exit(7)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_loads_for_itself(path: Path) -> None:
    assert_right(ours.load_file(path, backend="pread"))
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == 7


def _with_a_handle(opened: thruway.safe_open) -> None:
    with pytest.raises(thruway.UnsupportedError, match="forked"):
        opened.get_tensor("t1")
    os._exit(7)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_handle_from_before_a_fork_is_refused_and_does_not_hang(path: Path) -> None:
    opened = thruway.safe_open(path, "np", backend="pread")
    child = multiprocessing.get_context("fork").Process(target=_with_a_handle, args=(opened,))
    child.start()
    child.join(60)
    assert child.exitcode == 7


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal's program has it: one that was started in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file that takes a while to read: 2 GiB, nearly all of them a hole that takes up no room on the drive."""
    path = tmp_path / "large.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [2 << 30], "data_offsets": [0, 2 << 30]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + (2 << 30))
    return path


def test_ctrl_c_stops_a_load_and_the_next_one_works(path: Path, large: Path, interruptible: None) -> None:
    """The signal comes while bytes move: the progress callback, which runs on this thread, sends it."""
    sent = []

    def send(moved: int) -> None:
        sent.append(moved)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        ours.load_file(large, backend="pread", progress=send)
    assert len(sent) == 1 and sent[0] < 2 << 30
    assert_right(ours.load_file(path, backend="pread"))


def test_a_callback_that_fails_ends_the_load(large: Path) -> None:
    told = []

    def fail(moved: int) -> None:
        told.append(moved)
        raise LookupError("no")

    with pytest.raises(LookupError):
        ours.load_file(large, backend="pread", progress=fail)
    assert len(told) == 1 and told[0] < 2 << 30


def test_a_program_may_end_while_a_thread_of_it_loads(large: Path) -> None:
    program = """
import sys, threading, thruway.numpy

told = threading.Event()
load = lambda: thruway.numpy.load_file(sys.argv[1], backend="pread", progress=lambda moved: told.set())
threading.Thread(target=load, daemon=True).start()
told.wait()
print("ends")
"""
    for _ in range(3):
        told = subprocess.run(
            [sys.executable, "-c", program, large], capture_output=True, text=True, timeout=60, check=False
        )
        # The thread may have time to say that its load was given up.
        assert (told.returncode, told.stdout) == (0, "ends\n"), told.stderr


def test_the_bytes_of_more_than_two_gigabytes() -> None:
    """Whose length no 32-bit number holds."""
    zeros = np.zeros((2 << 30) + 8, np.uint8)
    zeros[-1] = 7
    saved = ours.save({"a": zeros})
    assert saved[-1] == 7 and len(saved) > len(zeros)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_loads_hold_no_memory_and_no_descriptor(path: Path) -> None:
    def work(count: int) -> None:
        for _ in range(count):
            ours.load_file(path, backend="pread")
            ours.load_file(path)

    work(100)
    before, descriptors = _resident_bytes(), len(list(Path("/proc/self/fd").iterdir()))
    work(1000)
    assert _resident_bytes() - before < 16 << 20
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_the_command_is_there_with_its_exit_status(path: Path) -> None:
    command = Path(sysconfig.get_path("scripts")) / "thruway"
    for start in ([command], [sys.executable, "-m", "thruway"]):
        told = subprocess.run([*start, "--json", "inspect", path], capture_output=True, text=True, check=True)
        assert len(json.loads(told.stdout)["tensors"]) == 20
        assert subprocess.run([*start, "load", "/nothing"], capture_output=True, check=False).returncode == 1
        assert subprocess.run([*start, "bogus"], capture_output=True, check=False).returncode == 2
