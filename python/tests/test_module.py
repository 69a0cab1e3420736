"""Modules: `load_model` and `save_model`, beside the reference package."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch as reference
import thruway
import thruway.torch as ours
import torch


class Tied(torch.nn.Module):
    """Two names for one tensor, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 6, bias=False)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(6)


def test_a_tensor_with_two_names_is_saved_once_and_either_package_loads_it(tmp_path: Path) -> None:
    model = Tied()
    for save in (ours.save_model, reference.save_model):
        save(model, tmp_path / "a", {"format": "pt"})
        names = ours.load_file(tmp_path / "a").keys()
        assert "embed.weight" in names and "head.weight" not in names
        with thruway.safe_open(tmp_path / "a", "pt") as opened:
            assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        for load in (ours.load_model, reference.load_model):
            fresh = Tied()
            assert [list(names) for names in load(fresh, tmp_path / "a")] == [[], []]
            assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
            assert fresh.head.weight is fresh.embed.weight


def test_what_is_missing_or_too_many_is_told_as_torch_tells_it(tmp_path: Path) -> None:
    state = ours.load(ours.save({"norm.weight": torch.ones(6), "extra": torch.ones(1)}))
    ours.save_file(state, tmp_path / "a")
    with pytest.raises(RuntimeError) as raised:
        ours.load_model(Tied(), tmp_path / "a")
    assert 'Unexpected key(s) in state_dict: "extra".' in str(raised.value)
    assert '"embed.weight", "head.weight", "norm.bias"' in str(raised.value)
    missing, unexpected = ours.load_model(Tied(), tmp_path / "a", strict=False)
    assert "norm.bias" in missing and unexpected == ["extra"]
    ours.save_file({"norm.weight": torch.ones(7)}, tmp_path / "b")
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.load_model(Tied(), tmp_path / "b", strict=False)


def test_two_tensors_of_a_file_for_one_of_the_module_are_one_too_many(tmp_path: Path) -> None:
    state = {**Tied().state_dict(), "head.weight": torch.ones(6, 4)}
    ours.save_file(state, tmp_path / "a")
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "head.weight"'):
        ours.load_model(Tied(), tmp_path / "a")


def test_a_parameter_that_is_not_contiguous_is_copied_or_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 5, bias=False)
    model.weight = torch.nn.Parameter(torch.randn(3, 5).T)
    ours.save_model(model, tmp_path / "a")
    assert torch.equal(ours.load_file(tmp_path / "a")["weight"], model.weight)
    with pytest.raises(ValueError, match="contiguous"):
        ours.save_model(model, tmp_path / "b", force_contiguous=False)
