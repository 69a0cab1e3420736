"""Distributed checkpoints in torch's own layout, read without running what they say."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

from thruway._errors import InvalidInputError, MalformedError

_PLAIN = {
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in metadata.__all__},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    # Of where it was saved. Pieces of a path go no further than its name.
    ("pathlib", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
}


class _Unpickler(pickle.Unpickler):
    """Makes what metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
        try:
            return _PLAIN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"metadata has no use for {module}.{name}") from None


class Reader(FileSystemReader):
    """Torch's reader, but for the pickle that the metadata is."""

    def read_metadata(self, *args: Any, **options: Any) -> metadata.Metadata:
        """What the checkpoint holds."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
        except OSError:
            raise
        except Exception as error:
            # A pickle that was made up can fail in any way.
            raise MalformedError(f"{path} is not the metadata of a distributed checkpoint: {error}") from None
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise MalformedError(f"{path} is not the metadata of a distributed checkpoint")
        for where in found.storage_data.values():
            name = getattr(where, "relative_path", None)
            if not isinstance(name, str) or Path(name).name != name:
                raise MalformedError(f"{path} names a file that is not beside it: {name!r}")
        found.storage_meta = metadata.StorageMeta()
        return found


class _Everything(_EmptyStateDictLoadPlanner):
    """Loads all there is; values as weights are."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes a value in."""
        fqn = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            hint = "load it with torch's reader, if you trust who made it, and save it again without this value"
            raise InvalidInputError(f"{fqn!r} is no plain value, and would run code: {reason}", hint=hint) from None
        checked = io.BytesIO()
        torch.save(loaded, checked)
        checked.seek(0)
        # Torch's way for the rest: a pickle, but one that was made here.
        super().load_bytes(read_item, checked)


def everything() -> _EmptyStateDictLoadPlanner:
    """The plan of a load of all there is."""
    made: Any = _Everything
    planner: _EmptyStateDictLoadPlanner = made()
    return planner
