"""Loading with many ranks: each reads a share of the files, and the process group carries it to the others.

A model is read once in all, however many ranks want it, whole or in parts:

    rank 0   [ reads ][ reads  ][ …        a share of what several ranks want, some of it at a time
    rank 1   [ reads ][ reads  ][ …
                      [ exchange ][ …      each rank gets what it wants of what was read

What only one rank wants it reads by itself, and so do ranks that each want rows of their own of a tensor.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable
from os import PathLike
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from thruway import _progress, _select
from thruway._errors import InvalidInputError, ThruwayError
from thruway._flight import Part, load_of
from thruway._open import Load
from thruway._select import Wanted
from thruway._thruway import Receipt
from thruway.torch import _stream, _tensors

__all__ = ["PeerError", "load_file"]

# How much a rank reads before it is exchanged: long enough for drives and links, and small in memory.
_ROUND_BYTES = 256 << 20
# What is smaller travels together with others, each at a multiple of the alignment.
_PACK_BYTES = 2 << 20
_ALIGNMENT = 256

# The tensors that a rank wants by name, and of which part: `None` is all of it.
_Wants = dict[str, tuple[int, int, int] | None]

_T = TypeVar("_T")


class PeerError(ThruwayError):
    """Another rank could not load its share."""

    kind = "peer failed"


def load_file(
    filename: str | PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    group: dist.ProcessGroup | None = None,
    names: _select.Names = None,
    shard: _select.Shard | None = None,
    dtype: torch.dtype | None = None,
    path: str = "auto",
    receipt: Callable[[Receipt], object] | None = None,
    progress: _progress.Progress = None,
) -> dict[str, torch.Tensor]:
    """Loads a file, a directory of shards or an index on all ranks of a group, which read it once together.

    All ranks call it at once. They may want different tensors and parts, and have different devices.

    Args:
        filename: what to load; the same model for all ranks.
        device: where to. The group must be able to move its tensors: NCCL for GPUs, Gloo for the CPU.
        group: the ranks; all by default.
        names: the tensors that this rank wants, or a function that picks them by name; all by default.
        shard: of tensors by name, or by the end of their names, the part that this rank wants, dealt as by
            `torch.chunk`: (dimension, rank, world).
        dtype: what floating-point tensors are converted to.
        path: which way the bytes go: "auto", "staged" or "cached".
        receipt: called with what this rank has read.
        progress: `True` shows it on stderr; a function is called now and then with the bytes that this rank has got.

    Returns:
        A tensor for each name, in the order of the bytes.

    Raises:
        PeerError: another rank failed; its own exception is raised there.
    """
    began = time.perf_counter(), time.process_time()
    peers = _Peers(group, device)

    def opens() -> tuple[_stream.Opened, torch.device | None, list[Wanted]]:
        _stream.check_dtype(dtype)
        memory, target = _tensors.place(device)
        peers.check(memory)
        opened = _stream.Opened(os.fspath(filename), memory, path)
        return opened, target, _stream.wanted_of(opened.entries, names, shard)

    opened, target, wanted = peers.all(opens)
    wants = peers.wants(_fingerprint(opened), {one.name: one.narrowed for one in wanted})
    alone, rounds = _dealt(opened, wants)
    # First what this rank reads for itself, then its shares of what is exchanged.
    reads = _Reads(opened, [alone[peers.rank], *(shares[peers.rank] for shares in rounds)])
    found: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(reads.close)
        total, moved = sum(one.nbytes for one in wanted), 0
        tell = peers.all(lambda: stack.enter_context(_progress.shown(progress, total)))
        arrived: dict[str, torch.Tensor] = {}

        def take() -> None:
            """Keeps what has arrived."""
            nonlocal moved
            for name, tensor in arrived.items():
                moved += tensor.nbytes
                found[name] = _tensors.to(_stream.cast(tensor, dtype), target)
            if tell is not None and arrived:
                tell(moved)

        def step() -> dict[str, torch.Tensor]:
            take()
            return reads.next()

        for shares in [None, *rounds]:
            read = peers.all(step)
            arrived = read if shares is None else _Round(opened, wants, peers, read).exchange(shares)
        take()
    if receipt is not None:
        receipt(Receipt.joined(reads.receipts, time.perf_counter() - began[0], time.process_time() - began[1]))
    return {one.name: found[one.name] for one in wanted}


class _Peers:
    """The ranks of a group, and what they tell each other."""

    def __init__(self, group: dist.ProcessGroup | None, device: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidInputError("there is no process group: call torch.distributed.init_process_group first")
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidInputError("this process is no member of the group")
        self._moves = sorted(pair.partition(":")[0] for pair in dist.get_backend_config(group).split(","))
        try:
            memory = _tensors.place(device)[0]
            self.check(memory)
        except ThruwayError:
            # This rank will say so, and the others hear of it by what the group can move.
            memory = "host" if "cpu" in self._moves else "cuda"
        self.device = torch.device("cpu" if memory == "host" else memory)

    def check(self, memory: str) -> None:
        """Raises for memory of which the group moves no tensors."""
        device = "cpu" if memory == "host" else "cuda"
        if device not in self._moves:
            hint = "use a group with NCCL for GPUs, or with Gloo for the CPU"
            raise InvalidInputError(
                f"the group moves tensors of {' and '.join(self._moves)}, not of {device}", hint=hint
            )

    def everywhere(self, rank: int) -> int:
        """The number of one of the group's ranks among all processes."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def all(self, step: Callable[[], _T]) -> _T:
        """Does something on all ranks. A failure of one ends it on all: none waits for another that will not come."""
        result: _T | None = None
        failure: BaseException | None = None
        try:
            result = step()
        except BaseException as error:
            failure = error
        failed = torch.tensor([int(failure is not None)], device=self.device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, self.group)
        if failed.item():
            texts = self._gathered(failure and f"{type(failure).__name__}: {failure}")
            if failure is not None:
                raise failure
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
            raise PeerError(f"rank {rank} could not load its share: {text}")
        return cast(_T, result)

    def wants(self, fingerprint: str, mine: _Wants) -> list[_Wants]:
        """What each rank wants of a model that is the same for all."""
        told = self._gathered((fingerprint, mine))
        if len({one for one, _ in told}) > 1:
            hint = "give all ranks the same files, under the same names"
            raise InvalidInputError("the ranks have opened different models", hint=hint)
        return [wants for _, wants in told]

    def _gathered(self, value: _T) -> list[_T]:
        told: list[Any] = [None] * self.world
        # Collectives of objects use the current GPU.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            dist.all_gather_object(told, value, self.group)
        return told


