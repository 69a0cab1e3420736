"""`python -m thruway convert`: training states of other programs as safetensors files, or as checkpoints.

What is read are torch's own files (`.pt`, `.bin`; weights only, so that nothing in them is run), distributed
checkpoints of torch and of this package, and safetensors.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thruway import _nest, _save
from thruway._errors import InvalidInputError, MalformedError, NotFoundError, ThruwayError
from thruway.torch import _state, _tensors
from thruway.torch.checkpointer import Checkpointer

_DESCRIPTION = (
    "Converts a training state of torch, of DCP or in safetensors files into safetensors, or into a checkpoint."
)


def main(arguments: Sequence[str]) -> int:
    """Runs `convert` with these arguments, and gives the exit status."""
    parser = argparse.ArgumentParser(prog="thruway convert", description=_DESCRIPTION)
    parser.add_argument("source", type=Path, help="a .pt file, a directory of DCP, a safetensors file or directory")
    parser.add_argument(
        "target", type=Path, help="the file to be written; with --step or --max-shard-bytes a directory"
    )
    parser.add_argument("--plain", action="store_true", help="write the tensors alone, and not the state around them")
    parser.add_argument(
        "--step", type=int, help="the target is a directory of checkpoints: save the state as this step"
    )
    parser.add_argument(
        "--key", action="append", default=[], help="of the source, take what is under this key; may repeat"
    )
    parser.add_argument("--max-shard-bytes", type=int, help="with --plain: write files of so many bytes, and an index")
    parser.add_argument("--json", action="store_true", help="tell what was done as JSON")
    given = parser.parse_args(arguments)
    if given.max_shard_bytes is not None and not given.plain:
        parser.error("--max-shard-bytes goes with --plain")
    if given.plain and given.step is not None:
        parser.error("a checkpoint holds the whole state: --step does not go with --plain")
    try:
        told = convert(given.source, given.target, given.plain, given.key, given.max_shard_bytes, given.step)
    except (ThruwayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if getattr(error, "hint", None):
            print(f"hint: {error.hint}", file=sys.stderr)  # type: ignore[union-attr]
        return 1
    if given.json:
        print(json.dumps(told))
    else:
        left_out = f", {told['left_out']} other values left out" if told["left_out"] else ""
        print(f"{told['kind']}: {told['tensors']} tensors, {told['bytes']} bytes{left_out} -> {given.target}")
    return 0


def convert(
    source: Path, target: Path, plain: bool, keys: Sequence[str], max_shard_bytes: int | None, step: int | None
) -> dict[str, Any]:
    """Converts, and tells what it found."""
    kind, state = _read(source)
    for key in keys:
        if not isinstance(state, dict) or key not in state:
            raise InvalidInputError(f"there is no {key!r} in {source}")
        state = state[key]
    nest = _nest.encode(state, grouped=False)
    tensors = nest.groups.get("", {})
    if plain:
        packed = {name: _tensors.packed(one) if isinstance(one, torch.Tensor) else one for name, one in tensors.items()}
        sources = _save.checked(packed, _state.source)
        _save.to_storage(sources, target, {"format": "pt"}, max_shard_bytes, None, None)
    elif step is not None:
        with Checkpointer(target, device="cpu") as run:
            run.save(step, state)
    else:
        _state.save(state, target)
    return {
        "kind": kind,
        "source": str(source),
        "target": str(target),
        "tensors": len(tensors),
        "bytes": sum(one.nbytes for one in tensors.values()),
        "left_out": _others(state) if plain else 0,
    }


def _others(state: Any) -> int:
    """How many values of a state are no tensors."""
    if isinstance(state, dict):
        return sum(map(_others, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(_others, state))
    return not (isinstance(state, torch.Tensor) or type(state).__module__ == "numpy")


def _read(source: Path) -> tuple[str, Any]:
    """What the source is, and what is in it."""
    if not source.exists():
        raise NotFoundError(f"there is nothing at {source}")
    if (source / "thruway.dcp.json").exists() or (source / ".metadata").exists():
        return _read_distributed(source)
    if source.is_dir() or source.name.endswith(".json") or not _is_torch_s(source):
        return "safetensors", _state.load(source, "cpu", mmap=True)
    return "torch", _read_torch(source)


def _is_torch_s(source: Path) -> bool:
    if zipfile.is_zipfile(source):
        return True
    with source.open("rb") as file:
        start = file.read(9)
    # A pickle, as torch wrote before it wrote archives. The header of a safetensors file begins with "{" or spaces.
    return start[:1] == b"\x80" and start[8:] not in (b"{", b" ")


def _read_torch(source: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except pickle.UnpicklingError as error:
        # It goes on for pages about how to run what the file says.
        reason = str(error).partition("\n")[0]
        hint = "have the program that made it save a state_dict, of tensors and plain values"
        raise InvalidInputError(f"{source} holds more than weights, and would run code: {reason}", hint=hint) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise MalformedError(f"{source} cannot be read: {str(error).partition(chr(10))[0]}") from None


def _read_distributed(source: Path) -> tuple[str, Any]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from thruway.torch import _foreign_dcp
    from thruway.torch.dcp import Reader

    is_ours = (source / "thruway.dcp.json").exists()
    reader = Reader(source) if is_ours else _foreign_dcp.Reader(source)
    reader.read_metadata()
    state: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict(state, reader, planner=_foreign_dcp.everything(), no_dist=True)
    except CheckpointException as error:
        ((cause, _), *_) = error.failures.values()
        if isinstance(cause, ThruwayError):
            raise cause from None
        raise MalformedError(f"{source} cannot be read: {str(cause).partition(chr(10))[0]}") from None
    return "thruway DCP" if is_ours else "DCP", state
