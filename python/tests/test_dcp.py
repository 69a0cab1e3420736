"""Distributed checkpoints: saved by some ranks and loaded by others, and what is left when a save fails."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as reference
import thruway
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from thruway.torch.dcp import Reader, Writer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
MANIFEST = "thruway.dcp.json"


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    made = {
        # Fewer rows than ranks, so that some have none; and numbers that no number of ranks divides.
        "three": torch.randn(3, 5, generator=generator),
        "uneven": torch.randn(13, 7, 5, generator=generator).to(torch.bfloat16),
        "even": torch.randn(12, 24, generator=generator, dtype=torch.float64),
        "ints": torch.randint(0, 1000, (9, 4), generator=generator),
        "flags": torch.rand(10, 3, generator=generator) > 0.5,
        "complex": torch.randn(6, 3, generator=generator, dtype=torch.complex128),
        "eights": torch.randn(16, 3, generator=generator).to(torch.float8_e5m2),
        "big": torch.randn(700, 300, generator=generator),
    }
    return made


PLACEMENTS = [[Shard(0)], [Shard(1)], [Replicate()]]
PLAIN: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.9, 0.95),
    "steps": [1, 2],
    "name": "AdamW",
    "nothing": None,
    "inf": float("inf"),
}


def distributed_state(fill: bool, turn: int) -> dict[str, Any]:
    """The same state whatever the number of ranks, sharded in one of several ways."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made: dict[str, Any] = {"tensors": {}, "more": {}}
    for number, (name, tensor) in enumerate(whole_tensors().items()):
        whole = tensor if fill else torch.zeros_like(tensor)
        made["tensors"][name] = sharded(whole, mesh, PLACEMENTS[(number + turn) % 3])
    made["tensors"]["last"] = sharded(torch.full((2, 3, 5), 1.0 if fill else 0.0), mesh, [Shard(2)])
    made["more"]["square"] = torch.arange(35.0).view(7, 5) if fill else torch.zeros(7, 5)
    if dist.get_world_size() == 4:
        square = init_device_mesh("cpu", (2, 2))
        made["more"]["square"] = sharded(made["more"]["square"], square, [Shard(0), Shard(1)])
    made["more"]["plain"] = dict(PLAIN) if fill else dict.fromkeys(PLAIN)
    made["more"]["scalar"] = torch.tensor(7 if fill else 0)
    made["more"]["list"] = [torch.ones(2) if fill else torch.zeros(2), {"x": 5 if fill else 0}]
    return made


