"""An opened checkpoint, and which of its parts a process needs.

That is all, if one process saved it, or else a rank's own part and what the ranks share.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from thruway import _thruway
from thruway._errors import InvalidInputError, MalformedError
from thruway.torch._ranks import Party, group_of


class Part(NamedTuple):
    """What one rank saved of a checkpoint, or all of it; to be opened for whichever memory its tensors go to."""

    native: _thruway.Checkpointer
    step: int
    structure: str
    # Of those that saved together: which one it is of, what they share, and whether it is of another than this process.
    rank: int | None = None
    shared: Mapping[str, int] | None = None
    is_of_another: bool = False

    def group(self, name: str) -> str:
        """What a group of its state is called in the checkpoint."""
        return name if self.rank is None else group_of(self.rank, self.shared or {}, name)

    def home(self, was: str | None) -> str:
        """The device where a tensor goes that was on this one. Another rank's GPU is no home of this one's."""
        device = was or "cpu"
        return "cuda" if self.is_of_another and device.startswith("cuda") else device


class Checkpoint(NamedTuple):
    """A checkpoint, as a process sees it."""

    # What is this process's own; `None` in a checkpoint of another number of ranks.
    own: Part | None
    # By key what all ranks share.
    shared: dict[str, Part]
    # The keys of the state, in order, if some are shared.
    keys: list[str]
    # What keeps this process from having a part of its own.
    fault: str

    def parts(self, only: Collection[str] | None) -> list[tuple[Part, Collection[str] | None]]:
        """What is to be read for these keys, or for all: the parts, and of each the keys."""
        if self.own is None and (only is None or not set(only) <= self.shared.keys()):
            shared = ", ".join(sorted(map(repr, self.shared))) or "nothing"
            hint = (
                "start as many ranks as there were, with Checkpointer(…, ranks=…); what they shared can be restored "
                f"anywhere, with only=[…]: {shared}. To go on with another number of ranks, save with thruway.torch.dcp"
            )
            raise InvalidInputError(self.fault, hint=hint)
        wanted = [key for key in self.shared if only is None or key in only]
        of_others = [(self.shared[key], [key]) for key in wanted if self.shared[key] != self.own]
        if only is not None:
            others = {key for _, (key,) in of_others}
            only = [key for key in only if key not in others]
        own = [(self.own, only)] if self.own is not None and (only is None or only or not of_others) else []
        return [*own, *of_others]

    def joined(self, states: list[Any]) -> Any:
        """The states of parts as one, in the order of the keys."""
        if len(states) == 1:
            return states[0]
        whole = {key: value for state in states for key, value in state.items()}
        order = [key for key in self.keys if key in whole]
        made = type(states[0])()
        made.update((key, whole[key]) for key in order or whole)
        return made


def checkpoint(native: _thruway.Checkpointer, step: int, party: Party | None) -> Checkpoint:
    """Opens the checkpoint of a step."""
    found = native.open(step, "host")
    rank, count = (party.rank, party.count) if party else (0, 1)
    fault = f"step {step} was saved by {found.ranks} ranks together, and is restored by {count}"
    if not found.structure.startswith("["):
        whole = Part(native, step, found.structure)
        return Checkpoint(whole if count == 1 else None, {}, [], fault)
    try:
        ranks = json.loads(found.structure)
        shared = {str(key): int(of) for key, of in json.loads(found.layout)["shared"].items()}
        keys = [[str(key) for key in one["keys"]] for one in ranks]
        texts = [json.dumps(one["own"], ensure_ascii=False) for one in ranks]
        if len(texts) != found.ranks or not all(0 <= of < found.ranks for of in shared.values()):
            raise ValueError("it is not of as many ranks as it should be")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedError(f"the structure of this state of many ranks is not valid: {error}") from None
    parts = [
        Part(native, step, text, one, shared, one != rank or count != found.ranks) for one, text in enumerate(texts)
    ]
    own = parts[rank] if count == found.ranks else None
    return Checkpoint(own, {key: parts[of] for key, of in shared.items()}, keys[rank] if own else keys[0], fault)
