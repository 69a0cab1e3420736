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


def _rename(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}old_")]:
        state[prefix + name.removeprefix(f"{prefix}old_")] = state.pop(name)


def _transpose(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].T.contiguous()


def _double(module: torch.nn.Module, _: object) -> None:
    module.weight.data.mul_(2)


class Packed(torch.nn.Module):
    """Keeps its weight where torch does not see it, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = [torch.zeros(4)]
        self.extra = torch.zeros(2)

    def _save_to_state_dict(self, state: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}w"] = self.packed[0].clone()

    def _load_from_state_dict(self, state: dict[str, torch.Tensor], prefix: str, *arguments: object) -> None:
        self.packed[0] = state.pop(f"{prefix}w").clone()
        super()._load_from_state_dict(state, prefix, *arguments)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state.clone()


def test_what_a_module_loads_in_its_own_way_is_what_load_state_dict_makes_of_it(tmp_path: Path) -> None:
    def make() -> torch.nn.Module:
        module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)), Packed())
        module[0].register_load_state_dict_pre_hook(_rename)
        module[1].register_load_state_dict_pre_hook(_transpose)
        # What these put into the state is not what the module keeps.
        module[2].register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}bias": state[f"{prefix}bias"].half()})
        )
        module[3].register_load_state_dict_post_hook(_double)
        return module

    file = {name: torch.rand(tensor.shape) for name, tensor in make().state_dict().items()}
    file = {name.replace("0.", "0.old_", 1) if name.startswith("0.") else name: one for name, one in file.items()}
    ours.save_file(file, tmp_path / "a")
    found, wanted = make(), make()
    assert ours.load_into(found, tmp_path / "a") == ([], [])
    wanted.load_state_dict(file)
    assert torch.equal(found[4].packed[0], file["4.w"]) and torch.equal(found[4].extra, file["4._extra_state"])
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_conjugated_and_negated_buffers_read_as_the_file_does(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.register_buffer("c", torch.zeros(4, dtype=torch.complex64).conj())
    module.register_buffer("n", torch._neg_view(torch.zeros(4)))
    file = {"c": torch.complex(torch.arange(4.0), torch.ones(4)), "n": torch.arange(4.0)}
    ours.save_file(file, tmp_path / "a")
    ours.load_into(module, tmp_path / "a")
    assert torch.equal(module.c, file["c"]) and torch.equal(module.n, file["n"])


def test_memory_that_cannot_be_filled_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    freed, shrunk = torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)
    freed.weight.untyped_storage().resize_(0)
    shrunk.weight.untyped_storage().resize_(16)
    expanded = torch.nn.Linear(30, 30)
    expanded.weight = torch.nn.Parameter(torch.zeros(30, 1).expand(30, 30))
    ours.save_file({"bias": torch.ones(30), "weight": torch.ones(30, 30)}, tmp_path / "a")
    for module, message in ((freed, "no memory"), (shrunk, "no memory"), (expanded, "is expanded")):
        before = module.bias.clone()
        with pytest.raises(thruway.InvalidInputError, match=f"weight.*{message}"):
            ours.load_into(module, tmp_path / "a")
        assert torch.equal(module.bias, before)


def test_of_several_names_of_one_tensor_the_last_counts_as_for_torch(tmp_path: Path) -> None:
    model = Model(1.0)
    state = model.state_dict() | {"embed.weight": torch.ones(600, 40), "head.weight": torch.full((600, 40), 2.0)}
    ours.save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "a")
    ours.load_into(model, tmp_path / "a")
    reference = Model(1.0)
    reference.load_state_dict(state)
    assert torch.equal(model.head.weight, reference.head.weight) and (model.head.weight == 2).all()
