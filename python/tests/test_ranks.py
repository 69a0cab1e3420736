"""Ranks that save one checkpoint together: each restores its own; who fails or dies leaves no commit, and is named."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import thruway
import torch
import torch.distributed as dist
from test_checkpointer import Training, assert_same, copied
from thruway.torch import Checkpointer, Ranks

# No rank is waited for longer.
TIMEOUT = 10.0


def state_of(rank: int, step: int, big: int = 1000) -> dict[str, Any]:
    """Alike on all ranks but for what is a rank's own; the keys of both kinds are mixed."""
    # As many threads as a rank has: sums of floats depend on it.
    torch.set_num_threads(1)
    training = Training(seed=step)
    training.step()
    whole = training.state()
    mine = torch.Generator().manual_seed(1000 * step + rank)
    return {
        "random": mine.get_state(),
        "model": whole["model"],
        "shard": {"rows": torch.randn(big, rank + 1, generator=mine), "权重 ../x": torch.ones(rank), "rank": rank},
        "optimizer": whole["optimizer"],
        "data": {"position": rank * 7, "seen": [rank, (step, None)], "seed": 2**80 + rank, "nan": float("inf")},
        "scheduler": whole["scheduler"],
    }


SHARED = ("model", "optimizer", "scheduler")


def opened(place: Path, **options: Any) -> Checkpointer:
    return Checkpointer(place / "run", ranks="all", **{"shared": SHARED, "timeout": TIMEOUT, **options})


def failure(call: Callable[[], object]) -> dict[str, Any]:
    """What a call fails with, and after how long."""
    begun = time.monotonic()
    try:
        call()
    except thruway.ThruwayError as error:
        told = {"kind": type(error).__name__, "message": str(error), "rank": error.context.get("rank")}
        return {**told, "seconds": time.monotonic() - begun}
    return {"kind": "none"}


def save_and_restore(place: Path) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    run = opened(place, keep=2, shared={"model": world - 1, "optimizer": 0, "scheduler": 0})
    assert run.steps() == []
    told: dict[str, Any] = {"ids": []}
    for step in (1, 2):
        saved = run.save(step, state_of(rank, step), metadata={"step": str(step)})
        told["ids"].append(saved.save_id)
        assert saved.path.name == f"step-{step:08}" and saved.path.is_dir() and not saved.warnings
    assert_same(run.restore(), state_of(rank, 2))
    assert_same(run.restore(1), state_of(rank, 1))
    assert_same(run.restore(2, only=["data", "model"]), {key: state_of(rank, 2)[key] for key in ("model", "data")})
    other = Training(seed=99)
    step, values = run.restore_into({"model": other.model, "shard": None, "random": None}, 1)
    assert step == 1
    assert_same(other.model.state_dict(), state_of(rank, 1)["model"])
    assert_same(values, {key: state_of(rank, 1)[key] for key in ("shard", "random")})
    state = state_of(rank, 3)
    saving = run.save_async(3, state)
    for tensor in state["shard"].values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    saved = saving.wait()
    told["ids"].append(saved.save_id)
    told["removed"] = saved.removed
    assert_same(run.restore(), state_of(rank, 3))
    assert run.save(3, state_of(rank, 4), replace=True).path.name == "step-00000003"
    assert_same(run.restore(3), state_of(rank, 4))
    told["steps"] = run.steps()
    return told


def beside_training(place: Path) -> dict[str, Any]:
    """Saves go on in the background while the trainer's collectives do, on the same group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    run = opened(place, keep=3)
    for step in range(8):
        run.save_async(step, state_of(rank, step, big=20_000))
        for _ in range(20):
            number = torch.tensor([float(rank)])
            dist.all_reduce(number)
            assert number.item() == sum(range(world))
    run.wait()
    assert run.steps() == [5, 6, 7]
    assert_same(run.restore(), state_of(rank, 7, big=20_000))
    return {}


def one_fails(place: Path) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    run = opened(place)
    run.save(1, state_of(rank, 1))
    told = []
    # In every rank once: a value that cannot be saved, a step that is there, and storage that fails.
    for failing in range(world):
        bad = {**state_of(rank, 2), "bad": object()} if rank == failing else state_of(rank, 2)
        told.append(failure(lambda bad=bad: run.save(2, bad)))
    told.append(failure(lambda: run.save(1, state_of(rank, 2))))
    told.append(failure(lambda: run.save(10 + rank, state_of(rank, 2))))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    told.append(failure(lambda: run.save(2, state_of(rank, 2, big=50_000))))
    told.append(failure(lambda: run.save_async(2, state_of(rank, 2, big=50_000)).wait()))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert_same(run.restore(), state_of(rank, 1))
    run.save(2, state_of(rank, 2))
    assert_same(run.restore(), state_of(rank, 2))
    return {"told": told, "steps": run.steps()}


def one_is_late(place: Path) -> dict[str, Any]:
    """One rank does not come to a save; then it does, and hears that it is too late; then all go on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    run = opened(place, timeout=2.0)
    state = state_of(rank, 1)
    dist.barrier()
    if rank == world - 1:
        dist.barrier()
        told = failure(lambda: run.save(1, state))
    else:
        told = failure(lambda: run.save(1, state))
        dist.barrier()
    dist.barrier()
    run.save(2, state)
    assert run.steps() == [2]
    return told


