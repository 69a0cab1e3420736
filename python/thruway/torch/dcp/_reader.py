"""Reading distributed checkpoints."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from thruway import _nest
from thruway._errors import InvalidInputError, MismatchError, ThruwayError
from thruway._open import Bytes, Load
from thruway._thruway import Model
from thruway.torch import _into, _tensors
from thruway.torch import _nest as _torch_nest
from thruway.torch.dcp import _manifest
from thruway.torch.dcp._manifest import Manifest, Value

_LOG = logging.getLogger("thruway")

# How many bytes of pieces that do not go where they belong at once are in memory together, if one is not more.
_ASIDE_BYTES = 256 << 20


class Reader(StorageReader):
    """Reads what `Writer` wrote: the `storage_reader` of `dcp.load`, with as many ranks as it may be.

    Pieces of tensors that are wanted as they were saved go straight to where they belong, in host memory or on a GPU.

    Args:
        path: the checkpoint's directory. A `checkpoint_id` given to `dcp.load` comes before it.
        allow_pickle: whether to unpickle what was stored so. Who made the checkpoint can run code here then.
        encoder: the one that it was saved with, if any.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        allow_pickle: bool = False,
        encoder: _nest.Encoding = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._allow_pickle, self._encoder = allow_pickle, encoder
        self._manifest: Manifest | None = None

    @property
    def checkpoint_id(self) -> str | PathLike[str]:
        """The checkpoint's directory."""
        return self._directory()

    def _directory(self) -> Path:
        if self.path is None:
            raise InvalidInputError("there is no place to load from: give Reader a path, or dcp.load a checkpoint_id")
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether this is the name of a directory."""
        return not isinstance(checkpoint_id, str) or "://" not in checkpoint_id

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """A new load begins, which may be from elsewhere."""
        self._manifest = None
        if checkpoint_id:
            self.path = Path(checkpoint_id)

    # Not called `kwargs`: torch would look for checkpoints of single ranks if this fails.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """What the checkpoint holds. All its files are there at their sizes, or this fails."""
        try:
            self._manifest = _manifest.read(self._directory())
        except ThruwayError as error:
            # torch 2.11 keeps the reason to itself, and says that the metadata is None.
            _LOG.error("%s", error)
            raise
        metadata = self._manifest.metadata
        metadata.storage_meta = StorageMeta(checkpoint_id=self._directory(), save_id=self._manifest.save_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The metadata is known already."""
        if self._manifest is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan of a rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what this rank wants, file by file."""
        manifest = self._manifest
        if manifest is None:
            raise InvalidInputError("there is no load under way: load with dcp.load")
        stored = manifest.metadata.storage_data
        per_file: dict[str, dict[str, _Piece]] = {}
        for item in plan.items:
            found = stored.get(_index_of(item))
            if found is None:
                raise MismatchError(f"the checkpoint has no {item.storage_index.fqn!r} at {item.storage_index.offset}")
            if isinstance(found, Value):
                planner.load_bytes(item, self._value(item.storage_index.fqn, found))
                continue
            pieces = per_file.setdefault(found.file, {})
            if found.name not in pieces:
                pieces[found.name] = _piece(manifest.metadata.state_dict_metadata[item.storage_index.fqn], item)
            pieces[found.name].items.append(item)
        for name, pieces in per_file.items():
            _File(self._directory() / name).read(pieces, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _value(self, fqn: str, value: Value) -> io.BytesIO:
        """What torch's planner takes for a value: a pickle of it, made here and now."""
        if value.pickled is not None:
            if not self._allow_pickle:
                hint = "if you trust who made it: Reader(..., allow_pickle=True)"
                raise InvalidInputError(f"{fqn!r} was stored as a pickle, which can run code when read", hint=hint)
            return io.BytesIO(value.pickled)
        tensors: dict[str, Any] = {}
        for key, place in value.places.items():
            tensors[key] = _File(self._directory() / place.file).whole(place.name)
        made = io.BytesIO()
        torch.save(_nest.decode(value.structure, {"": tensors}, self._encoder), made)
        made.seek(0)
        return made


def _index_of(item: ReadItem) -> MetadataIndex:
    if item.type == LoadItemType.BYTE_IO:
        return MetadataIndex(item.storage_index.fqn)
    return item.storage_index


class _Piece(NamedTuple):
    """A piece of a tensor, as it was saved, and what is wanted of it."""

    dtype: torch.dtype
    shape: list[int]
    items: list[ReadItem]


def _piece(tensor: Any, item: ReadItem) -> _Piece:
    offsets = item.storage_index.offset
    chunk = next(one for one in tensor.chunks if one.offsets == offsets)
    return _Piece(tensor.properties.dtype, list(chunk.sizes), [])


class _Target(NamedTuple):
    """What is wanted of a piece, and where it belongs."""

    item: ReadItem
    tensor: torch.Tensor


