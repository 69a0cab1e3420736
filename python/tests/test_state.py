"""`thruway.torch.save` and `load` in the shape of torch's own, on the CPU."""

from __future__ import annotations

import io
import json
import mmap
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch as reference
import thruway
import thruway.torch as ours
import torch


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 30)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "step": 7,
        3: (float("inf"), None, b"bytes"),
    }
    return model, optimizer, state


def assert_is_the_state(back: Any, state: dict[str, Any]) -> None:
    assert list(back) == list(state) and back["step"] == 7 and back[3] == state[3]
    for name, tensor in state["model"].items():
        assert torch.equal(back["model"][name], tensor), name
    for number, of_parameter in state["optimizer"]["state"].items():
        for name, tensor in of_parameter.items():
            assert torch.equal(back["optimizer"]["state"][number][name], tensor)
    assert back["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert np.array_equal(back["rng"][2][1], state["rng"][2][1]) and back["rng"][1] == state["rng"][1]


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"map_location": "cpu", "weights_only": True}])
def test_a_training_state_is_one_file(tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizer, state = training()
    ours.save(state, tmp_path / "a.pt")
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]
    back = ours.load(tmp_path / "a.pt", **options)
    assert_is_the_state(back, state)
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])


def test_other_programs_open_the_file(tmp_path: Path) -> None:
    _, _, state = training()
    ours.save(state, tmp_path / "a.safetensors", metadata={"run": "7b"})
    loaded = reference.load_file(tmp_path / "a.safetensors")
    assert torch.equal(loaded["model.0.weight"], state["model"]["0.weight"])
    assert torch.equal(loaded["optimizer.state.2.exp_avg"], state["optimizer"]["state"][2]["exp_avg"])
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as opened:
        metadata = opened.metadata()
    assert metadata["run"] == "7b" and metadata["format"] == "pt"
    assert ["step", 7] in json.loads(metadata["thruway.state"])["state"]["!dict"]
    ours.save(state["model"], str(tmp_path / "model"))
    assert reference.load_file(tmp_path / "model").keys() == state["model"].keys()


def test_files_of_other_programs_are_their_tensors(tmp_path: Path) -> None:
    saved = {"b": torch.ones(3), "a": torch.zeros(2, 2)}
    reference.save_file(saved, tmp_path / "a")
    back = ours.load(tmp_path / "a")
    assert sorted(back) == ["a", "b"] and torch.equal(back["a"], saved["a"])
    assert list(ours.load(tmp_path / "a", only=["b"])) == ["b"]
    ours.save_file(saved, tmp_path / "shards", max_shard_bytes=20)
    assert sorted(ours.load(tmp_path / "shards")) == ["a", "b"]


def test_open_files_are_written_and_read() -> None:
    _, _, state = training()
    buffer = io.BytesIO(b"")
    ours.save(state, buffer)
    buffer.seek(0)
    assert_is_the_state(ours.load(buffer), state)

    class Slow(io.RawIOBase):
        def __init__(self) -> None:
            self.written = b""

        def write(self, data: Any) -> int:
            self.written += bytes(data[:1000])
            return min(1000, len(data))

    slow = Slow()
    ours.save(state, slow)
    assert slow.written == buffer.getvalue()