def one_dies(place: Path) -> dict[str, Any]:
    """One rank is killed while it writes; the others are told within the timeout."""
    rank = dist.get_rank()
    state = state_of(rank, 1)
    dist.barrier()
    run = opened(place, timeout=2.0)
    run.save(1, state)
    dying = int(os.environ["DYING_RANK"])
    # No barrier of gloo's: the other may still be in it when this rank is gone.
    (place / f"heard-{rank}").touch()
    while not (place / f"heard-{1 - rank}").exists():
        time.sleep(0.01)
    if rank == dying:
        saving = run.save_async(2, state)
        os.kill(os.getpid(), signal.SIGKILL)
        saving.wait()
    elif os.environ["DYING_WAY"] == "async":
        saving = run.save_async(2, state)
        told = failure(saving.wait)
    else:
        told = failure(lambda: run.save(2, state))
    return told


def restore_damaged(place: Path) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    run = opened(place)
    for step in (1, 2):
        run.save(step, state_of(rank, step))
    dist.barrier()
    if rank == 0:
        # Only the last rank reads it.
        (path,) = (place / "run/step-00000002").glob(f"rank-{world - 1:05}-shard*.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    told = [failure(run.restore)]
    with pytest.warns(RuntimeWarning, match=rf"taking the one before: rank {world - 1}"):
        step, state = run.restored(fallback=True)
    assert step == 1
    assert_same(state, state_of(rank, 1))
    told.append(failure(lambda: run.restore(1 + rank % 2)))
    told.append(failure(lambda: run.restore(77)))
    return {"told": told}


def other_world(place: Path) -> dict[str, Any]:
    run = opened(place)
    state = run.restore(only=["model"])
    assert_same(state, {"model": state_of(0, 1)["model"]})
    return failure(run.restore)


def save_one(place: Path) -> dict[str, Any]:
    opened(place).save(1, state_of(dist.get_rank(), 1))
    return {}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    one.__name__: one
    for one in (
        save_and_restore,
        beside_training,
        one_fails,
        one_is_late,
        one_dies,
        restore_damaged,
        other_world,
        save_one,
    )
}


