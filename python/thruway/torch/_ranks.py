"""Ranks that save one checkpoint together, and restore each its own part of it.

They never enter a collective of torch: they leave notes in a store, from whatever thread a save is on, and look for
those of others. So a save beside training does not disturb the collectives of training, and one that fails leaves the
process group as it was.
"""

from __future__ import annotations

import contextlib
import copy
import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch.distributed as dist

from thruway import _thruway
from thruway._errors import InvalidInputError, LimitReachedError, StorageError, ThruwayError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store

# The note of the first rank that says what came of it, when all have done their part.
OUTCOME = "outcome"

# How long a store may take to give what it has.
_ANSWER_SECONDS = 60.0

# How much of a note goes into one entry of a store: torch's TCPStore takes 8 MB, and a character has 4 bytes at most.
_PIECE = 1 << 20


class Ranks(NamedTuple):
    """Processes that save together without a process group."""

    # Which of them this is, and how many they are.
    rank: int
    world_size: int
    # What all of them reach: a `torch.distributed.TCPStore`, a `FileStore` on a filesystem that they share, …
    store: Store


# Who saves together: all ranks of the default process group, those of another, or those named.
Together = Union[str, "ProcessGroup", Ranks, None]


def of(together: Together) -> Ranks | None:
    """Who they are; `None` for a process alone."""
    if together is None or isinstance(together, Ranks):
        found = together
    elif not dist.is_available() or not dist.is_initialized():
        hint = "call torch.distributed.init_process_group first, or give ranks=Ranks(rank, world_size, store)"
        raise UnsupportedError("there is no process group whose ranks could save together", hint=hint)
    else:
        if isinstance(together, str) and together != "all":
            raise InvalidInputError(f'ranks is "all", a process group or Ranks, not {together!r}')
        group = dist.group.WORLD if isinstance(together, str) else together
        assert group is not None
        if dist.get_rank(group) < 0:
            raise InvalidInputError("this process is no rank of the process group")
        store = dist.distributed_c10d._get_process_group_store(group)
        found = Ranks(dist.get_rank(group), dist.get_world_size(group), store)
    if found is not None and not 0 <= found.rank < found.world_size:
        raise InvalidInputError(f"there is no rank {found.rank} of {found.world_size}")
    return found


class Notes:
    """The notes of one save, or of one restore. The native half calls this, from threads of its own."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._own: list[str] = []

    def put(self, name: str, text: str) -> None:
        """Puts up a note."""
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)] or [""]
        for number, piece in reversed(list(enumerate(pieces))):
            # The first comes last: who finds it finds all.
            key = f"{self._prefix}/{name}" + (f"/{number}" if number else "")
            self._store.set(key, piece if number else f"{len(pieces)}\n{piece}")
            self._own.append(key)

    def get(self, name: str) -> str | None:
        """A note that is there."""
        key = f"{self._prefix}/{name}"
        if not self._store.check([key]):
            return None
        count, _, first = self._store.get(key).decode().partition("\n")
        rest = [self._store.get(f"{key}/{number}").decode() for number in range(1, int(count))]
        return "".join([first, *rest])

    def take_down(self) -> None:
        """Removes one's own. What cannot be removed stays."""
        for key in self._own:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(key)
        self._own.clear()


