"""`python -m thruway convert`."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as reference
import thruway.torch as ours
import torch
import torch.distributed.checkpoint as dcp
from thruway.torch import _convert
from thruway.torch.dcp import Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    weight = torch.arange(12.0).view(3, 4)
    return {
        "model": {"w": weight, "tied": weight, "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {"0": {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "step": 7,
    }


def assert_is_the_state(back: Any) -> None:
    wanted = state()
    assert torch.equal(back["model"]["w"], wanted["model"]["w"]) and back["step"] == 7
    assert torch.equal(back["model"]["tied"], wanted["model"]["w"]) and back["model"]["b"].dtype == torch.bfloat16
    assert back["optimizer"]["groups"] == wanted["optimizer"]["groups"]


def source(kind: str, place: Path) -> Path:
    path = place / kind
    if kind in ("pt", "old"):
        torch.save(state(), path, _use_new_zipfile_serialization=kind == "pt")
    elif kind == "dcp":
        dcp.save(state(), checkpoint_id=path, no_dist=True)
    elif kind == "ours":
        dcp.save(state(), storage_writer=Writer(path), no_dist=True)
    else:
        ours.save(state(), path)
    return path


@pytest.mark.parametrize("kind", ["pt", "old", "dcp", "ours", "state"])
def test_each_kind_of_state_becomes_one_file(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _convert.main([str(source(kind, tmp_path)), str(tmp_path / "out.safetensors"), "--json"]) == 0
    assert_is_the_state(ours.load(tmp_path / "out.safetensors"))
    told = json.loads(capsys.readouterr().out)
    assert told["tensors"] == (4 if kind in ("dcp", "ours") else 3) and told["left_out"] == 0


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_state_becomes_a_checkpoint(tmp_path: Path, kind: str) -> None:
    assert _convert.main([str(source(kind, tmp_path)), str(tmp_path / "run"), "--step", "12"]) == 0
    run = ours.Checkpointer(tmp_path / "run", device="cpu")
    assert run.steps() == [12] and not run.verify(12)
    assert_is_the_state(run.restore())
    assert torch.equal(ours.load_file(tmp_path / "run/step-00000012")["w"], state()["model"]["w"])
    # As a source, a checkpoint is its model.
    assert _convert.main([str(tmp_path / "run/step-00000012"), str(tmp_path / "model.safetensors")]) == 0


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_plain_files_hold_tensors_alone(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(source(kind, tmp_path)), str(tmp_path / "out.safetensors"), "--plain", "--key", "model"]
    assert _convert.main(given) == 0
    loaded = reference.load_file(tmp_path / "out.safetensors")
    assert torch.equal(loaded["w"], state()["model"]["w"]) and "thruway.state" not in str(
        (tmp_path / "out.safetensors").read_bytes()
    )
    assert _convert.main([given[0], str(tmp_path / "shards"), "--plain", "--max-shard-bytes", "50"]) == 0
    assert "4 other values left out" in capsys.readouterr().out
    assert (tmp_path / "shards/model.safetensors.index.json").exists()
    assert ours.load_file(tmp_path / "shards")["optimizer.state.0.step"] == 3


def test_a_model_of_the_reference_is_a_source_too(tmp_path: Path) -> None:
    reference.save_file({"a": torch.ones(2)}, tmp_path / "in.safetensors")
    assert _convert.main([str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")]) == 0
    assert ours.load(tmp_path / "out.safetensors")["a"].tolist() == [1, 1]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_that_a_source_says_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    torch.save({"x": Bomb(ran)}, tmp_path / "a.pt")
    dcp.save({"w": torch.ones(1), "x": 1}, checkpoint_id=tmp_path / "metadata", no_dist=True)
    (tmp_path / "metadata/.metadata").write_bytes(pickle.dumps(Bomb(ran)))
    dcp.save({"w": torch.ones(1), "x": Bomb(ran)}, checkpoint_id=tmp_path / "value", no_dist=True)
    ran.unlink(missing_ok=True)
    for name in ("a.pt", "metadata", "value"):
        assert _convert.main([str(tmp_path / name), str(tmp_path / "out")]) == 1
        assert "error: " in capsys.readouterr().err
    assert not ran.exists() and not (tmp_path / "out").exists()


def test_what_is_no_source_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "junk").write_bytes(b"\x80\x02junk and more of it")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("junk", "empty", "none"):
        assert _convert.main([str(tmp_path / name), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("error: ") == 3
    torch.save({"a": 1}, tmp_path / "a.pt")
    assert _convert.main([str(tmp_path / "a.pt"), str(tmp_path / "out"), "--key", "model"]) == 1
    for wrong in ([], [str(tmp_path / "a.pt"), "out", "--max-shard-bytes", "3"], ["a", "b", "--plain", "--step", "1"]):
        with pytest.raises(SystemExit) as raised:
            _convert.main(wrong)
        assert raised.value.code == 2


def test_the_command_has_it(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    command = [sys.executable, "-m", "thruway", "convert", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("torch: 3 tensors, 58 bytes -> ")
    assert_is_the_state(ours.load(tmp_path / "b.safetensors"))
