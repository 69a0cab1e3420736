"""Writing distributed checkpoints.

    every rank     says what it has
    first rank     makes a hidden directory beside the place
    every rank     writes its shards there, synced
    first rank     checks that all are there, writes the manifest, syncs, and gives the directory its name

Over a checkpoint that is there the shards go into its directory, under names of their own, and the manifest's rename is
what replaces it; only then do the old shards go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import io
import json
import os
import secrets
import shutil
import weakref
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from thruway import _nest, _save
from thruway._errors import AlreadyExistsError, InvalidInputError, NotFoundError, UnsupportedError
from thruway._thruway import __version__
from thruway.torch import _nest as _torch_nest
from thruway.torch import _state, _tensors
from thruway.torch.dcp import _manifest
from thruway.torch.dcp._manifest import Place, Value

# The key under which torch's own reader of safetensors looks for where the pieces of tensors belong.
_TORCH_S_KEY = "DCP_SHARDING_INFO"


class Writer(StorageWriter):
    """Writes distributed checkpoints: the `storage_writer` of `dcp.save` and `dcp.async_save`.

    Args:
        path: the checkpoint's directory, which all ranks see. A `checkpoint_id` given to `dcp.save` comes before it.
        overwrite: whether a checkpoint that is there may be replaced. It is until the new one is complete.
        allow_pickle: whether values that are neither tensors nor plain are stored as pickles. Only a reader that allows
            it too unpickles them.
        encoder: for such values, as `thruway.torch.save` takes it.
    """

    # What `dcp.async_save` looks for in a stager.
    _synchronize_after_execute = False

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        allow_pickle: bool = False,
        encoder: _nest.Encoding = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._overwrite, self._allow_pickle, self._encoder = overwrite, allow_pickle, encoder
        self._save_id, self._rank = "", 0
        # Of the first rank, while a save is under way: where to, and a lock that says so.
        self._stage: Path | None = None
        self._lock: int | None = None
        self._stager: DefaultStager | None = None
        # Whether the stager's memory is still being written from.
        self._staged = False

    def __getstate__(self) -> dict[str, Any]:
        # To the process that saves beside training. What is held here stays here.
        return {**vars(self), "_lock": None, "_stage": None, "_stager": None, "_staged": False}

    @property
    def checkpoint_id(self) -> str | PathLike[str]:
        """The checkpoint's directory."""
        return self._directory()

    def _directory(self) -> Path:
        if self.path is None:
            raise InvalidInputError("there is no place to save to: give Writer a path, or dcp.save a checkpoint_id")
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether this is the name of a directory."""
        return not isinstance(checkpoint_id, str) or "://" not in checkpoint_id

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """A new save begins, which may go elsewhere."""
        self._let_go()
        if checkpoint_id:
            self.path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes note of how the ranks save."""
        self._let_go()
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "ranks that do not talk to each other cannot make one checkpoint: use_collectives=True"
            )
        self._save_id, self._rank = secrets.token_hex(16), kwargs.get("rank") or 0

    def storage_meta(self) -> StorageMeta | None:
        """What the planner may know of the save."""
        return StorageMeta(checkpoint_id=self._directory(), save_id=self._save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan of a rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the place to write to, on the first rank. The plans stay as they are."""
        directory = self._directory().absolute()
        directory.parent.mkdir(parents=True, exist_ok=True)
        stage = _stage_of(directory)
        for place in (stage, directory):
            # Nobody tells the first rank that another one failed. Who saves anew has seen it.
            if (holder := _HOLDERS.get(str(place))) is not None:
                holder._let_go()
        if stage.is_dir():
            # Of a save that was killed, unless its process holds the lock.
            os.close(_locked(stage))
            shutil.rmtree(stage)
        if _is_empty(directory):
            stage.mkdir()
        elif not (directory / _manifest.NAME).exists():
            hint = "name a directory that does not exist, or is empty"
            raise AlreadyExistsError(f"{directory} is there, and is no checkpoint of this kind", hint=hint)
        elif not self._overwrite:
            raise AlreadyExistsError(f"there is a checkpoint in {directory}", hint="pass overwrite=True to replace it")
        else:
            stage = directory
        self._take(stage)
        return plans

    def _take(self, stage: Path) -> None:
        """Begins to write in a directory."""
        self._stage, self._lock = stage, _locked(stage)
        _HOLDERS[str(stage)] = self

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's shards. They are on the drive when it returns."""
        try:
            directory = self._stage or _seen(self._directory().absolute(), self._rank)
            shards = _Shards(directory, self._rank, planner, self._allow_pickle, self._encoder)
            results = shards.written(plan.items)
        finally:
            self._staged = False
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes a checkpoint of the shards of all ranks, on the first one."""
        stage, directory = self._stage, self._directory().absolute()
        if stage is None:
            raise InvalidInputError("there is no save that could be finished: save with dcp.save")
        files: dict[str, int] = {}
        metadata.storage_data = {}
        for result in (one for of_rank in results for one in of_rank):
            stored, sizes = result.storage_data
            files |= sizes
            metadata.storage_data[result.index] = stored
        _manifest.check_sizes(stage, files)
        metadata.storage_meta = self.storage_meta()
        text = _manifest.text_of(self._save_id, files, metadata, __version__)
        temporary = stage / f".{_manifest.NAME}.{self._save_id}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(stage / _manifest.NAME)
        _sync(stage)
        if stage != directory:
            _publish(stage, directory)
        _remove_old(directory, files)
        (directory / _LOCK).unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        """Ends what a save before left unfinished: what it wrote is removed by the next that goes to the same place."""
        lock, self._lock, self._stage = self.__dict__.get("_lock"), None, None
        if lock is not None:
            os.close(lock)

    def __del__(self) -> None:
        self._let_go()

    @property
    def should_synchronize_after_execute(self) -> bool:
        """No: what `stage` returns is a copy already."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state in host memory, which training does not change."""
        if self._stager is None or self._staged:
            # The memory of the copy before is used again, unless that is still being written.
            has_gpu = torch.cuda.is_available()
            options = StagingOptions(
                use_pinned_memory=has_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_gpu,
            )
            self._stager = DefaultStager(options)
        self._staged = True
        staged = self._stager.stage(state_dict)
        assert isinstance(staged, dict)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Lets go of the memory that copies were made in."""
        self._stager = None
        self._let_go()


# Which writers of this process hold the lock of which directory.
_HOLDERS: weakref.WeakValueDictionary[str, Writer] = weakref.WeakValueDictionary()


class _Shards:
    """What one rank writes."""

    def __init__(
        self, directory: Path, rank: int, planner: SavePlanner, allow_pickle: bool, encoder: _nest.Encoding
    ) -> None:
        self._directory, self._rank, self._planner = directory, rank, planner
        self._allow_pickle, self._encoder = allow_pickle, encoder
        # In the name and the header of each file. No two writes ever make files of one name.
        self._write_id = secrets.token_hex(16)
        # For each file the tensors, and of each the offset in the whole.
        self._files: list[dict[str, tuple[Any, list[int]]]] = []

    def written(self, items: Iterable[WriteItem]) -> list[WriteResult]:
        """Writes all, and tells for each item where it is."""
        stored: list[tuple[WriteItem, int, Any]] = []
        for item in items:
            data = self._planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                place = self._add(item.index.fqn, data, list(item.index.offset or [0] * data.dim()))
                stored.append((item, data.nbytes, place))
            else:
                stored.append((item, data.getbuffer().nbytes, self._value(item, data)))
        sizes = {self._name(number): self._write(number) for number in range(len(self._files))}
        results = [WriteResult(item.index, size, (place, {})) for item, size, place in stored]
        if results:
            # One of them is enough to tell the sizes of the files.
            results[0] = dataclasses.replace(results[0], storage_data=(results[0].storage_data[0], sizes))
        return results

    def _name(self, number: int) -> str:
        return _manifest.file_name(self._rank, number, self._write_id)

    def _add(self, fqn: str, tensor: Any, offsets: list[int]) -> Place:
        """Where a tensor will be: in the first file that has none of its name."""
        name = _nest.name_of(fqn)
        number = next((at for at, file in enumerate(self._files) if name not in file), len(self._files))
        if number == len(self._files):
            self._files.append({})
        self._files[number][name] = (tensor, offsets)
        return Place(self._name(number), name)

    def _value(self, item: WriteItem, data: io.BytesIO) -> Value:
        assert item.type == WriteItemType.BYTE_IO
        raw = data.getvalue()
        try:
            # This process made the pickle just now, of what is in its memory.
            value = torch.load(io.BytesIO(raw), weights_only=False, map_location="cpu")
            nest = _nest.encode(value, self._encoder, grouped=False)
        except InvalidInputError as error:
            if self._allow_pickle:
                return Value("", raw, {})
            hint = "turn it into plain values, or give the Writer an encoder or allow_pickle=True"
            raise InvalidInputError(f"{item.index.fqn!r} cannot be saved: {error.args[0]}", hint=hint) from None
        tensors = nest.groups.get("", {})
        places = {
            name: self._add(f"{item.index.fqn}.{name}", tensor, [0] * tensor.ndim) for name, tensor in tensors.items()
        }
        return Value(nest.structure, None, places)

    def _write(self, number: int) -> int:
        """Writes a file, and tells its size."""
        tensors = self._files[number]
        packed = {name: _packed(tensor) for name, (tensor, _) in tensors.items()}
        sources = _save.checked(packed, _state.source)
        offsets = {name: {"saved_offsets": at} for name, (_, at) in tensors.items()}
        metadata = {"format": "pt", _TORCH_S_KEY: json.dumps(offsets), _manifest.WRITE_ID: self._write_id}
        stream = _tensors.stream_before(sources)
        path = self._directory / self._name(number)
        _save.to_storage(sources, path, metadata, None, stream, None)
        return path.stat().st_size


def _packed(tensor: Any) -> Any:
    """A tensor without gaps; of a dtype that the format lacks, its bytes."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    return _torch_nest.packed(plain)[0]


def _stage_of(directory: Path) -> Path:
    """Where a checkpoint is written that is not there yet."""
    return directory.with_name(f".{directory.name}.thruway-stage")


def _seen(directory: Path, rank: int) -> Path:
    """Where the first rank said, by making it, that shards belong."""
    stage = _stage_of(directory)
    if stage.is_dir():
        return stage
    if (directory / _manifest.NAME).exists():
        return directory
    hint = "save to a filesystem that all ranks share"
    raise NotFoundError(f"rank {rank} does not see {stage}, which the first rank made", hint=hint)


# In a directory that is being written: held by the process that does.
_LOCK = ".thruway-lock"


def _locked(directory: Path) -> int:
    """Says, for as long as this process keeps it open, that a save is under way."""
    while True:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise AlreadyExistsError(f"another save is under way in {directory}") from None
        except OSError as error:
            os.close(lock)
            hint = "use a filesystem with locks; Lustre has them when mounted with -o flock"
            raise UnsupportedError(f"{directory} cannot be locked: {error}", hint=hint) from None
        # Whoever held it before may have removed it, and somebody may have made another.
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)


def _is_empty(directory: Path) -> bool:
    try:
        return not any(directory.iterdir())
    except FileNotFoundError:
        return True


def _publish(stage: Path, directory: Path) -> None:
    try:
        # Over an empty directory too, and over nothing else.
        stage.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise AlreadyExistsError(f"something else was put at {directory} meanwhile: it stays") from None
    _sync(directory.parent)


def _remove_old(directory: Path, files: dict[str, int]) -> None:
    """Removes shards of other saves, now that none of them counts. What cannot be removed now is by the next save."""
    for path in directory.iterdir():
        if _manifest.write_id_of(path.name) and path.name not in files:
            with contextlib.suppress(OSError):
                path.unlink()


def _sync(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