def sharded(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    # Each rank cuts its own part: gloo cannot send all dtypes.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def local(tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has of a tensor, and what it should have."""
    if not isinstance(tensor, DTensor):
        return tensor, whole
    return tensor.to_local(), sharded(whole, tensor.device_mesh, tensor.placements).to_local()


def faults_of(state: dict[str, Any]) -> list[str]:
    wanted = {**whole_tensors(), "last": torch.ones(2, 3, 5)}
    bits = [(name, *local(state["tensors"][name], tensor)) for name, tensor in wanted.items()]
    bits.append(("square", *local(state["more"]["square"], torch.arange(35.0).view(7, 5))))
    bits.append(("scalar", state["more"]["scalar"], torch.tensor(7)))
    bits.append(("list", state["more"]["list"][0], torch.ones(2)))
    faults = [name for name, one, other in bits if one.dtype != other.dtype or one.tolist() != other.tolist()]
    return faults + ([] if state["more"]["plain"] == PLAIN and state["more"]["list"][1] == {"x": 5} else ["plain"])


def save(place: Path) -> dict[str, Any]:
    dcp.save(distributed_state(True, 0), storage_writer=Writer(place / "checkpoint"))
    return {}


def save_async(place: Path) -> dict[str, Any]:
    state = distributed_state(True, 1)
    writer = Writer(place / "checkpoint")
    future = dcp.async_save(state, storage_writer=writer)
    for tensor in state["tensors"].values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    getattr(future, "upload_completion", future).result()
    return {}


def load(place: Path) -> dict[str, Any]:
    faults = []
    for turn in range(3):
        state = distributed_state(False, turn)
        dcp.load(state, storage_reader=Reader(place / "checkpoint"))
        faults.append(faults_of(state))
    return {"faults": faults}


class Broken(DefaultSavePlanner):
    """On one rank there is something that cannot be read."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 2:
            raise OSError("a drive is gone")
        return super().resolve_data(write_item)


def fail(place: Path) -> dict[str, Any]:
    state = distributed_state(True, 0)
    told = []
    for target in ("checkpoint", "new"):
        try:
            dcp.save(state, storage_writer=Writer(place / target), planner=Broken())
            told.append("saved")
        except CheckpointException as error:
            told.append(f"{sorted(error.failures)} {error}")
    dist.barrier()
    left = sorted(path.name for path in place.iterdir() if "thruway" in path.name)
    dist.barrier()
    # The next save to the same place goes through, and clears what the failed one left.
    dcp.save(state, storage_writer=Writer(place / "new"))
    dist.barrier()
    return {
        "told": told,
        "left": left,
        "after": sorted(path.name for path in place.iterdir() if "thruway" in path.name),
    }


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(8, 9, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp_save(place: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = network()
    step(model, optimizer, 0)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=Writer(place / "fsdp"))
    step(model, optimizer, 1)
    return {"weights": [one.full_tensor().tolist() for one in model.parameters()]}


def fsdp_load(place: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=Reader(place / "fsdp"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step(model, optimizer, 1)
    return {"weights": [one.full_tensor().tolist() for one in model.parameters()]}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    one.__name__: one for one in (save, save_async, load, fail, fsdp_save, fsdp_load)
}


def _rank(rank: int, world: int, place: str, case: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting-{case}-{world}", rank=rank, world_size=world)
    told = CASES[case](Path(place))
    (Path(place) / f"{case}-{rank}.json").write_text(json.dumps(told))
    # Else one may be gone while another still talks to it, which gloo ends the process for.
    dist.barrier()
    dist.destroy_process_group()
    # Torch and gloo leave threads, for which a process that winds down under load was seen to be aborted. What a rank
    # told stands in its file.
    os._exit(0)


def run(place: Path, world: int, case: str) -> list[dict[str, Any]]:
    """Runs a case on so many ranks; what each tells."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, world, str(place), case)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(180)
    assert [process.exitcode for process in ranks] == [0] * world
    return [json.loads((place / f"{case}-{rank}.json").read_text()) for rank in range(world)]


def test_what_four_ranks_save_one_two_and_three_load(tmp_path: Path) -> None:
    run(tmp_path, 4, "save")
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names[-1] == MANIFEST and {name[:10] for name in names[:-1]} == {f"rank-0000{rank}" for rank in range(4)}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    for world in (1, 2, 3):
        for told in run(tmp_path, world, "load"):
            assert told["faults"] == [[], [], []]


def test_an_async_save_is_of_the_moment_it_was_called(tmp_path: Path) -> None:
    run(tmp_path, 3, "save_async")
    assert run(tmp_path, 1, "load")[0]["faults"] == [[], [], []]


def test_a_rank_that_fails_leaves_the_checkpoint_before_and_no_other(tmp_path: Path) -> None:
    run(tmp_path, 3, "save")
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}
    for told in run(tmp_path, 3, "fail"):
        assert all(text.startswith("[2]") and "a drive is gone" in text for text in told["told"])
        assert told["left"] == [".new.thruway-stage"] and told["after"] == []
    after = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}
    assert before.items() <= after.items() and before[MANIFEST] == after[MANIFEST]
    assert run(tmp_path, 1, "load")[0]["faults"] == [[], [], []]


def test_fully_sharded_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    saved = run(tmp_path, 4, "fsdp_save")
    for world in (1, 3):
        for told in run(tmp_path, world, "fsdp_load"):
            for one, other in zip(told["weights"], saved[0]["weights"], strict=True):
                assert np.allclose(one, other, rtol=1e-6, atol=1e-7)


def alone(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(path, **options), no_dist=True)


def everything(path: Path, **options: Any) -> dict[str, Any]:
    """All that a checkpoint holds, whatever that is."""
    state: dict[str, Any] = {}
    _load_state_dict(state, Reader(path, **options), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def test_a_checkpoint_is_read_without_knowing_what_is_in_it(tmp_path: Path) -> None:
    state = {"a": {"b": torch.arange(6).view(2, 3), "c": [1, {"d": "x"}], "e": (1, b"x", 2 + 3j)}, "n": np.arange(3.0)}
    alone(state, tmp_path / "c")
    back = everything(tmp_path / "c")
    assert torch.equal(back["a"]["b"], state["a"]["b"]) and back["a"]["c"] == [1, {"d": "x"}]
    assert back["a"]["e"] == (1, b"x", 2 + 3j) and np.array_equal(back["n"], state["n"])


def test_torch_s_own_reader_of_safetensors_opens_the_shards(tmp_path: Path) -> None:
    state = {"w": torch.randn(5, 3), "b": torch.arange(4, dtype=torch.int32)}
    alone(state, tmp_path / "c")
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(back, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "c")), no_dist=True)
    assert all(torch.equal(back[name], state[name]) for name in state)
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    assert reference.load_file(shard).keys() == state.keys()


