"""Checkpoints of a training run.

    run = Checkpointer("runs/7b", keep=3)
    for step in ...:
        ...
        if step % 1000 == 0:
            run.save_async(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, guard=optimizer)

What is saved are the values of the moment of the call. Whatever fails, is killed or loses power: a step that was
reported saved restores bit by bit, and what is restored has been held against its checksums. No pickle is read or
written.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from thruway import _nest, _save, _thruway
from thruway._errors import InvalidInputError, NotFoundError, ThruwayError
from thruway._thruway import Receipt
from thruway.torch import _ranks, _restore, _tensors
from thruway.torch import _save as _sources


class Saved(NamedTuple):
    """A committed checkpoint."""

    step: int
    # Where it lies.
    path: Path
    # What it is known by; it stands in all of its files.
    save_id: str
    # How it was written.
    receipt: Receipt
    # The steps that were let go for it.
    removed: list[int]
    # What went wrong around it, the checkpoint itself being whole. They were also given to `warnings.warn`.
    warnings: list[ThruwayError]


class Damage(NamedTuple):
    """Bytes that are not those that were saved."""

    file: str
    # The group and the name of the tensor; `None` for what comes before the tensors.
    tensor: tuple[str, str] | None
    # Which bytes of the file.
    offset: int
    length: int


class Checkpointer:
    """The checkpoints in a directory, one for each saved step.

    Args:
        directory: where they are. It is made by the first save; that above it must be there.
        keep: how many of the newest stay. By default all do.
        keep_every: those whose step is a multiple of this stay for good.
        pool_bytes: how much host memory saves beside training may take. It is pinned now and kept. Less than the state
            takes works too, but then `save_async` returns only when all but the last part of the pool is written. By
            default the first such save takes as much as its state has.
        lag: how many seconds a save waits for the one before it, if that is still under way, before it is refused.
        device: where the tensors are that are saved, "cpu" or a GPU; those on the CPU may always be among them. By
            default the current GPU, if torch has one.
        ranks: who saves together: "all" for the ranks of torch's default process group, another process group, or
            `Ranks` without one. Every rank makes a `Checkpointer` with the same settings, and calls `save`,
            `save_async` and `restore` as often and in the same order as the others; each saves a state of its own, and
            restores that. By default a process saves alone.
        shared: with `ranks`, the keys of the state whose values are the same on all. The first rank saves them, or of a
            dict of keys to ranks the one named, and all restore them.
        timeout: with `ranks`, how many seconds the first waits for another before all have failed; the others wait
            twice as long for it. The time that the slowest rank writes longer than the others counts.
        encoder: has two functions, `encode` and `decode`, or is a pair of them, for values of types that have no place
            in a state.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        pool_bytes: int | None = None,
        lag: float = 1800.0,
        device: str | int | torch.device | None = None,
        ranks: _ranks.Together = None,
        shared: Collection[str] | Mapping[str, int] = (),
        timeout: float = 600.0,
        encoder: _nest.Encoding = None,
    ) -> None:
        for name, value in (("keep", keep), ("keep_every", keep_every), ("pool_bytes", pool_bytes)):
            if value is not None and not (type(value) is int and 0 < value < 1 << 63):
                raise InvalidInputError(f"{name} is a whole number above 0, not {value!r}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if not 0 < timeout < 1e9:
            raise InvalidInputError(f"the timeout is no number of seconds: {timeout!r}")
        together = _ranks.of(ranks)
        if shared and together is None:
            raise InvalidInputError("a process that saves alone shares nothing: give `ranks` too")
        self._directory = Path(directory).absolute()
        self._memory, _ = _tensors.place(device)
        self._encoder = encoder
        self._saving: Saving | None = None
        self._native = _thruway.Checkpointer(
            self._directory,
            device=self._memory,
            keep=keep,
            keep_every=keep_every,
            pool_bytes=pool_bytes,
            lag_seconds=float(lag),
        )
        # Last: whoever waits for this rank need not wait for what failed.
        self._party = None if together is None else _ranks.Party(together, shared, float(timeout))
        _OPEN.add(self)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: Mapping[str, str] | None = None,
        replace: bool = False,
        max_shard_bytes: int | None = None,
        optimizer: Optimizers = (),
    ) -> Saved:
        """Saves a state. When this returns it is on the drive, whole, and survives a power cut.

        Args:
            step: the step of training.
            state: any nest of dicts, lists, tuples and the like with tensors, numpy's arrays and plain values. Each key
                of the outermost dict is a group with files of its own; that under "model" is a model for every program
                that opens safetensors files. Tensors that share memory are stored once, and share it again when
                restored.
            metadata: text pairs.
            replace: a checkpoint of the same step is replaced, and stays until the new one is committed.
            max_shard_bytes: how large a file may be, unless one tensor is larger; 5 GB by default.
            optimizer: what trains the tensors. Those of its parameters that are as they were in the checkpoint before,
                bit by bit, are warned about.

        Raises:
            InvalidInputError: a value that cannot be saved, by its path in the state.
            AlreadyExistsError: the step is there, or another process saves into the directory.
            NoSpaceError: there is too little room. What was there is as it was, as after every failure.
            LimitReachedError: an earlier save is still under way after the longest lag.
            ThruwayError: also the failure of an earlier save that nobody has heard of. With `ranks` the failure of any
                rank is everybody's, and `context["rank"]` says whose it was; a LimitReachedError if it said nothing.
        """
        with self._turn() as ranks:
            trained = _parameters(optimizer)
            groups, order = self._taken_apart(step, state, metadata, replace, max_shard_bytes, trained, ranks)
            self.wait()
            return _told(self._native.save(groups, order))

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        guard: Optimizers = (),
        metadata: Mapping[str, str] | None = None,
        replace: bool = False,
        max_shard_bytes: int | None = None,
    ) -> Saving:
        """Begins to save a state, and goes on in the background.

        What is saved are the values of now. Tensors on the CPU are copied when this returns; those on the GPU are
        copied behind what the current stream has to do by now, and what it is given from now on waits for the copies,
        on the GPU.

        Args:
            guard: an optimizer, or several, whose parameters and state change in its `step()` alone. Then only that
                waits for the copies of theirs, and the current stream only for those of other tensors. (Whoever changes
                them elsewhere calls `hold()` of what this returns before.)

        The other arguments and what is raised are those of `save`. What fails later is raised by what this returns, or
        by the next save, if nobody asks that.
        """
        with self._turn() as ranks:
            optimizers = _listed(guard)
            parameters = _parameters(optimizers)
            groups, order = self._taken_apart(step, state, metadata, replace, max_shard_bytes, parameters, ranks)
            self.wait()
            guarded = None
            if optimizers and self._memory != "host":
                kept = parameters | {_place_of(one) for optimizer in optimizers for one in _tensors_in(optimizer.state)}
                guarded = {
                    (group, spec[0])
                    for group, tensors, _ in groups
                    for spec, (_, _, _, tensor) in tensors
                    if isinstance(tensor, torch.Tensor) and _place_of(tensor) in kept
                }
            native = self._native.begin(groups, order, guarded)
        self._saving = Saving(native, step, self._memory)
        if guarded is not None:
            self._saving._guard(optimizers)
        return self._saving

    def wait(self) -> None:
        """Waits for the save under way. Raises its failure, if nobody has heard of it."""
        self._native.wait()
        saving, self._saving = self._saving, None
        if saving is not None:
            # It has ended. What went wrong around it is warned of; a failure has been heard of by now.
            with contextlib.suppress(ThruwayError):
                saving.wait()

    def steps(self) -> list[int]:
        """The committed steps, oldest first: none, if the directory is still to be made."""
        try:
            return self._native.steps()
        except NotFoundError:
            # Where the first save could not make it either, something else is missing: a drive that is not mounted.
            if self._directory.exists() or not self._directory.parent.is_dir():
                raise
            return []

    def restore(
        self,
        step: int | None = None,
        *,
        device: str | int | torch.device | None = None,
        only: Collection[str] | None = None,
        fallback: bool = False,
    ) -> Any:
        """The state of a step. All of it has been held against its checksums.

        Args:
            step: which; by default the newest.
            device: where tensors go that were on a GPU. What was on the CPU beside them (random states, counts of
                steps) comes back to the CPU, unless nothing was on a GPU. By default all come back to where they were.
            only: the keys of the state that are wanted.
            fallback: takes the one before, and so on, if a checkpoint is damaged, and warns of it.

        Raises:
            NotFoundError: there is no such step, or none at all; or files are missing.
            MismatchError: bytes are not those that were saved. `context` holds `tensor`, `file` and `offset`.
        """
        return self.restored(step, device=device, only=only, fallback=fallback)[1]

    def restored(
        self,
        step: int | None = None,
        *,
        device: str | int | torch.device | None = None,
        only: Collection[str] | None = None,
        fallback: bool = False,
    ) -> tuple[int, Any]:
        """The step that is restored, and its state, as `restore` gives it."""
        self.wait()
        return _restore.newest(
            self._native,
            self._party,
            step,
            fallback,
            lambda opened: _restore.state(opened, device, only, self._encoder),
        )

    def restore_into(
        self, objects: Mapping[str, Any], step: int | None = None, *, fallback: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """Restores in place.

        The bytes of a module's parameters and buffers go straight to where they lie, if they have the dtype and the
        shape of what was saved and no gaps; all else goes by `load_state_dict`. After a failure some of it may have
        been overwritten.

        Args:
            objects: by the keys of the state: modules, optimizers, schedulers and whatever has `load_state_dict`;
                tensors; and dicts and lists of these. What a state has under other keys is not read.
            step: which; by default the newest.
            fallback: as for `restore`.

        Returns:
            The step, and of the keys whose objects are `None` the values.
        """
        self.wait()
        return _restore.newest(
            self._native, self._party, step, fallback, lambda opened: _restore.into(opened, objects, self._encoder)
        )

    def verify(self, step: int) -> list[Damage]:
        """Reads every byte of a checkpoint and holds it against its checksums.

        What is damaged; nothing, if all is well.
        """
        return [Damage(*one) for one in self._native.verify(step)]

    def metadata(self, step: int) -> dict[str, str]:
        """The text pairs that a checkpoint was saved with."""
        return self._native.open(step, "host").metadata

    def _turn(self) -> contextlib.AbstractContextManager[_thruway.Ranks | None]:
        """What is done next by all ranks, if there are several."""
        return contextlib.nullcontext() if self._party is None else self._party.turn()

    def _taken_apart(
        self,
        step: int,
        state: Any,
        metadata: Mapping[str, str] | None,
        replace: bool,
        max_shard_bytes: int | None,
        trained: set[_Place],
        ranks: _thruway.Ranks | None,
    ) -> tuple[list[_thruway._Group], _thruway._Order]:
        if type(step) is not int or not 0 <= step < 1 << 63:
            raise InvalidInputError(f"a step is a whole number from 0 on, not {step!r}")
        if max_shard_bytes is not None and not (type(max_shard_bytes) is int and 0 < max_shard_bytes < 1 << 63):
            raise InvalidInputError(f"max_shard_bytes is a number of bytes, not {max_shard_bytes!r}")
        party, keys = self._party, list[str]()
        if party is not None:
            state, keys = party.own(state)
        nest = _nest.encode(state, self._encoder)
        groups: list[_thruway._Group] = []
        names: list[tuple[str, str]] = []
        for key, tensors in nest.groups.items():
            group = party.group(key) if party is not None else key
            sources = _save.checked(tensors, _source)
            pairs = [
                ((one.name, one.dtype, one.shape), (one.device, one.address, one.nbytes, one.keep)) for one in sources
            ]
            groups.append((group, pairs, {"format": "pt"}))
            kept = ((one.name, one.keep) for one in sources if isinstance(one.keep, torch.Tensor))
            names += [(group, name) for name, tensor in kept if _place_of(tensor) in trained]
        order: _thruway._Order = {
            "step": step,
            "structure": nest.structure if party is None else _ranks.structure_of(keys, nest.structure),
            "metadata": _save._pairs(metadata),
            "replace": bool(replace),
            "max_shard_bytes": max_shard_bytes,
            "trained": names,
            "stream": _tensors.current_stream(self._memory),
            "ranks": None if party is None or ranks is None else (ranks, party.layout),
        }
        return groups, order


class Saving:
    """A save under way. Whoever drops it does not stop it."""

    def __init__(self, native: _thruway.Saving, step: int, memory: str) -> None:
        self._native, self._memory = native, memory
        self._result: Saved | None = None
        self._hooks: list[Any] = []
        # The step that is saved.
        self.step = step

    @property
    def level(self) -> str:
        """How far it is.

        "queued": the copies are queued; "staged": all is copied, and the tensors may change; "written": all is in the
        files; "durable": it is committed and survives a power cut.
        """
        return self._native.level()

    @property
    def staged_seconds(self) -> float | None:
        """Seconds from the call until all was copied, before which `None`.

        A stream that was held, was held no longer.
        """
        return self._native.staged_seconds()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._native.done()

    def hold(self) -> None:
        """Lets what the current stream is given from now on wait, on the GPU, until everything is copied."""
        stream = _tensors.current_stream(self._memory)
        if stream is not None:
            self._native.hold(stream)
        self._unhook()

    def wait_staged(self, seconds: float | None = None) -> bool:
        """Waits until all is copied, so many seconds at most; whether it is. Raises the failure of the save."""
        return self.wait_for("staged", seconds)

    def wait_for(self, level: str, seconds: float | None = None) -> bool:
        """Waits until it has come so far, so many seconds at most; whether it has. Raises the failure of the save."""
        if seconds is not None and not seconds >= 0:
            raise InvalidInputError(f"this is no number of seconds to wait: {seconds!r}")
        return self._native.wait_for(level, seconds)

    def wait(self) -> Saved:
        """Waits until it is durable. Raises the failure of the save."""
        if self._result is None:
            self._result = _told(self._native.wait())
        return self._result

    def _guard(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.hold()))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


