"""Loading with many ranks: what each gets, that the file is read once in all, and that nobody hangs when one fails."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import thruway
import thruway.torch as ours
import torch
import torch.distributed as dist

HIDDEN = 512
LAYERS = 3
EXPERTS = 5
# What a rank reads to open the model: the first 64 KiB of each of its files; and a little for Python.
HEADERS_BYTES = 4 * (64 << 10) + (16 << 10)


def _model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    model = {"embed.weight": tensor(50, HIDDEN), "steps": torch.tensor(3), "none": torch.zeros(0, 4)}
    for layer in range(LAYERS):
        model[f"layers.{layer}.q_proj.weight"] = tensor(HIDDEN, HIDDEN)
        model[f"layers.{layer}.o_proj.weight"] = tensor(HIDDEN, HIDDEN + 1, dtype=torch.float32)
        model[f"layers.{layer}.norm.weight"] = tensor(HIDDEN, dtype=torch.float64)
        model[f"layers.{layer}.mask"] = tensor(HIDDEN) > 0
        model[f"layers.{layer}.waves"] = torch.randn(7, 3, generator=generator, dtype=torch.complex64)
        for expert in range(EXPERTS):
            model[f"layers.{layer}.experts.{expert}.up"] = tensor(HIDDEN, 17).to(torch.float8_e4m3fn)
    return model


def _rchar(io: Path) -> int:
    return next(int(line.split()[1]) for line in io.read_text().splitlines() if line.startswith("rchar:"))


def _read_bytes() -> int:
    """What this process has read by threads that are gone: loads have such, sockets are read by others."""
    return _rchar(Path("/proc/self/io")) - sum(_rchar(task / "io") for task in Path("/proc/self/task").iterdir())


def _rank(rank: int, world: int, place: str, case: str) -> None:
    from thruway.torch import distributed

    dist.init_process_group("gloo", init_method=f"file://{place}/meeting-{case}", rank=rank, world_size=world)
    try:
        told = CASES[case](distributed, rank, world, Path(place))
    except Exception as error:
        told = {"error": type(error).__name__, "text": str(error)}
    (Path(place) / f"{case}-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _run(place: Path, world: int, case: str) -> list[dict[str, Any]]:
    """Runs a case on so many ranks; what each tells."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, world, str(place), case)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * world
    return [json.loads((place / f"{case}-{rank}.json").read_text()) for rank in range(world)]


def _equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """The names that differ."""
    same = {
        name
        for name in found.keys() & wanted.keys()
        if found[name].dtype == wanted[name].dtype
        and found[name].shape == wanted[name].shape
        and found[name]
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(wanted[name].contiguous().view(-1).view(torch.uint8))
    }
    return sorted((found.keys() | wanted.keys()) - same)


def _counted(distributed: Any, place: Path, **options: Any) -> tuple[dict[str, torch.Tensor], int, int]:
    """What was loaded, the bytes that the receipt tells, and those that the system counted, without the headers."""
    receipts: list[thruway.Receipt] = []
    before = _read_bytes()
    found = distributed.load_file(place / "model", path="cached", receipt=receipts.append, **options)
    return found, receipts[0].bytes, _read_bytes() - before


