"""Checkpoints of training runs: what is saved is of the moment of the call, and comes back or is refused by name."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import thruway
import torch
from thruway import _save
from thruway.torch import Checkpointer, _tensors

safetensors = pytest.importorskip("safetensors.torch")


class Training:
    """A small network that is trained on data that its own random state gives."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(30, 70), torch.nn.BatchNorm1d(70), torch.nn.ReLU(), torch.nn.Linear(70, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.random = torch.Generator().manual_seed(seed + 1)
        self.steps = 0

    def step(self) -> None:
        data = torch.randn(8, 30, generator=self.random)
        self.optimizer.zero_grad()
        self.model(data).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": self.random.get_state(),
            "steps": self.steps,
        }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert (
            one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
            if one.dim()
            else one == other
        )
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for this, that in zip(one, other, strict=True):
            assert_same(this, that)
    else:
        assert one == other


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return type(state)((key, copied(value)) for key, value in state.items())
    return type(state)(copied(one) for one in state) if isinstance(state, list | tuple) else state


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 0x10
    file.write_bytes(content)


def test_a_state_of_everything_comes_back(tmp_path: Path) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    state = {
        "model": {
            "w": torch.randn(5, 7),
            "tied": shared,
            "again": shared,
            "row": shared[1],
            "t": torch.randn(4, 3).t(),
        },
        "half": [torch.randn(9).to(torch.bfloat16), torch.tensor(3, dtype=torch.int64), torch.zeros(0, 4)],
        "numpy": {"a": np.arange(5, dtype=np.int16), "key": np.random.default_rng(1).bytes(7)},
        "plain": (1, {2: "x", (3, 4): None}, float("inf"), 1 + 2j, True, [b"bytes"]),
        "lr": 1e-4,
    }
    run = Checkpointer(tmp_path / "run")
    saved = run.save(1000, state, metadata={"run": "7b"})
    assert (saved.step, saved.removed, saved.warnings) == (1000, [], [])
    assert saved.path == tmp_path / "run" / "step-00001000" and saved.receipt.bytes > 0
    restored = run.restore()
    assert_same(restored, state)
    tied = restored["model"]["tied"]
    assert (
        restored["model"]["again"].data_ptr() == tied.data_ptr()
        and restored["model"]["row"].data_ptr() == tied[1].data_ptr()
    )
    assert (run.steps(), run.metadata(1000), run.verify(1000)) == ([1000], {"run": "7b"}, [])
    assert_same(run.restore(only=["lr", "half"]), {"half": state["half"], "lr": state["lr"]})