class _File:
    """A shard, open for reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._models: dict[str, Model] = {}
        model = self._model("host")
        if (model.metadata(0) or {}).get(_manifest.WRITE_ID) != _manifest.write_id_of(path.name):
            raise MismatchError(f"{path} is not the file that was saved under this name")
        self._entries = {name: (code, shape) for name, code, shape, *_ in model.entries()}

    def _model(self, memory: str) -> Model:
        if memory not in self._models:
            self._models[memory] = Model(self._path, memory, "auto")
        return self._models[memory]

    def _code(self, name: str, piece: _Piece | None = None) -> str:
        if name not in self._entries:
            raise MismatchError(f"{self._path} has no tensor {name!r}")
        code, shape = self._entries[name]
        if piece and piece.dtype == _tensors.DTYPES.get(code) and piece.shape != _tensors.shape_of(code, shape):
            raise MismatchError(f"{name!r} in {self._path} has the shape {shape} instead of {piece.shape}")
        return code

    def whole(self, name: str) -> torch.Tensor:
        """A tensor, in host memory."""
        self._code(name)
        tensors, _ = Load(_tensors, self._model("host"), "host", [name], []).wait()
        tensor: torch.Tensor = tensors[name]
        return tensor

    def read(self, pieces: dict[str, _Piece], planner: LoadPlanner) -> None:
        """Reads pieces of tensors to where the planner wants them."""
        straight: dict[str, dict[str, _Target]] = {}
        aside: dict[str, dict[str, list[_Target]]] = {}
        for name, piece in pieces.items():
            code = self._code(name, piece)
            for item in piece.items:
                target = _Target(item, planner.resolve_tensor(item).detach())
                if list(target.tensor.shape) != list(item.lengths):
                    found = f"there is room for {list(target.tensor.shape)}, and {list(item.lengths)} is wanted"
                    raise MismatchError(f"{item.dest_index.fqn!r}: {found}")
                memory = _into._memory_of(target.tensor)
                whole = len(piece.items) == 1 and list(item.lengths) == piece.shape and target.tensor.numel()
                if whole and _into._takes_bytes(target.tensor, code):
                    straight.setdefault(memory, {})[name] = target
                else:
                    aside.setdefault(memory, {}).setdefault(name, []).append(target)
        for memory, targets in straight.items():
            into: list[tuple[str, Bytes]] = [
                (name, _into._bytes_of(target.tensor, memory)) for name, target in targets.items()
            ]
            Load(_tensors, self._model(memory), memory, list(targets), [], into=into).wait()
            for target in targets.values():
                planner.commit_tensor(target.item, target.tensor)
        for memory, wanted in aside.items():
            for window in _windows(wanted):
                self._copy(memory, window, pieces, planner)

    def _copy(
        self, memory: str, wanted: dict[str, list[_Target]], pieces: dict[str, _Piece], planner: LoadPlanner
    ) -> None:
        """Reads tensors, or of each the part that is wanted, and copies from there."""
        parts = {name: self._narrowed(name, pieces[name], targets) for name, targets in wanted.items()}
        select = [name for name, part in parts.items() if part is None]
        slices = [(name, *part) for name, part in parts.items() if part is not None]
        loaded, _ = Load(_tensors, self._model(memory), memory, select, slices).wait()
        for name, targets in wanted.items():
            tensor = _as(loaded.pop(name), pieces[name])
            for target in targets:
                part, narrowed = tensor, parts[name]
                for dimension, (start, length) in enumerate(
                    zip(target.item.storage_offsets, target.item.lengths, strict=True)
                ):
                    before = narrowed[1] if narrowed is not None and narrowed[0] == dimension else 0
                    part = part.narrow(dimension, start - before, length)
                target.tensor.copy_(part)
                planner.commit_tensor(target.item, target.tensor)

    def _narrowed(self, name: str, piece: _Piece, targets: list[_Target]) -> tuple[int, int, int] | None:
        """The first dimension of which not all is wanted, and the range that is."""
        # Of several wishes all is read, once; and of what is stored as bytes or pairs no part can be named.
        if len(targets) > 1 or piece.dtype != _tensors.DTYPES.get(self._code(name)) or self._code(name) == "F4":
            return None
        item = targets[0].item
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if length != piece.shape[dimension]:
                return dimension, start, start + length
        return None


def _windows(wanted: dict[str, list[_Target]]) -> Iterator[dict[str, list[_Target]]]:
    """What is wanted, some at a time."""
    window: dict[str, list[_Target]] = {}
    held = 0
    for name, targets in wanted.items():
        takes = sum(target.tensor.nbytes for target in targets)
        if window and held + takes > _ASIDE_BYTES:
            yield window
            window, held = {}, 0
        window[name] = targets
        held += takes
    if window:
        yield window


def _as(loaded: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """What was loaded, with its dtype, if files lack that."""
    if loaded.dtype == piece.dtype:
        return loaded
    name = str(piece.dtype).removeprefix("torch.")
    try:
        return _torch_nest.restored(loaded, {"dtype": name, "shape": piece.shape})
    except ValueError as error:
        raise MismatchError(f"what is stored is not what the manifest says: {error}") from None