def _all_whole(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    distributed._ROUND_BYTES = 600_000
    found, told, counted = _counted(distributed, place)
    return {"wrong": _equal(found, _model()), "order": list(found), "told": told, "counted": counted}


def _all_shards(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    """Rows and columns by rank, experts by rank, all else whole."""
    distributed._ROUND_BYTES = 600_000
    model = _model()
    names = ours.expert_names(list(model), rank, world)
    shard = {"q_proj.weight": (0, rank, world), "o_proj.weight": (1, rank, world)}
    found, told, counted = _counted(distributed, place, names=names, shard=shard)

    def part(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        parts = tensor.chunk(world, dimension)
        return parts[rank] if rank < len(parts) else tensor.narrow(dimension, 0, 0)

    wanted = {name: model[name] for name in names}
    wanted |= {name: part(tensor, 0) for name, tensor in wanted.items() if name.endswith("q_proj.weight")}
    wanted |= {name: part(tensor, 1) for name, tensor in wanted.items() if name.endswith("o_proj.weight")}
    whole_kept = [
        name for name, tensor in found.items() if tensor.untyped_storage().nbytes() > max(tensor.nbytes, 2 << 20)
    ]
    return {"wrong": _equal(found, wanted), "told": told, "counted": counted, "whole kept": whole_kept}


def _same_shard_twice(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    """Two ranks share each part, as with data beside tensor parallelism; and one wants less than the others."""
    distributed._ROUND_BYTES = 600_000
    half, shard = rank // 2, {"q_proj.weight": (0, rank // 2, 2)}
    names = (lambda name: "norm" not in name) if rank == 0 else None
    found, told, counted = _counted(distributed, place, names=names, shard=shard, dtype=torch.float32)
    wanted = {name: tensor for name, tensor in _model().items() if names is None or names(name)}
    wanted |= {name: tensor.chunk(2)[half] for name, tensor in wanted.items() if name.endswith("q_proj.weight")}
    wanted = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in wanted.items()}
    return {"wrong": _equal(found, wanted), "told": told, "counted": counted}


def _one_fails(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    return {"names": list(distributed.load_file(place / ("model" if rank else "nothing")))}


def _one_asks_for_nonsense(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    return {"names": list(distributed.load_file(place / "model", names=["no such"] if rank else None))}


def _one_rank_s_arguments(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    """The first rank is asked for what cannot be, in every argument; the other hears of it at once each time."""

    def interrupts(moved: int) -> None:
        raise KeyboardInterrupt

    told = []
    for bad in ({"device": "nowhere"}, {"dtype": torch.int8}, {"progress": 5}, {"progress": interrupts}, {"shard": 5}):
        distributed._ROUND_BYTES = 600_000
        try:
            distributed.load_file(place / "model", **(bad if rank == 0 else {}))
        except BaseException as error:
            told.append(type(error).__name__)
    return {"told": told}


def _other_names_of_the_same_shards(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    """Each rank sees the same tensors in files of the same content, but in another order."""
    names = ["a.safetensors", "b.safetensors"]
    (place / f"of-{rank}").mkdir()
    for name, value in zip(names if rank == 0 else reversed(names), (1, 2), strict=True):
        ours.save_file({f"t{value}": torch.full((1000,), value)}, place / f"of-{rank}" / name)
    return {"found": {name: one[0].item() for name, one in distributed.load_file(place / f"of-{rank}").items()}}


def _different_models(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    return {"names": list(distributed.load_file(place / ("model" if rank else "other.safetensors")))}


def _the_file_is_cut_meanwhile(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    """The second rank finds its part of the file gone."""
    opened = distributed._stream.Opened

    def cut(*args: Any) -> Any:
        made = opened(*args)
        dist.barrier()
        if rank == 1:
            for file in (place / "model").glob("*.safetensors"):
                os.truncate(file, file.stat().st_size // 2)
        dist.barrier()
        return made

    distributed._stream.Opened = cut
    return {"names": list(distributed.load_file(place / "model"))}


def _subgroup(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return {"wrong": []}
    found = distributed.load_file(place / "model", group=group, shard={"o_proj.weight": (1, rank // 2, 2)})
    wanted = {name: tensor.chunk(2, 1)[rank // 2] if "o_proj" in name else tensor for name, tensor in _model().items()}
    return {"wrong": _equal(found, wanted)}


def _fsdp(distributed: Any, rank: int, world: int, place: Path) -> dict[str, Any]:
    """Parameters that FSDP2 has sharded take their parts of a plain file, and only those are read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.Linear(7, 3))
    whole = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
        for name, tensor in module.state_dict().items()
    }
    if rank == 0:
        ours.save_file(whole, place / "plain.safetensors")
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    dist.barrier()
    receipts: list[thruway.Receipt] = []
    missing = ours.load_into(module, place / "plain.safetensors", receipt=receipts.append)
    found = {name: tensor.full_tensor() for name, tensor in module.state_dict().items()}
    return {
        "wrong": _equal(found, whole),
        "missing": missing,
        "told": receipts[0].bytes,
        "whole": sum(t.nbytes for t in whole.values()),
    }


CASES = {
    "whole": _all_whole,
    "shards": _all_shards,
    "same shard twice": _same_shard_twice,
    "one fails": _one_fails,
    "nonsense": _one_asks_for_nonsense,
    "different": _different_models,
    "arguments": _one_rank_s_arguments,
    "other names": _other_names_of_the_same_shards,
    "cut": _the_file_is_cut_meanwhile,
    "subgroup": _subgroup,
    "fsdp": _fsdp,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Calls that the system counts for the process, which those through a ring are not.
    monkeypatch.setenv("THRUWAY_ENGINE", "posix")
    ours.save_file(_model(), tmp_path / "model", max_shard_bytes=3_000_000)
    ours.save_file({"a": torch.ones(3)}, tmp_path / "other.safetensors")
    return tmp_path


def _bytes(model: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in model.values())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_that_want_all_read_the_file_once_together(place: Path, world: int) -> None:
    told = _run(place, world, "whole")
    assert [one["wrong"] for one in told] == [[]] * world
    assert all(one["order"] == list(ours.load_file(place / "model")) for one in told)
    assert sum(one["told"] for one in told) == _bytes(_model())
    assert sum(one["counted"] for one in told) < _bytes(_model()) + world * HEADERS_BYTES
    assert max(one["told"] for one in told) < _bytes(_model()) / world + 1_100_000


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_that_want_slices_read_the_file_once_together(place: Path, world: int) -> None:
    told = _run(place, world, "shards")
    assert [one["wrong"] for one in told] == [[]] * world and [one["whole kept"] for one in told] == [[]] * world
    assert sum(one["told"] for one in told) == _bytes(_model())
    assert sum(one["counted"] for one in told) < _bytes(_model()) + world * HEADERS_BYTES


def test_ranks_that_want_the_same_slices_read_the_file_once_together(place: Path) -> None:
    told = _run(place, 4, "same shard twice")
    assert [one["wrong"] for one in told] == [[]] * 4
    assert sum(one["told"] for one in told) == _bytes(_model())


def test_a_group_of_some_of_the_ranks(place: Path) -> None:
    assert [one["wrong"] for one in _run(place, 4, "subgroup")] == [[]] * 4


def test_a_rank_that_fails_ends_it_for_all_and_each_is_told(place: Path) -> None:
    told = _run(place, 2, "one fails")
    assert [one["error"] for one in told] == ["NotFoundError", "PeerError"]
    assert "rank 0 could not load its share: NotFoundError" in told[1]["text"]
    told = _run(place, 2, "nonsense")
    assert [one["error"] for one in told] == ["PeerError", "InvalidInputError"]
    told = _run(place, 2, "different")
    assert [one["error"] for one in told] == ["InvalidInputError", "InvalidInputError"]


def test_what_one_rank_is_asked_wrongly_is_told_to_the_others_at_once(place: Path) -> None:
    first, second = (one["told"] for one in _run(place, 2, "arguments"))
    kind = "InvalidInputError"
    assert first == [kind, kind, kind, "KeyboardInterrupt", kind] and second == ["PeerError"] * 5


def test_ranks_whose_shards_have_other_names_do_not_get_each_others_tensors(place: Path) -> None:
    assert [one["error"] for one in _run(place, 2, "other names")] == ["InvalidInputError"] * 2


def test_a_file_that_is_cut_while_ranks_load_it_is_told_to_all(place: Path) -> None:
    errors = [one["error"] for one in _run(place, 2, "cut")]
    assert set(errors) <= {"TruncatedError", "ChangedError", "PeerError"} and set(errors) != {"PeerError"}


def test_sharded_parameters_take_their_part_of_a_plain_file(place: Path) -> None:
    told = _run(place, 2, "fsdp")
    assert [one["wrong"] for one in told] == [[]] * 2 and [one["missing"] for one in told] == [[[], []]] * 2
    assert sum(one["told"] for one in told) == told[0]["whole"]


def test_without_a_group_it_says_what_to_do(place: Path) -> None:
    from thruway.torch import distributed

    with pytest.raises(thruway.InvalidInputError, match="init_process_group"):
        distributed.load_file(place / "model")