def test_a_checkpoint_is_replaced_in_one_moment_and_its_shards_go(tmp_path: Path) -> None:
    for number in range(3):
        alone({"w": torch.full((4,), float(number)), "n": number}, tmp_path / "c")
        assert everything(tmp_path / "c")["w"].tolist() == [number] * 4
        assert len(list((tmp_path / "c").iterdir())) == 2
    with pytest.raises(CheckpointException, match="overwrite=True"):
        alone({"w": torch.ones(1)}, tmp_path / "c", overwrite=False)
    assert everything(tmp_path / "c")["n"] == 2


def test_nothing_is_written_over_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c/precious").write_text("x")
    with pytest.raises(CheckpointException, match="no checkpoint of this kind"):
        alone({"w": torch.ones(1)}, tmp_path / "c")
    assert [path.name for path in tmp_path.rglob("*")] == ["c", "precious"]
    (tmp_path / "empty").mkdir()
    alone({"w": torch.ones(1)}, tmp_path / "empty")
    assert everything(tmp_path / "empty")["w"].tolist() == [1]


def hold(path: str, connection: Any) -> None:
    """Begins a save, and is killed in the middle of it, or goes on until it is told to."""
    writer = Writer(path)
    writer.set_up_storage_writer(True)
    writer.prepare_global_plan([])
    connection.send("begun")
    connection.recv()


@pytest.mark.parametrize("name", ["old", "new"])
def test_a_save_while_another_process_saves_there_is_refused_until_that_is_gone(tmp_path: Path, name: str) -> None:
    alone({"w": torch.ones(1)}, tmp_path / "old")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(str(tmp_path / name), theirs))
    process.start()
    assert ours.recv() == "begun"
    with pytest.raises(CheckpointException, match="another save is under way"):
        alone({"w": torch.zeros(1)}, tmp_path / name)
    process.kill()
    process.join()
    alone({"w": torch.zeros(1)}, tmp_path / name)
    assert everything(tmp_path / name)["w"].tolist() == [0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"old", name})


class Thing:
    def __init__(self) -> None:
        self.ran = True


def test_pickles_are_neither_written_nor_read_unless_both_sides_allow_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"'thing' cannot be saved"):
        alone({"thing": Thing()}, tmp_path / "c")
    alone({"thing": Thing(), "w": torch.ones(1)}, tmp_path / "c", allow_pickle=True)
    with pytest.raises(CheckpointException, match="can run code"):
        everything(tmp_path / "c")
    assert everything(tmp_path / "c", allow_pickle=True)["thing"].ran
    encoder = (lambda value: str(value) if isinstance(value, Fraction) else NotImplemented, Fraction)
    alone({"f": Fraction(1, 3)}, tmp_path / "f", encoder=encoder)
    assert everything(tmp_path / "f", encoder=encoder) == {"f": Fraction(1, 3)}


def test_states_that_are_not_flattened_keep_their_tensors_in_the_shards(tmp_path: Path) -> None:
    state = {"nest": {"w": torch.randn(1000), "x": [torch.ones(2), 3]}}
    writer = Writer(tmp_path / "c")
    dcp.save(state, storage_writer=writer, no_dist=True, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert (tmp_path / "c" / MANIFEST).stat().st_size < 3000
    back = everything(tmp_path / "c")["nest"]
    assert torch.equal(back["w"], state["nest"]["w"]) and back["x"][1] == 3


def test_plans_may_be_kept_from_one_save_to_the_next(tmp_path: Path) -> None:
    for number in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((3,), float(number)), "n": number}
        dcp.save(state, storage_writer=Writer(tmp_path / str(number)), planner=planner, no_dist=True)
        back = everything(tmp_path / str(number))
        assert back["w"].tolist() == [number] * 3


