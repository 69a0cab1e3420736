"""Which tensors are wanted, and which part of each: names, shards, experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import thruway
import thruway.torch as ours
import torch
from thruway import _select

NAMES = ("embed.weight", "layers.0.q_proj.weight", "layers.1.q_proj.weight", "layers.1.o_proj.weight", "steps")


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    saved = {name: torch.randn(300, 70, generator=generator) for name in NAMES[:-1]} | {"steps": torch.tensor(9)}
    ours.save_file(saved, tmp_path / "model", max_shard_bytes=200_000)
    return tmp_path / "model", saved


def parts(tensor: torch.Tensor, dimension: int, world: int) -> list[torch.Tensor]:
    """What `torch.chunk` deals to each rank; it deals nothing to the last if there is nothing left."""
    dealt = list(tensor.chunk(world, dimension))
    return dealt + [tensor.narrow(dimension, 0, 0)] * (world - len(dealt))


@pytest.mark.parametrize("world", [1, 2, 3, 7, 300, 301])
@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_the_ranks_parts_are_those_of_torch_chunk(model, dimension: int, world: int) -> None:
    path, saved = model
    for rank in {0, 1, world - 2, world - 1} & set(range(world)):
        loaded = ours.load_file(path, shard={"q_proj.weight": (dimension, rank, world)})
        for name, tensor in saved.items():
            wanted = parts(tensor, dimension, world)[rank] if "q_proj" in name else tensor
            assert torch.equal(loaded[name], wanted), name
            assert loaded[name].is_contiguous()


def test_only_a_ranks_part_is_read(model) -> None:
    path, saved = model
    receipts: list[thruway.Receipt] = []
    names = ["layers.0.q_proj.weight"]
    ours.load_file(path, names=names, shard={"q_proj.weight": (0, 1, 4)}, receipt=receipts.append)
    assert receipts[0].bytes == saved[names[0]].nbytes // 4


def test_the_longest_end_of_a_name_decides(model) -> None:
    path, saved = model
    shard = {"weight": (0, 0, 2), "layers.1.q_proj.weight": (1, 0, 2), "o_proj.weight": (0, 1, 3)}
    loaded = ours.load_file(path, shard=shard)
    shapes = {name: list(tensor.shape) for name, tensor in loaded.items()}
    expected = dict(zip(NAMES, ([150, 70], [150, 70], [300, 35], [100, 70], []), strict=True))
    assert shapes == expected
    assert torch.equal(loaded["layers.1.o_proj.weight"], saved["layers.1.o_proj.weight"][100:200])


def test_one_table_of_shards_is_for_every_choice_of_names(model) -> None:
    path, _ = model
    shard = {"q_proj.weight": (0, 0, 2), "o_proj.weight": (1, 0, 2)}
    assert ours.load_file(path, names=["embed.weight"], shard=shard).keys() == {"embed.weight"}
    assert ours.load_file(path, names=[NAMES[3]], shard=shard)[NAMES[3]].shape == (300, 35)


def test_names_are_a_list_or_a_function(model) -> None:
    path, saved = model
    assert ours.load_file(path, names=lambda name: "q_proj" in name).keys() == set(NAMES[1:3])
    assert ours.load_file(path, names=iter(NAMES[3:])).keys() == set(NAMES[3:])
    assert ours.load_file(path, names=[]) == {}
    loaded = ours.load_file(path, names=NAMES[:1])
    assert torch.equal(loaded[NAMES[0]], saved[NAMES[0]])


def test_floating_point_numbers_are_converted_and_nothing_else(tmp_path: Path) -> None:
    saved = {"a": torch.randn(3000), "b": torch.arange(9), "c": torch.ones(4, dtype=torch.bool), "d": torch.tensor(1.5)}
    ours.save_file(saved, tmp_path / "a")
    loaded = ours.load_file(tmp_path / "a", dtype=torch.bfloat16)
    assert torch.equal(loaded["a"], saved["a"].bfloat16()) and loaded["d"].dtype == torch.bfloat16
    assert torch.equal(loaded["b"], saved["b"]) and torch.equal(loaded["c"], saved["c"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "embed.weight"}, "not the text"),
        ({"names": ["nothing"]}, "there are no tensors with these names: nothing"),
        ({"shard": {"nothing": (0, 0, 2)}}, "no tensor has a name that shard gives: 'nothing'"),
        ({"shard": {"q_proj.weight": (2, 0, 2)}}, "has 2 dimensions"),
        ({"shard": {"steps": (0, 0, 2)}}, "has 0 dimensions"),
        ({"shard": {"q_proj.weight": (0, 2, 2)}}, "there is no rank 2 of 2"),
        ({"shard": {"q_proj.weight": (0, -1, 2)}}, "there is no rank -1 of 2"),
        ({"shard": {"q_proj.weight": 5}}, "is .dimension, rank, world."),
        ({"shard": [("q_proj.weight", 0, 2)]}, "shard is a dict"),
        ({"dtype": "float16"}, "floating-point dtypes"),
        ({"dtype": torch.int8}, "floating-point dtypes"),
        ({"dtype": torch.float4_e2m1fn_x2}, "floating-point dtypes"),
        ({"names": 5}, "names is a list of names"),
        ({"names": [["a"]]}, "names is a list of names"),
        ({"shard": 0}, "shard is a dict"),
        ({"shard": {5: (0, 0, 2), "b": (0, 0, 2)}}, "no tensor has a name"),
    ],
)
def test_what_cannot_be_selected_is_named(model, options: dict, message: str) -> None:
    for load in (ours.load_file, lambda path, **options: list(ours.stream(path, **options))):
        with pytest.raises(thruway.InvalidInputError, match=message):
            load(model[0], **options)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
def test_each_expert_is_one_ranks_and_all_else_is_everyones(world: int) -> None:
    names = ["norm", *(f"layers.{layer}.experts.{expert}.up" for layer in range(2) for expert in range(8))]
    shares = [ours.expert_names(names, rank, world) for rank in range(world)]
    assert all(share[0] == "norm" for share in shares)
    experts = [name for share in shares for name in share[1:]]
    assert sorted(experts) == sorted(names[1:])
    for share in shares:
        numbers = [int(name.split(".")[3]) for name in share[1 : 1 + len(share[1:]) // 2]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else world == 9


@pytest.mark.parametrize("pattern", [r"experts", r"(", r"(x)?experts", r"\.(weight)"])
def test_patterns_that_find_no_number_are_refused(pattern: str) -> None:
    with pytest.raises(thruway.InvalidInputError, match="finds no expert's number"):
        ours.expert_names(["a.experts.0.weight"], 0, 1, pattern)
    with pytest.raises(thruway.InvalidInputError, match="not the text"):
        ours.expert_names("a.experts.0.weight", 0, 1)


def test_windows_hold_what_they_may_and_a_larger_tensor_alone() -> None:
    wanted = [_select.Wanted(str(number), "U8", None, nbytes) for number, nbytes in enumerate([3, 3, 3, 20, 1, 9, 1])]
    dealt = _select.windows(wanted, 10, lambda one: one.nbytes)
    assert [[one.nbytes for one in window] for window in dealt] == [[3, 3, 3], [20], [1, 9], [1]]
