"""The native half."""

from collections.abc import Callable
from os import PathLike
from typing import Any, TypedDict, final

from thruway._errors import ThruwayError

__version__: str

# Name, dtype, shape, file, and the bytes of the file at which it begins and ends.
_Entry = tuple[str, str, list[int], int, int, int]
# Name, dtype, shape, offset in the allocation, bytes.
_Place = tuple[str, str, list[int], int, int]
_Spec = tuple[str, str, list[int]]
# Device, address, bytes, and what keeps them.
_Bytes = tuple[str, int, int, object]

@final
class Receipt:
    """What a load or a save did: bytes, seconds, and for each file which way its bytes went, and why."""

    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def cpu_seconds(self) -> float: ...
    @property
    def retries(self) -> int: ...
    @property
    def gb_per_s(self) -> float: ...
    @property
    def paths(self) -> dict[str, int]: ...
    def to_dict(self) -> dict[str, Any]: ...
    @staticmethod
    def joined(receipts: list[Receipt], seconds: float, cpu_seconds: float) -> Receipt:
        """One receipt for pieces of one piece of work that overlapped, with the seconds that they took together."""

@final
class HostTensor:
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Loading:
    def next(self) -> list[tuple[int, list[_Place]]] | None: ...
    def give(self, memory: list[tuple[int, object]]) -> None: ...
    def tensors(self) -> list[HostTensor]: ...
    @property
    def receipt(self) -> Receipt: ...
    def cancel(self) -> None: ...

@final
class Model:
    def __init__(self, path: str | PathLike[str], device: str, way: str) -> None: ...
    def __len__(self) -> int: ...
    def entries(self) -> list[_Entry]: ...
    def files(self) -> list[PathLike[str]]: ...
    def identity(self, file: int) -> tuple[int, int, int, int]: ...
    def metadata(self, file: int) -> dict[str, str] | None: ...
    def notes(self) -> list[str]: ...
    def load(
        self,
        *,
        select: list[str] | None,
        slices: list[tuple[str, int, int, int]],
        into: list[tuple[str, _Bytes]],
        shared_bytes: int | None,
        stream: int | None,
        progress: Callable[[int], object] | None,
    ) -> Loading: ...

_Group = tuple[str, list[tuple[_Spec, _Bytes]], dict[str, str]]
# Step, place, identity, receipt, steps that were let go, what went wrong around it.
_Told = tuple[int, PathLike[str], str, Receipt, list[int], list[ThruwayError]]

class _Order(TypedDict):
    step: int
    structure: str
    metadata: dict[str, str]
    replace: bool
    max_shard_bytes: int | None
    trained: list[tuple[str, str]]
    stream: int | None

@final
class Checkpointer:
    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        device: str,
        keep: int | None,
        keep_every: int | None,
        pool_bytes: int | None,
        lag_seconds: float,
    ) -> None: ...
    def save(self, groups: list[_Group], order: _Order) -> _Told: ...
    def begin(self, groups: list[_Group], order: _Order, guarded: set[tuple[str, str]] | None) -> Saving: ...
    def wait(self) -> None: ...
    def steps(self) -> list[int]: ...
    def open(self, step: int, device: str) -> Checkpoint: ...
    def verify(self, step: int) -> list[tuple[str, tuple[str, str] | None, int, int]]: ...

@final
class Saving:
    def level(self) -> str: ...
    def done(self) -> bool: ...
    def staged_seconds(self) -> float | None: ...
    def hold(self, stream: int) -> None: ...
    def wait_for(self, level: str, seconds: float | None) -> bool: ...
    def wait(self) -> _Told: ...

@final
class Checkpoint:
    @property
    def step(self) -> int: ...
    @property
    def path(self) -> PathLike[str]: ...
    @property
    def structure(self) -> str: ...
    @property
    def metadata(self) -> dict[str, str]: ...
    def groups(self) -> dict[str, list[str]]: ...
    def entries(self, group: str) -> list[tuple[str, str, list[int]]]: ...
    def load(
        self,
        group: str,
        *,
        select: list[str],
        into: list[tuple[str, _Bytes]],
        shared_bytes: int | None,
        stream: int | None,
    ) -> Loading: ...

def close() -> None:
    """Waits until no thread is in the native half, and lets none in again."""

def device_count() -> int:
    """How many GPUs this process sees. No driver is no GPU."""

def layout(tensors: list[tuple[_Spec, int]], metadata: dict[str, str]) -> tuple[bytes, list[int]]: ...
def parse_header(start: bytes, file_bytes: int) -> tuple[list[_Entry], dict[str, str] | None]: ...
def run_command(arguments: list[str], again: list[str]) -> int: ...
def save(
    tensors: list[tuple[_Spec, _Bytes]],
    path: str | PathLike[str],
    *,
    device: str,
    metadata: dict[str, str],
    max_shard_bytes: int | None,
    way: str,
    stream: int | None,
    progress: Callable[[int], object] | None,
) -> Receipt: ...