def test_each_shape_is_told_by_its_arguments(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0)}
    for data in (ours.save(tensors), ours.save(tensors, None), ours.save(tensors, {"x": "y"})):
        assert isinstance(data, bytes) and torch.equal(ours.load(data)["a"], tensors["a"])
    assert ours.save(tensors, metadata={"x": "y"}) == reference.save(tensors, {"x": "y"})
    assert ours.save(tensors=tensors) == reference.save(tensors)
    assert ours.save(tensors, f=tmp_path / "a") is None
    assert ours.save(obj=tensors, f=str(tmp_path / "b")) is None
    for file in (tmp_path / "a", str(tmp_path / "b")):
        assert ours.load(f=file).keys() == tensors.keys()
    content = (tmp_path / "a").read_bytes()
    assert torch.equal(ours.load(data=bytearray(content))["a"], tensors["a"])
    with (tmp_path / "a").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert torch.equal(ours.load(mapped)["a"], tensors["a"])
        assert torch.equal(ours.load(file)["a"], tensors["a"])
    for wrong in (3, None, [b"x"], object()):
        with pytest.raises(TypeError):
            ours.load(wrong)
    with pytest.raises(TypeError):
        ours.load()
    with pytest.raises(thruway.InvalidInputError):
        ours.save(tensors, 3)
    with pytest.raises(TypeError):
        ours.save(tensors, tmp_path / "c", {"x": "y"}, 3)
    with pytest.raises(thruway.InvalidInputError, match=r"thruway\.state"):
        ours.save(tensors, tmp_path / "c", metadata={"thruway.state": ""})
    assert not (tmp_path / "c").exists()


def test_a_refused_value_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    ours.save({"a": 1}, tmp_path / "a")
    with pytest.raises(thruway.InvalidInputError, match=r"state\['a'\]\[0\]"):
        ours.save({"a": [object()]}, tmp_path / "a")
    assert ours.load(tmp_path / "a") == {"a": 1}


def test_only_some_keys_read_only_their_tensors(tmp_path: Path) -> None:
    ours.save({"model": {"w": torch.ones(1000)}, "ema": torch.zeros(1 << 20), "step": 3}, tmp_path / "a")
    receipts: list[thruway.Receipt] = []
    back = ours.load(tmp_path / "a", only=["model", "step"], receipt=receipts.append)
    assert list(back) == ["model", "step"] and back["step"] == 3 and torch.equal(back["model"]["w"], torch.ones(1000))
    assert sum(one.bytes for one in receipts) < 100_000


def test_an_encoder_is_taken(tmp_path: Path) -> None:
    encoder = (lambda value: str(value) if isinstance(value, Fraction) else NotImplemented, Fraction)
    ours.save([Fraction(1, 3)], tmp_path / "a", encoder=encoder)
    assert ours.load(tmp_path / "a", encoder=encoder) == [Fraction(1, 3)]


def test_where_tensors_go(tmp_path: Path) -> None:
    ours.save({"t": torch.ones(2), "n": np.ones(2)}, tmp_path / "a")
    for location in (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, {"cpu": "cpu"}):
        back = ours.load(tmp_path / "a", location)
        assert back["t"].device.type == "cpu" and isinstance(back["n"], np.ndarray)
    with pytest.raises(thruway.InvalidInputError, match="map_location"):
        ours.load(tmp_path / "a", map_location=lambda storage, location: storage)
    with pytest.raises(thruway.InvalidInputError):
        ours.load(tmp_path / "a", map_location="nowhere")


def test_shared_memory_is_shared_again(tmp_path: Path) -> None:
    weight = torch.randn(300, 200)
    ours.save({"head": weight, "embedding": weight, "row": weight[3]}, tmp_path / "a")
    assert (tmp_path / "a").stat().st_size < 250_000
    for options in ({}, {"mmap": True}):
        back = ours.load(tmp_path / "a", **options)
        back["head"][3] = 0
        assert not back["embedding"][3].any() and not back["row"].any()


def test_what_is_cut_or_edited_is_an_error_of_ours(tmp_path: Path) -> None:
    ours.save({"a": torch.ones(3), "b": [1, (2,)]}, tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    for start in range(0, len(content), 7):
        (tmp_path / "b").write_bytes(content[:start])
        with pytest.raises(thruway.ThruwayError):
            ours.load(tmp_path / "b")
        with pytest.raises(thruway.ThruwayError):
            ours.load(io.BytesIO(content[:start]))
    (tmp_path / "b").write_bytes(content.replace(b'"a":{"dtype"', b'"x":{"dtype"'))
    with pytest.raises(thruway.MalformedError, match=r"state\['a'\]"):
        ours.load(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        ours.load(tmp_path / "none")