def test_the_model_is_a_model_for_every_reader_of_safetensors(tmp_path: Path) -> None:
    training = Training()
    saved = Checkpointer(tmp_path).save(1, training.state())
    found, weights = safetensors.load_file(saved.path / "model.safetensors"), training.model.state_dict()
    assert_same({name: found[name] for name in weights}, dict(weights))
    assert len(found) == len(weights)
    assert set(thruway.torch.load_file(saved.path)) == set(training.model.state_dict())
    sharded = Checkpointer(tmp_path).save(2, training.state(), max_shard_bytes=4000)
    index = json.loads((sharded.path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(training.model.state_dict())
    assert_same(Checkpointer(tmp_path).restore(2), training.state())


@pytest.mark.parametrize("pool_bytes", [None, 100_000])
@pytest.mark.parametrize("guarded", [False, True])
def test_what_is_saved_in_the_background_are_the_values_of_the_call(
    tmp_path: Path, pool_bytes: int | None, guarded: bool
) -> None:
    training = Training()
    run = Checkpointer(tmp_path, pool_bytes=pool_bytes)
    expected = {}
    for step in range(5):
        training.step()
        expected[step] = copied(training.state())
        saving = run.save_async(step, training.state(), guard=training.optimizer if guarded else ())
        assert saving.step == step
    training.step()
    assert saving.wait_staged() and saving.staged_seconds is not None
    assert saving.wait_for("durable", 60)
    assert (saving.wait().step, saving.wait().path, saving.done(), saving.level) == (
        4,
        tmp_path / "step-00000004",
        True,
        "durable",
    )
    for step, state in expected.items():
        assert_same(run.restore(step), state)


def test_a_run_that_is_resumed_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    training = Training()
    for _ in range(4):
        training.step()
    with Checkpointer(tmp_path) as run:
        run.save_async(4, training.state())
    for _ in range(5):
        training.step()
    for in_place in (False, True):
        again, run = Training(seed=9), Checkpointer(tmp_path)
        if in_place:
            homes = {name: tensor.data_ptr() for name, tensor in again.model.state_dict().items()}
            wanted = {"model": again.model, "optimizer": again.optimizer, "scheduler": again.scheduler, "random": None}
            step, values = run.restore_into({**wanted, "steps": None})
            assert homes == {name: tensor.data_ptr() for name, tensor in again.model.state_dict().items()}
            again.random.set_state(values["random"])
            again.steps = values["steps"]
        else:
            step, state = run.restored()
            again.model.load_state_dict(state["model"])
            again.optimizer.load_state_dict(state["optimizer"])
            again.scheduler.load_state_dict(state["scheduler"])
            again.random.set_state(state["random"])
            again.steps = state["steps"]
        assert step == again.steps == 4
        for _ in range(5):
            again.step()
        assert_same(again.state(), training.state())


def test_restoring_in_place_takes_tensors_and_nests_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    run = Checkpointer(tmp_path)
    run.save(1, {"a": torch.arange(4.0), "nest": {"x": [torch.ones(2), torch.zeros(3)], "more": 1}})
    a, x = torch.zeros(4), [torch.zeros(2), torch.ones(3)]
    assert run.restore_into({"a": a, "nest": {"x": x}}) == (1, {})
    assert a.equal(torch.arange(4.0)) and x[0].equal(torch.ones(2)) and x[1].equal(torch.zeros(3))
    for wrong in ({"a": torch.zeros(5)}, {"a": 7}, {"nest": {"y": x}}, {"nest": {"x": x[:1]}}, {"b": a}):
        with pytest.raises(thruway.ThruwayError):
            run.restore_into(wrong)
    strange = torch.nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="Missing key"):
        run.restore_into({"nest": strange})


def test_a_flipped_bit_is_refused_by_name_and_the_checkpoint_before_is_taken_only_if_asked(tmp_path: Path) -> None:
    run = Checkpointer(tmp_path)
    for step in (1, 2):
        run.save(step, {"model": {"w": torch.full((5000,), float(step)), "v": torch.ones(3)}})
    file = tmp_path / "step-00000002" / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    start = json.loads(file.read_bytes()[8 : 8 + header])["w"]["data_offsets"][0] + 8 + header
    flip(file, start + 999)
    for restore in (
        lambda **options: run.restore(**options),
        lambda **options: run.restore_into({"model": None}, **options),
    ):
        with pytest.raises(thruway.MismatchError) as raised:
            restore()
        context = raised.value.context
        assert (context["tensor"], context["file"], int(context["offset"])) == ("w", str(file), start)
        with pytest.warns(RuntimeWarning, match="step 2 is damaged, taking step 1"):
            restore(fallback=True)
    damage = run.verify(2)
    assert [(one.file, one.tensor) for one in damage] == [("model.safetensors", ("model", "w"))]
    assert damage[0].offset <= start + 999 < damage[0].offset + damage[0].length
    with pytest.warns(RuntimeWarning), pytest.raises(thruway.MismatchError):
        flip(tmp_path / "step-00000001" / "model.safetensors", file.stat().st_size - 50)
        run.restore(fallback=True)


def test_what_a_save_will_take_is_told_before_it(tmp_path: Path) -> None:
    run = Checkpointer(tmp_path / "run")
    state = {"model": {"w": torch.ones(1000, 10)}, "step": 1}
    first = run.preflight(state)
    assert first.seconds is None and first.files == 2 and 40_000 < first.bytes < 50_000
    assert first.free_bytes is None or first.free_bytes > first.bytes
    assert not (tmp_path / "run").exists()
    saved = run.save(1, state)
    assert sum(path.stat().st_size for path in saved.path.glob("*.safetensors")) == first.bytes
    assert run.preflight(state).seconds is not None
    assert run.preflight(state, max_shard_bytes=1).bytes >= first.bytes
    with pytest.raises(thruway.InvalidInputError, match="model"):
        run.preflight({"model": object()})


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    run = Checkpointer(tmp_path / "run")
    assert run.steps() == []
    with pytest.raises(thruway.NotFoundError):
        Checkpointer(tmp_path / "drive that is not mounted" / "run").steps()
    with pytest.raises(FileNotFoundError):
        run.restore()
    run.save(3, {"a": torch.ones(2)})
    for call in (lambda: run.restore(2), lambda: run.verify(2), lambda: run.restore(only=["b"])):
        with pytest.raises((thruway.NotFoundError, thruway.InvalidInputError)):
            call()
    (tmp_path / "run" / "step-00000003" / "a.safetensors").unlink(missing_ok=True)
    (tmp_path / "run" / "step-00000003" / "state.safetensors").unlink(missing_ok=True)
    with pytest.raises(thruway.NotFoundError, match="is missing"):
        run.restore()


def test_what_cannot_be_saved_is_refused_by_its_path_unless_an_encoder_knows_it(tmp_path: Path) -> None:
    class Strange:
        pass

    run = Checkpointer(tmp_path / "run")
    for save in (run.save, run.save_async):
        with pytest.raises(thruway.InvalidInputError, match=r"state\['a'\]\[1\]"):
            save(1, {"a": [1, Strange()]})
    for wrong in ({"step": -1}, {"step": "1"}, {"step": True}, {"max_shard_bytes": 0}, {"metadata": {"a": 1}}):
        with pytest.raises(thruway.InvalidInputError):
            run.save(**{"step": 1, "state": {}, **wrong})
    with pytest.raises(thruway.InvalidInputError, match="no optimizer"):
        run.save_async(1, {}, guard=7)
    for options in ({"keep": 0}, {"keep_every": "x"}, {"pool_bytes": -1}, {"lag": -1.0}, {"lag": float("nan")}):
        with pytest.raises(thruway.InvalidInputError):
            Checkpointer(tmp_path, **options)
    assert not (tmp_path / "run").exists()
    encoder = (lambda value: "strange" if isinstance(value, Strange) else NotImplemented, lambda _: Strange())
    run = Checkpointer(tmp_path / "run", encoder=encoder)
    run.save(1, {"a": Strange()})
    assert type(run.restore()["a"]) is Strange


def test_a_step_that_is_there_is_refused_or_replaced_and_old_ones_are_let_go(tmp_path: Path) -> None:
    run = Checkpointer(tmp_path, keep=2, keep_every=10)
    state = {"a": torch.ones(10)}
    run.save(10, state)
    with pytest.raises(thruway.AlreadyExistsError):
        run.save(10, state)
    run.save(10, {"a": torch.zeros(10)}, replace=True)
    assert run.restore()["a"].equal(torch.zeros(10))
    run.save(11, state)
    run.save_async(12, state)
    saved = run.save(13, state)
    assert (saved.removed, run.steps()) == ([11], [10, 12, 13])


def test_a_failure_is_told_by_the_handle_or_else_by_the_next_save_and_once(tmp_path: Path) -> None:
    run, state = Checkpointer(tmp_path), {"a": torch.ones(1000)}
    run.save(1, state)
    saving = run.save_async(1, state)
    for _ in range(2):
        with pytest.raises(thruway.AlreadyExistsError):
            saving.wait()
    run.save(2, state)
    del saving
    run.save_async(2, state)
    with pytest.raises(thruway.AlreadyExistsError):
        run.save_async(3, state)
    run.save_async(3, state)
    run.save_async(3, state)
    with pytest.raises(thruway.AlreadyExistsError):
        run.wait()
    run.wait()
    assert run.steps() == [1, 2, 3]


def test_weights_that_nobody_trains_are_warned_about(tmp_path: Path) -> None:
    training, run = Training(), Checkpointer(tmp_path)
    stale = copied(training.state())
    run.save(1, training.state(), optimizer=training.optimizer)
    training.step()
    run.save(2, training.state(), optimizer=training.optimizer)
    training.step()
    saving = run.save_async(3, training.state(), guard=training.optimizer)
    assert saving.wait().warnings == []
    saving = run.save_async(4, training.state(), guard=training.optimizer)
    with pytest.warns(RuntimeWarning, match="6 of 6 trained tensors have the very bytes"):
        assert len(saving.wait().warnings) == 1
    run.save_async(5, training.state(), guard=training.optimizer)
    with pytest.warns(RuntimeWarning, match="step 4"):
        run.wait()
    # A copy is not what the optimizer trains, so nothing is said of it.
    run.save(6, stale, optimizer=training.optimizer)


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


BEGIN = """
import os, sys, torch, thruway
from thruway.torch import Checkpointer
run = Checkpointer(sys.argv[1])
state = {"model": {str(n): torch.full((100_000,), float(n)) for n in range(50)}}
"""


def test_a_program_that_ends_has_saved_what_it_began(tmp_path: Path) -> None:
    told = run_program(BEGIN + "run.save_async(1, state)", str(tmp_path))
    assert (told.returncode, told.stderr) == (0, "")
    assert Checkpointer(tmp_path).restore()["model"]["7"].eq(7).all()
    told = run_program(BEGIN + "run.save_async(1, state)", str(tmp_path))
    assert told.returncode == 0 and "was not saved" in told.stderr, told.stderr


def test_a_forked_child_is_told_and_harms_nothing(tmp_path: Path) -> None:
    program = (
        BEGIN
        + """
saving = run.save_async(1, state)
child = os.fork()
if child == 0:
    for call in (lambda: run.save(2, state), lambda: run.steps(), lambda: saving.wait(), run.wait):
        try:
            call()
        except thruway.UnsupportedError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    del run, saving
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert saving.wait().step == 1
"""
    )
    told = run_program(program, str(tmp_path))
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize(
    "call",
    [
        lambda: _tensors.place("cuda:0"),
        lambda: _tensors.current_stream("cuda:0"),
        lambda: _tensors.stream_before([_save.Source("w", "F32", [1], "cuda:0", 0, 4, None)]),
    ],
)
def test_a_child_of_a_process_that_used_cuda_is_told_before_torch_is_asked(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(thruway.UnsupportedError, match="forked"):
        call()


def test_a_thousand_saves_take_no_more_memory_and_descriptors_than_a_hundred(tmp_path: Path) -> None:
    def used() -> tuple[int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path("/proc/self/fd").iterdir()))

    run = Checkpointer(tmp_path, keep=1, pool_bytes=100_000)
    state = {"model": {str(number): torch.randn(1000) for number in range(20)}, "steps": list(range(50))}
    before = (0, 0)
    for step in range(1000):
        if step % 5:
            run.save_async(step, state)
        else:
            run.save(step, state)
        if step == 100:
            run.wait()
            before = used()
    run.wait()
    memory, descriptors = used()
    assert descriptors <= before[1] + 3
    assert memory <= before[0] + (16 << 20), f"{memory - before[0]} bytes more"
    assert run.steps() == [999]