class Party:
    """The ranks of a `Checkpointer`.

    Args:
        ranks: who they are.
        shared: which keys of the state are the same on all, and which rank saves each.
        timeout: how many seconds one waits for another.
    """

    def __init__(self, ranks: Ranks, shared: Collection[str] | Mapping[str, int], timeout: float) -> None:
        self.rank, self.count = ranks.rank, ranks.world_size
        self._timeout = timeout
        self.shared = dict(shared) if isinstance(shared, Mapping) else dict.fromkeys(shared, 0)
        for key, rank in self.shared.items():
            if type(key) is not str or type(rank) is not int or not 0 <= rank < self.count:
                raise InvalidInputError(f"{key!r} is shared and saved by rank {rank!r} of {self.count}")
        # A connection of its own: nobody else's use of the store waits for ours.
        self._store = ranks.store
        if hasattr(ranks.store, "clone"):
            self._store = ranks.store.clone()
            self._store.set_timeout(timedelta(seconds=min(timeout, _ANSWER_SECONDS)))
        with _reached():
            made = self._store.add(f"thruway/checkpointers/{self.rank}", 1)
            self._prefix = f"thruway/{made}"
            self._seed = self._agreed(secrets.token_hex(16))
        self._turns = 0
        self._notes: list[Notes] = []

    def _agreed(self, ours: str) -> int:
        """Random bits that the first rank chose: the names of saves follow from it, without a word being said."""
        key = f"{self._prefix}/seed"
        if self.rank == 0:
            self._store.set(key, ours)
            return int(ours, 16)
        try:
            self._store.wait([key], timedelta(seconds=self._timeout))
        except dist.DistStoreError:
            hint = "every rank makes a Checkpointer, and in the same order if they make several"
            error = LimitReachedError(f"rank 0 made no Checkpointer within {self._timeout} s", hint=hint)
            error.context = {"rank": "0"}
            raise error from None
        return int(self._store.get(key), 16)

    @contextlib.contextmanager
    def turn(self) -> Iterator[_thruway.Ranks]:
        """What the ranks do together next. Whatever is raised within, the others hear of."""
        self._turns += 1
        self._clear()
        self._notes.append(Notes(self._store, f"{self._prefix}/{self._turns}"))
        name = f"{(self._seed + self._turns) % (1 << 128):032x}"
        ranks = _thruway.Ranks(self.rank, self.count, name, self._timeout, self._notes[-1])
        try:
            yield ranks
        except BaseException as error:
            if isinstance(error, ThruwayError) and "commit" in error.context:
                # The others may well have saved it.
                raise
            known = error.context.get("rank") if isinstance(error, ThruwayError) else None
            kind = error.kind if isinstance(error, ThruwayError) else StorageError.kind
            message = str(error) if isinstance(error, ThruwayError) else f"{type(error).__name__}: {error}"
            ranks.fail(kind, message, int(known) if known else None)
            if isinstance(error, ThruwayError):
                error.context.setdefault("rank", str(self.rank))
            raise

    def _clear(self) -> None:
        """Removes notes that nobody waits for any more.

        What has an outcome, all ranks have begun, and so had ended what was before.
        """
        with _reached():
            # From the newest on: an older one may just be removed by the first rank.
            decided = (at for at in reversed(range(len(self._notes))) if self._notes[at].get(OUTCOME) is not None)
            ended = next(decided, 0)
        for notes in self._notes[:ended]:
            notes.take_down()
        del self._notes[:ended]

    def own(self, state: Any) -> tuple[Any, list[str]]:
        """What this rank saves of a state, and the keys of the state."""
        if not isinstance(state, dict):
            if self.shared:
                raise InvalidInputError("a state whose keys are shared is a dict")
            return state, []
        if missing := [key for key in self.shared if key not in state]:
            raise InvalidInputError(f"the state has no {missing[0]!r}, which the ranks share")
        if self.shared and not all(type(key) is str for key in state):
            raise InvalidInputError("the keys of a state, some of which are shared, are text")
        own = copy.copy(state)
        for key, rank in self.shared.items():
            if rank != self.rank:
                del own[key]
        return own, list(state) if self.shared else []

    def group(self, name: str) -> str:
        """What a group of this rank's state is called in the checkpoint."""
        return group_of(self.rank, self.shared, name)

    @property
    def layout(self) -> str:
        """For the manifest."""
        return json.dumps({"shared": self.shared}, ensure_ascii=False)


def structure_of(keys: list[str], structure: str) -> str:
    """What stands of one rank in a checkpoint's structure, a list of them: the keys of its state, and what it saved."""
    return f'{{"keys":{json.dumps(keys, ensure_ascii=False)},"own":{structure}}}'


def group_of(rank: int, shared: Mapping[str, int], name: str) -> str:
    """What a group of a rank's state is called in the checkpoint. One that all share has the name of its key."""
    return name if shared.get(name) == rank else f"rank-{rank:05}-{name}"


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ThruwayError):
            raise
        raise StorageError(f"the store of the ranks cannot be reached: {error}") from error