def _fingerprint(opened: _stream.Opened) -> str:
    """That of the same model, whatever its path is on each host. Ranks deal shares by the order of the entries."""
    entries = [(name, *entry[1:]) for name, entry in opened.entries.items()]
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def _dealt(opened: _stream.Opened, wants: list[_Wants]) -> tuple[list[list[Wanted]], list[list[list[Wanted]]]]:
    """What each rank reads for itself, and round by round what each reads for all. The same on all ranks."""
    alone: list[list[Wanted]] = [[] for _ in wants]
    shared: list[Wanted] = []
    for name, (_, dtype, shape, _, start, end) in opened.entries.items():
        askers = [(rank, mine[name]) for rank, mine in enumerate(wants) if name in mine]
        if _lie_apart(shape, end - start, [part for _, part in askers]):
            for rank, part in askers:
                alone[rank].append(Wanted(name, dtype, part, _select.part_bytes(end - start, shape, part)))
        else:
            shared.append(Wanted(name, dtype, None, end - start))
    total, before = sum(one.nbytes for one in shared), 0
    shares: list[list[Wanted]] = [[] for _ in wants]
    for one in shared:
        shares[before * len(wants) // total].append(one)
        before += one.nbytes
    windows = [_select.windows(share, _ROUND_BYTES, lambda one: one.nbytes) for share in shares]
    return alone, [list(shares_of_round) for shares_of_round in itertools.zip_longest(*windows, fillvalue=[])]


def _lie_apart(shape: list[int], nbytes: int, parts: list[tuple[int, int, int] | None]) -> bool:
    """Whether the parts that ranks want are ranges of the file of which no two overlap: one rank's, or rows of each."""
    if len(parts) <= 1 or nbytes == 0:
        return True
    rows = sorted(part for part in parts if part is not None and all(length == 1 for length in shape[: part[0]]))
    same_dimension = len({dimension for dimension, _, _ in rows}) == 1
    return len(rows) == len(parts) and same_dimension and all(a[2] <= b[1] for a, b in itertools.pairwise(rows))


class _Reads:
    """What this rank reads, step by step. While one step is waited for, the next is under way."""

    def __init__(self, opened: _stream.Opened, steps: list[list[Wanted]]) -> None:
        self.receipts: list[Receipt] = []
        self._opened, self._waiting = opened, collections.deque(steps)
        self._loads: collections.deque[Load | None] = collections.deque()

    def _begin(self) -> None:
        while self._waiting and len(self._loads) < 2:
            wanted = self._waiting.popleft()
            if not wanted:
                self._loads.append(None)
                continue
            load = load_of(_tensors, Part(self._opened.models[0], wanted), self._opened.memory)
            self._loads.append(load)
            load.place(len(wanted))

    def next(self) -> dict[str, torch.Tensor]:
        """The tensors of the next step."""
        self._begin()
        load = self._loads.popleft()
        if load is None:
            return {}
        tensors, receipt = load.wait()
        self.receipts.append(receipt)
        self._begin()
        return tensors

    def close(self) -> None:
        """Stops what is under way."""
        for load in self._loads:
            if load is not None:
                load.cancel()


class _Round:
    """An exchange: each rank has read a share, and each gets what it wants of all of them."""

    def __init__(
        self, opened: _stream.Opened, wants: list[_Wants], peers: _Peers, read: dict[str, torch.Tensor]
    ) -> None:
        self._entries, self._wants, self._peers, self._read = opened.entries, wants, peers, read
        self._messages: list[dist.P2POp] = []

    def exchange(self, shares: list[list[Wanted]]) -> dict[str, torch.Tensor]:
        """What this rank wants of what all have read; `shares` says which rank has read what."""
        found: dict[str, torch.Tensor] = {}
        for reader, share in enumerate(shares):
            whole = {one.name for one in share if all(mine.get(one.name, ()) is None for mine in self._wants)}
            for_all = [one for one in share if one.name in whole]
            for pack in _select.windows(for_all, _PACK_BYTES, lambda one: _aligned(one.nbytes)):
                found.update(self._broadcast(reader, pack))
            for one in share:
                if one.name not in whole:
                    found.update(self._sent(reader, one))
        for work in dist.batch_isend_irecv(self._messages) if self._messages else []:
            work.wait()
        return found

    def _broadcast(self, reader: int, pack: list[Wanted]) -> dict[str, torch.Tensor]:
        """Tensors that all ranks want, in one message."""
        reads = reader == self._peers.rank
        if reads and len(pack) == 1:
            storage = _bytes_of(self._read[pack[0].name])
        else:
            size = sum(_aligned(one.nbytes) for one in pack[:-1]) + pack[-1].nbytes
            storage = torch.empty(size, dtype=torch.uint8, device=self._peers.device)
        found, start = {}, 0
        for one in pack:
            if reads and len(pack) > 1:
                storage[start : start + one.nbytes] = _bytes_of(self._read[one.name])
            found[one.name] = (
                self._read[one.name] if reads else self._made(one.name, storage[start : start + one.nbytes])
            )
            start += _aligned(one.nbytes)
        dist.broadcast(storage, self._peers.everywhere(reader), self._peers.group)
        return found

    def _sent(self, reader: int, one: Wanted) -> dict[str, torch.Tensor]:
        """A tensor of which ranks want parts, or which some do not want: to each its own."""
        found, shape = {}, self._entries[one.name][2]
        for rank, mine in enumerate(self._wants):
            if one.name not in mine or self._peers.rank not in (rank, reader):
                continue
            part = mine[one.name]
            if reader == self._peers.rank:
                tensor = self._read[one.name] if part is None else _select.cut(self._read[one.name], shape, part)
                # What this rank keeps must not keep the whole.
                tensor = tensor.contiguous() if rank != reader or part is None else tensor.clone()
                if rank == reader:
                    found[one.name] = tensor
                elif tensor.numel():
                    self._message(dist.isend, _bytes_of(tensor), rank)
            else:
                size = _select.part_bytes(one.nbytes, shape, part)
                storage = torch.empty(size, dtype=torch.uint8, device=self._peers.device)
                found[one.name] = self._made(one.name, storage, part)
                if size:
                    self._message(dist.irecv, storage, reader)
        return found

    def _message(self, send_or_receive: Callable[..., Any], storage: torch.Tensor, rank: int) -> None:
        self._messages.append(dist.P2POp(send_or_receive, storage, self._peers.everywhere(rank), self._peers.group))

    def _made(self, name: str, storage: torch.Tensor, part: tuple[int, int, int] | None = None) -> torch.Tensor:
        """A tensor, or a part of one, of its bytes."""
        _, dtype, shape, *_ = self._entries[name]
        if part is not None:
            dimension, first, last = part
            shape = [*shape[:dimension], last - first, *shape[dimension + 1 :]]
        return _tensors.of_bytes(name, storage, dtype, shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