def test_every_missing_or_cut_file_is_named_before_anything_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone({"w": torch.ones(1000)}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    content = shard.read_bytes()
    target = {"w": torch.zeros(1000)}
    for damage in (lambda: shard.unlink(), lambda: shard.write_bytes(content[:-1]), lambda: shard.write_bytes(b"")):
        damage()
        caplog.clear()
        with pytest.raises(CheckpointException) as raised:
            dcp.load(target, storage_reader=Reader(tmp_path / "c"), no_dist=True)
        # Up to torch 2.11 the reason is only logged.
        assert shard.name in str(raised.value) + caplog.text
        assert not target["w"].any()
        with pytest.raises(thruway.MismatchError, match=shard.name):
            Reader(tmp_path / "c").read_metadata()
    shard.write_bytes(content.replace(b"thruway.write_id", b"thruway.writeXid"))
    with pytest.raises(CheckpointException, match="not the file that was saved"):
        dcp.load(target, storage_reader=Reader(tmp_path / "c"), no_dist=True)
    with pytest.raises(thruway.NotFoundError, match="no checkpoint"):
        Reader(tmp_path / "nothing").read_metadata()


def hostile(text: str) -> list[str]:
    whole = json.loads(text)
    (name, size), *_ = whole["files"]
    made = ["", "{", "[]", "null", "[" * 100_000, text.replace('"version":1', '"version":2')]
    for name_of_file in ("../x", "/etc/passwd", "a/b", name + "x", 3, None):
        made.append(json.dumps({**whole, "files": [[name_of_file, size]]}))
    for key in whole:
        for value in (None, 3, [], {}, "x", [[]], {"w": 3}):
            made.append(json.dumps({**whole, key: value}))
    good = whole["tensors"]["w"]
    chunk = good["chunks"][0]
    for other in (
        [[-1], *chunk[1:]],
        [[5], *chunk[1:]],
        [chunk[0], [1 << 62], *chunk[2:]],
        [chunk[0], chunk[1], 7, "w"],
    ):
        made.append(json.dumps({**whole, "tensors": {"w": {**good, "chunks": [other]}}}))
    for key, value in (("dtype", "load"), ("dtype", "int8"), ("size", [1 << 60]), ("size", "x"), ("chunks", [])):
        made.append(json.dumps({**whole, "tensors": {"w": {**good, key: value}}}))
    made.append(json.dumps({**whole, "values": {"n": ["", pickle.dumps(Thing()).hex(), {}]}}))
    return made


def test_a_hostile_manifest_is_an_error_that_says_so(tmp_path: Path) -> None:
    alone({"w": torch.ones(4), "n": 3}, tmp_path / "c")
    path = tmp_path / "c" / MANIFEST
    for text in hostile(path.read_text()):
        path.write_text(text)
        state = {"w": torch.zeros(4), "n": 0}
        try:
            dcp.load(state, storage_reader=Reader(tmp_path / "c"), no_dist=True)
        except CheckpointException as error:
            assert all(
                isinstance(one[0], (thruway.ThruwayError, AssertionError, RuntimeError, ValueError, KeyError))
                for one in error.failures.values()
            )
        else:
            assert state["w"].tolist() in ([1.0] * 4, [0.0] * 4)


def test_nothing_is_told_to_be_saved_that_a_rank_did_not_write(tmp_path: Path) -> None:
    class Forgetful(Writer):
        def write_data(self, plan: Any, planner: Any) -> Any:
            future = super().write_data(plan, planner)
            kept: torch.futures.Future[Any] = torch.futures.Future()
            kept.set_result(future.value()[:1])
            return kept

    with pytest.raises(CheckpointException, match="no rank wrote"):
        dcp.save({"a": torch.ones(1), "b": torch.ones(1)}, storage_writer=Forgetful(tmp_path / "c"), no_dist=True)
    assert not (tmp_path / "c").exists()


def test_a_writer_can_be_sent_to_the_process_that_saves(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "c")
    writer.stage({"w": torch.ones(2)})
    sent = pickle.loads(pickle.dumps(writer))
    dcp.save({"w": torch.ones(2)}, storage_writer=sent, no_dist=True)
    assert everything(tmp_path / "c")["w"].tolist() == [1, 1]
    assert isinstance(writer, dcp.AsyncStager if hasattr(dcp, "AsyncStager") else dcp.staging.AsyncStager)


def test_a_checkpoint_id_comes_before_the_path(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "b", storage_writer=Writer(tmp_path / "a"), no_dist=True)
    state = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=str(tmp_path / "b"), storage_reader=Reader(), no_dist=True)
    assert state["w"].tolist() == [1, 1] and [path.name for path in tmp_path.iterdir()] == ["b"]
    with pytest.raises((CheckpointException, thruway.InvalidInputError), match="no place"):
        dcp.save({"w": torch.ones(2)}, storage_writer=Writer(), no_dist=True)
    assert Writer.validate_checkpoint_id("/a/b") and not Reader.validate_checkpoint_id("s3://a/b")


def test_what_was_staged_is_not_staged_over_while_it_is_written() -> None:
    writer = Writer("unused")
    first = writer.stage({"w": torch.ones(2)})
    second = writer.stage({"w": torch.zeros(2)})
    assert first["w"].tolist() == [1, 1] and second["w"].tolist() == [0, 0]
    assert isinstance(io.BytesIO(pickle.dumps(writer)), io.BytesIO)
