"""`load_into`: bytes go to where a module's parameters lie already."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import thruway
import thruway.torch as ours
import torch


class Model(torch.nn.Module):
    """Parameters and buffers of several dtypes, two names for one tensor, and a single number."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(40, 600, bias=False)
        self.head = torch.nn.Linear(40, 600, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(600)
        self.register_buffer("mask", torch.full((600, 600), fill > 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(fill)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    model = Model(2.0)
    model.norm.num_batches_tracked += 7
    ours.save_model(model, tmp_path / "a")
    return tmp_path / "a", copy.deepcopy(model.state_dict())


def assert_equal(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name


def test_parameters_stay_where_they_are_and_hold_what_the_file_holds(saved) -> None:
    path, state = saved
    module = Model(1.0)
    before = {name: (tensor.data_ptr(), tensor._version) for name, tensor in module.state_dict(keep_vars=True).items()}
    parameters = list(module.parameters())
    receipts: list[thruway.Receipt] = []
    moved: list[int] = []
    told = ours.load_into(module, path, receipt=receipts.append, progress=moved.append)
    assert told == ([], [])
    assert_equal(module, state)
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    for name, tensor in module.state_dict(keep_vars=True).items():
        address, version = before[name]
        assert tensor.data_ptr() == address, name
        # Autograd sees that it was changed.
        assert tensor._version > version, name
    wanted = sum(tensor.nbytes for name, tensor in state.items() if name != "head.weight")
    assert receipts[0].bytes == wanted == moved[-1]


def test_what_the_file_has_in_another_dtype_is_converted(saved) -> None:
    path, state = saved
    module = Model(1.0).to(torch.bfloat16)
    ours.load_into(module, path)
    assert_equal(module, state)
    assert module.embed.weight.dtype == torch.bfloat16 and module.head.weight is module.embed.weight


def test_a_parameter_with_gaps_is_filled_and_keeps_them(saved) -> None:
    path, state = saved
    module = Model(1.0)
    module.embed.weight = module.head.weight = torch.nn.Parameter(torch.zeros(40, 600).T)
    ours.load_into(module, path)
    assert_equal(module, state)
    assert not module.embed.weight.is_contiguous()


def test_missing_and_unexpected_names_are_told_as_torch_tells_them(saved, tmp_path: Path) -> None:
    path, _ = saved
    tensors = ours.load_file(path, backend="pread")
    del tensors["norm.weight"]
    ours.save_file({**tensors, "extra": torch.ones(3)}, tmp_path / "b")
    module = Model(1.0)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\) in state_dict: "norm.weight".*"extra"'):
        ours.load_into(module, tmp_path / "b")
    assert_equal(module, before)
    missing, unexpected = ours.load_into(module, tmp_path / "b", strict=False)
    assert (missing, unexpected) == (["norm.weight"], ["extra"])
    assert torch.equal(module.norm.weight, before["norm.weight"])
    assert torch.equal(module.norm.bias, tensors["norm.bias"])


def test_another_shape_is_refused_before_anything_is_changed(saved, tmp_path: Path) -> None:
    path, _ = saved
    tensors = ours.load_file(path, backend="pread")
    ours.save_file({**tensors, "norm.weight": torch.ones(601)}, tmp_path / "b")
    module = Model(1.0)
    before = copy.deepcopy(module.state_dict())
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight"):
            ours.load_into(module, tmp_path / "b", strict=strict)
    assert_equal(module, before)


def test_a_module_on_meta_is_told_what_to_do(saved) -> None:
    path, state = saved
    with torch.device("meta"):
        module = torch.nn.Linear(40, 600, bias=False)
    ours.save_file({"weight": state["embed.weight"]}, path.with_name("linear"))
    with pytest.raises(thruway.InvalidInputError, match="'weight' lies on meta") as raised:
        ours.load_into(module, path.with_name("linear"))
    assert "to_empty" in raised.value.hint
    module.to_empty(device="cpu")
    ours.load_into(module, path.with_name("linear"))
    assert torch.equal(module.weight, state["embed.weight"])


def test_a_rank_has_its_part_of_a_parameter(saved) -> None:
    path, state = saved
    ours.save_file({"weight": state["embed.weight"]}, path.with_name("linear"))
    for rank in range(4):
        module = torch.nn.Linear(40, 150, bias=False)
        ours.load_into(module, path.with_name("linear"), shard={"weight": (0, rank, 4)})
        assert torch.equal(module.weight, state["embed.weight"][rank * 150 : rank * 150 + 150])
        module = torch.nn.Linear(10, 600, bias=False)
        ours.load_into(module, path.with_name("linear"), shard={"weight": (1, rank, 4)})
        assert torch.equal(module.weight, state["embed.weight"][:, rank * 10 : rank * 10 + 10])


def test_several_files_are_one_model(saved, tmp_path: Path) -> None:
    path, state = saved
    tensors = ours.load_file(path, backend="pread")
    names = sorted(tensors)
    ours.save_file({name: tensors[name] for name in names[:3]}, tmp_path / "x")
    ours.save_file({name: tensors[name] for name in names[3:]}, tmp_path / "y")
    module = Model(1.0)
    assert ours.load_into(module, [tmp_path / "x", tmp_path / "y"]) == ([], [])
    assert_equal(module, state)


def test_extra_state_that_is_no_tensor_is_missing_as_torch_has_it(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError("there is none in the file")

    ours.save_file(torch.nn.Linear(2, 2).state_dict(), tmp_path / "a")
    with pytest.raises(RuntimeError, match="_extra_state"):
        ours.load_into(Counting(2, 2), tmp_path / "a")
    assert ours.load_into(Counting(2, 2), tmp_path / "a", strict=False) == (["_extra_state"], [])


def test_gradients_and_hooks_are_left_alone(saved) -> None:
    path, _ = saved
    module = Model(1.0)
    module.norm.weight.grad = torch.ones(600)
    module.embed.weight.requires_grad_(False)
    ours.load_into(module, path)
    assert module.norm.weight.requires_grad and not module.embed.weight.requires_grad
    assert torch.equal(module.norm.weight.grad, torch.ones(600))