# An optimizer, or several.
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

# Where a tensor's bytes begin.
_Place = tuple[torch.device, int]


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for one in listed:
        if not isinstance(one, torch.optim.Optimizer):
            raise InvalidInputError(f"this is no optimizer: {type(one).__name__}")
    return listed


def _parameters(optimizers: Optimizers) -> set[_Place]:
    groups = (group for optimizer in _listed(optimizers) for group in optimizer.param_groups)
    return {_place_of(one) for group in groups for one in group["params"] if one.numel()}


def _place_of(tensor: torch.Tensor) -> _Place:
    try:
        return tensor.device, tensor.data_ptr()
    except RuntimeError:
        # It has no memory of its own, and is not among what is saved.
        return tensor.device, -1


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)


def _source(name: str, value: Any) -> _save.Source:
    if isinstance(value, torch.Tensor):
        return _sources._source(name, value)
    from thruway import numpy

    return numpy._source(name, value)


def _told(told: _thruway._Told) -> Saved:
    step, path, save_id, receipt, removed, found = told
    for one in found:
        warnings.warn(f"checkpoint of step {step}: {one}", RuntimeWarning, stacklevel=3)
    return Saved(step, Path(path), save_id, receipt, removed, found)


_OPEN: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _finish() -> None:
    """The end of the program waits for what is under way."""
    for one in list(_OPEN):
        try:
            one.wait()
        except ThruwayError as error:
            warnings.warn(f"a checkpoint was not saved: {error}", RuntimeWarning, stacklevel=1)


atexit.register(_finish)
# A child has nothing under way.
os.register_at_fork(after_in_child=_OPEN.clear)