def _rank(rank: int, world: int, place: str, case: str, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        told = CASES[case](Path(place))
        (Path(place) / f"{case}-{rank}.json").write_text(json.dumps(told))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if case != "one_dies":
        # Else one may be gone while another still talks to it, which gloo ends the process for.
        dist.barrier()
    os._exit(0)


def run(place: Path, world: int, case: str, dead: int | None = None) -> list[dict[str, Any]]:
    """Runs a case on so many ranks; what each tells that lives."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, world, str(place), case, port)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [-9 if rank == dead else 0 for rank in range(world)]
    return [json.loads((place / f"{case}-{rank}.json").read_text()) for rank in range(world) if rank != dead]


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_restores_what_it_saved_bit_by_bit(tmp_path: Path, world: int) -> None:
    told = run(tmp_path, world, "save_and_restore")
    assert all(one == told[0] for one in told) and len(set(told[0]["ids"])) == 3
    assert (told[0]["removed"], told[0]["steps"]) == ([1], [2, 3])
    step = tmp_path / "run/step-00000003"
    # What is shared is there once, and the model as any program opens it.
    shards = [path.name for path in step.iterdir() if path.suffix == ".safetensors"]
    assert sorted(name for name in shards if not name.startswith("rank-")) == [
        "model.safetensors",
        "optimizer.safetensors",
    ]
    assert len([name for name in shards if "-shard" in name]) == world
    manifest = json.loads((step / "manifest.json").read_text())["manifest"]
    assert manifest["world"]["ranks"] == world and len(manifest["structure"]) == world
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".step")]
    assert Checkpointer(tmp_path / "run").verify(3) == []


def test_saves_beside_training_leave_its_collectives_alone(tmp_path: Path) -> None:
    run(tmp_path, 2, "beside_training")


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_fails_is_named_to_all_and_nothing_is_committed(tmp_path: Path, world: int) -> None:
    told = run(tmp_path, world, "one_fails")
    for rank, one in enumerate(told):
        assert one["steps"] == [1, 2]
        *bad, there, different, full, full_async = one["told"]
        for failing, heard in enumerate(bad):
            assert heard["kind"] == "InvalidInputError" and heard["rank"] == str(failing), heard
            assert "bad" in heard["message"] and (rank == failing or f"rank {failing} failed" in heard["message"])
        assert there["kind"] == "AlreadyExistsError" and there["rank"] == "0"
        assert different["kind"] == "InvalidInputError" and int(different["rank"]) > 0
        assert "and rank 0 step 10" in different["message"]
        for heard in (full, full_async):
            assert heard["rank"] == str(world - 1) and heard["kind"] in ("StorageError", "NoSpaceError"), heard
        assert all(heard["seconds"] < TIMEOUT for heard in one["told"])


def test_a_rank_that_does_not_come_is_named_and_all_go_on_together(tmp_path: Path) -> None:
    for one in run(tmp_path, 3, "one_is_late"):
        assert (one["kind"], one["rank"]) == ("LimitReachedError", "2"), one


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_leaves_no_commit_and_nobody_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dying: int, way: str
) -> None:
    monkeypatch.setenv("DYING_RANK", str(dying))
    monkeypatch.setenv("DYING_WAY", way)
    for one in run(tmp_path, 2, "one_dies", dead=dying):
        # With the first rank the store is gone too, which is noticed at once.
        assert one["kind"] == ("LimitReachedError" if dying else "StorageError") and one["seconds"] < 5, one
        assert one["rank"] == "1" and (dying or "cannot be reached" in one["message"]), one
    left = Checkpointer(tmp_path / "run")
    assert left.steps() == [1] and left.verify(1) == []


def test_all_ranks_restore_the_same_step_or_none(tmp_path: Path) -> None:
    for one in run(tmp_path, 2, "restore_damaged"):
        damaged, different, absent = one["told"]
        assert (damaged["kind"], damaged["rank"]) == ("MismatchError", "1")
        assert (different["kind"], different["rank"]) == ("InvalidInputError", "1")
        assert (absent["kind"], absent["rank"]) == ("NotFoundError", "0")


def test_another_number_of_ranks_restores_what_is_shared_and_is_told_what_to_use_for_the_rest(tmp_path: Path) -> None:
    run(tmp_path, 2, "save_one")
    for one in run(tmp_path, 3, "other_world"):
        assert (
            one["kind"] == "InvalidInputError" and "saved by 2 ranks together, and is restored by 3" in one["message"]
        )
    alone = Checkpointer(tmp_path / "run")
    assert_same(
        alone.restore(only=["model", "scheduler"]), {key: state_of(0, 1)[key] for key in ("model", "scheduler")}
    )
    with pytest.raises(thruway.InvalidInputError, match=r"saved by 2 ranks") as raised:
        alone.restore()
    assert raised.value.hint is not None and "thruway.torch.dcp" in raised.value.hint


def test_ranks_need_no_process_group(tmp_path: Path) -> None:
    """Of a store alone; here one rank, so that nobody else is needed."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    run = Checkpointer(tmp_path / "run", ranks=Ranks(0, 1, store), shared=["model"])
    run.save(1, state_of(0, 1))
    assert_same(run.restore(), state_of(0, 1))
    assert_same(Checkpointer(tmp_path / "run").restore(), state_of(0, 1))


def test_whatever_is_killed_when_the_newest_checkpoint_restores_and_nothing_is_left(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts/crash-soak"
    command = [sys.executable, str(script), str(tmp_path / "soak"), "--rounds", "8", "--longest", "0.3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["rounds"] == 8 and found["last step"] > 0 and found["saves cut in the middle"] > 0


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    store = dist.HashStore()
    with pytest.raises(thruway.UnsupportedError, match="no process group"):
        Checkpointer(tmp_path, ranks="all")
    with pytest.raises(thruway.InvalidInputError, match="give `ranks` too"):
        Checkpointer(tmp_path, shared=["model"])
    with pytest.raises(thruway.InvalidInputError, match="no rank 2 of 2"):
        Checkpointer(tmp_path, ranks=Ranks(2, 2, store))
    with pytest.raises(thruway.InvalidInputError, match="saved by rank 1 of 1"):
        Checkpointer(tmp_path, ranks=Ranks(0, 1, store), shared={"model": 1})
    run = Checkpointer(tmp_path, ranks=Ranks(0, 1, store), shared=["model"])
    for state, message in (({"x": 1}, "has no 'model'"), ([1], "is a dict"), ({"model": 1, 2: 3}, "are text")):
        with pytest.raises(thruway.InvalidInputError, match=message):
            run.save(1, state)
    assert_same(copied({"model": 1}), {"model": 1})


def test_long_notes_go_in_pieces() -> None:
    from thruway.torch._ranks import _PIECE, Notes

    notes = Notes(dist.HashStore(), "save")
    for name, text in {"none": "", "one": "x", "three": "ä\n" * _PIECE + "x", "two": "x" * (2 * _PIECE)}.items():
        assert notes.get(name) is None
        notes.put(name, text)
        assert notes.get(name) == text
    notes.take_down()
    assert notes.get("three") is None and notes.get("one") is None
