"""`thruway.dcp.json`: what the files of a distributed checkpoint hold together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from thruway import _nest
from thruway._errors import MalformedError, MismatchError, NotFoundError, UnsupportedError

NAME = "thruway.dcp.json"
_FORMAT, _VERSION = "thruway dcp", 1

# The key in a shard's header under which stands, as in its name, which write made it.
WRITE_ID = "thruway.write_id"

_FILE = re.compile(r"rank-\d{5,10}\.([0-9a-f]{32})(\.\d{1,10})?\.safetensors")
_ID = re.compile(r"[0-9a-f]{32}")
_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def file_name(rank: int, number: int, write_id: str) -> str:
    """The name of a rank's shard. It has several if it holds several pieces of one tensor."""
    return f"rank-{rank:05}.{write_id}{f'.{number}' if number else ''}.safetensors"


def write_id_of(name: str) -> str | None:
    """Which write made the shard with this name; nothing if it is not the name of one."""
    found = _FILE.fullmatch(name)
    return found and found[1]


class Place(NamedTuple):
    """Where a tensor, or a piece of one, is stored."""

    file: str
    # Its name there.
    name: str


class Value(NamedTuple):
    """What is no tensor, as it is stored."""

    # The structure of the nest that it is; or for what may be pickled, its pickle.
    structure: str
    pickled: bytes | None
    # Of the nest's tensors.
    places: dict[str, Place]


class Manifest(NamedTuple):
    """What is known of a checkpoint."""

    save_id: str
    # The bytes of each shard.
    files: dict[str, int]
    metadata: Metadata


def text_of(save_id: str, files: dict[str, int], metadata: Metadata, version: str) -> str:
    """The text of a manifest.

    Raises:
        MismatchError: something that the plan of the save has was written by no rank.
    """
    numbers = {name: number for number, name in enumerate(files)}
    stored: dict[MetadataIndex, Any] = metadata.storage_data

    def place(where: Place) -> list[Any]:
        return [numbers[where.file], where.name]

    def found(index: MetadataIndex) -> Any:
        if index not in stored:
            raise MismatchError(
                f"no rank wrote {index.fqn!r} at {list(index.offset or [])}: the checkpoint is not whole"
            )
        return stored[index]

    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for fqn, one in metadata.state_dict_metadata.items():
        if not isinstance(one, TensorStorageMetadata):
            value: Value = found(MetadataIndex(fqn))
            pickled = None if value.pickled is None else value.pickled.hex()
            values[fqn] = [value.structure, pickled, {name: place(where) for name, where in value.places.items()}]
            continue
        strides = getattr(one.properties, "strides", None)
        tensors[fqn] = {
            "dtype": str(one.properties.dtype).removeprefix("torch."),
            "size": list(one.size),
            "requires_grad": one.properties.requires_grad,
            "strides": None if strides is None else list(strides),
            "chunks": [
                [list(chunk.offsets), list(chunk.sizes), *place(found(MetadataIndex(fqn, chunk.offsets)))]
                for chunk in one.chunks
            ],
        }
    whole = {
        "format": _FORMAT,
        "version": _VERSION,
        "save_id": save_id,
        "writer": f"thruway {version}",
        "files": [[name, size] for name, size in files.items()],
        "tensors": tensors,
        "values": values,
        # What the planner needs to make nests of flat names again.
        "planner": _nest.encode(metadata.planner_data).structure,
    }
    return json.dumps(whole, allow_nan=False, separators=(",", ":")) + "\n"


def parsed(text: str, path: Path) -> Manifest:
    """The manifest with this text. Every part of it is checked.

    Raises:
        MalformedError: it is none.
        UnsupportedError: it is one of a later version.
    """
    try:
        whole = json.loads(text)
        if whole["format"] != _FORMAT:
            raise ValueError("it is of another program")
        if whole["version"] != _VERSION:
            hint = "update thruway"
            raise UnsupportedError(
                f"{path} has version {whole['version']!r}, and this program knows {_VERSION}", hint=hint
            )
        return _checked(whole)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise MalformedError(f"{path} is no manifest of a distributed checkpoint: {error}") from None


def _checked(whole: dict[str, Any]) -> Manifest:
    names = [name for name, _ in whole["files"]]
    files = {_text(name): _number(size) for name, size in whole["files"]}
    if not all(map(write_id_of, names)) or len(files) != len(names) or not _ID.fullmatch(whole["save_id"]):
        raise ValueError("its files have other names than they should")

    def place(number: Any, name: Any) -> Place:
        return Place(names[_number(number)], _text(name))

    stored: dict[MetadataIndex, Any] = {}
    state: dict[str, Any] = {}
    for fqn, one in whole["tensors"].items():
        size = torch.Size(_numbers(one["size"]))
        chunks = []
        for offsets, sizes, number, name in one["chunks"]:
            chunk = ChunkStorageMetadata(torch.Size(_numbers(offsets)), torch.Size(_numbers(sizes)))
            _check_chunk(fqn, chunk, size)
            chunks.append(chunk)
            stored[MetadataIndex(fqn, chunk.offsets)] = place(number, name)
        state[fqn] = TensorStorageMetadata(_properties(one), size, chunks)
    for fqn, (structure, pickled, places) in whole["values"].items():
        if fqn in state:
            raise ValueError(f"{fqn!r} is a tensor and something else")
        state[fqn] = BytesStorageMetadata()
        raw = None if pickled is None else bytes.fromhex(pickled)
        stored[MetadataIndex(fqn)] = Value(_text(structure), raw, {key: place(*one) for key, one in places.items()})
    planner = _nest.decode(whole["planner"], {})
    return Manifest(whole["save_id"], files, Metadata(state, planner_data=planner, storage_data=stored))


def _check_chunk(fqn: str, chunk: ChunkStorageMetadata, size: torch.Size) -> None:
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        raise ValueError(f"a piece of {fqn!r} has other dimensions than the whole")
    ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
    if any(end > length for end, length in zip(ends, size, strict=True)):
        raise ValueError(f"a piece of {fqn!r} is not within it")


def _properties(one: dict[str, Any]) -> TensorProperties:
    properties = TensorProperties(dtype=_DTYPES[one["dtype"]], requires_grad=one["requires_grad"] is True)
    if one["strides"] is not None and hasattr(properties, "strides"):
        properties.strides = tuple(_numbers(one["strides"]))
    return properties


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no size")
    return value


def _numbers(values: Any) -> list[int]:
    return [_number(value) for value in values]


def read(directory: Path) -> Manifest:
    """The manifest of a directory, whose files are all there at their sizes.

    Raises:
        NotFoundError: there is no checkpoint.
        MismatchError: it has lost files, or parts of them.
    """
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        hint = "a checkpoint of torch's own is loaded by torch's reader, or converted: python -m thruway convert"
        raise NotFoundError(f"{directory} holds no checkpoint: there is no {NAME}", hint=hint) from None
    except UnicodeDecodeError as error:
        raise MalformedError(f"{path} is no manifest of a distributed checkpoint: {error}") from None
    manifest = parsed(text, path)
    check_sizes(directory, manifest.files)
    return manifest


def check_sizes(directory: Path, files: dict[str, int]) -> None:
    """Raises for files that are not there, or not of this size."""
    faults = []
    for name, size in files.items():
        try:
            found = (directory / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            faults.append(f"{name} is missing")
            continue
        if found != size:
            faults.append(f"{name} has {found} bytes instead of {size}")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise MismatchError(f"the checkpoint in {directory} is not whole: {'; '.join(faults[:8])}{more}")
