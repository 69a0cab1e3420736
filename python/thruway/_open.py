"""`safe_open`: a model read tensor by tensor."""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from thruway import _host, _index, _select
from thruway._errors import InvalidInputError, ThruwayError
from thruway._thruway import Model, Receipt

# Name, dtype, shape, file, and the bytes of the file at which it begins and ends.
_Entry = tuple[str, str, list[int], int, int, int]

# Device, address, bytes, and what keeps them.
Bytes = tuple[str, int, int, object]

# Of tensors that follow one another in a block of memory: dtype, shape, bytes of each, names, offsets.
Run = tuple[str, list[int], int, list[str], list[int]]

if TYPE_CHECKING:
    from thruway._prefetch import PrefetchLoader

_FRAMEWORKS = {
    "pt": "thruway.torch._tensors",
    "torch": "thruway.torch._tensors",
    "pytorch": "thruway.torch._tensors",
    "np": "thruway._arrays",
    "numpy": "thruway._arrays",
}
_BACKENDS = ("mmap", "pread")

# How much memory small tensors may share: what freeing all of them but one can leave allocated.
_SHARED_BYTES = 2 << 20

# From so many rows on, and up to so many bytes a row, it takes less to read a whole tensor than to say where each row's
# part lies.
_MANY_ROWS = 1 << 12
_SHORT_ROW_BYTES = 256


def check_backend(backend: Any) -> None:
    """Raises for what is no backend."""
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise InvalidInputError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')


class safe_open:
    """Opens a safetensors file, a directory of shards or an index, and reads tensors of it.

    Args:
        filename: what to open. Only headers are read.
        framework: "pt" or "np", what tensors are made of.
        device: "cpu", or with torch "cuda", "cuda:1" or an integer for a GPU.
        backend: on the CPU, "mmap" maps files, which are read as tensors are touched; "pread" reads tensors when they
            are asked for, past the page cache where that is faster, into memory of their own. GPUs take no heed of it.
        path: the path that bytes take: "auto", "staged" or "cached"; "direct" is an error where there is no such path.

    Raises:
        FileNotFoundError: nothing is there.
        SafetensorError: a file breaks the rules of the format.
    """

    def __init__(
        self,
        filename: str | PathLike[str],
        framework: str,
        device: str | int | Any = "cpu",
        *,
        backend: str = "mmap",
        path: str = "auto",
    ) -> None:
        if not isinstance(framework, str) or framework not in _FRAMEWORKS:
            raise InvalidInputError(f"framework {framework} is invalid: use one of {', '.join(sorted(_FRAMEWORKS))}")
        check_backend(backend)
        self._arguments = (Path(filename).absolute(), framework, device, backend, path)
        self._framework: ModuleType = importlib.import_module(_FRAMEWORKS[framework])
        # Where tensors are loaded to, and where they go from there if that is not where they belong.
        self._memory, self._device = self._framework.place(device)
        self._maps: dict[int, Any] | None = (
            {} if backend == "mmap" and self._memory == "host" and path == "auto" else None
        )
        self._model: Model | None = Model(filename, self._memory, path)
        self._entries = {entry[0]: entry for entry in self._model.entries()}
        self._data_starts: dict[int, int] = {}
        # Absolute, since they are mapped later, and the program may be elsewhere by then.
        self._files = [Path(file).absolute() for file in self._model.files()]

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that it is sent to opens the model anew.
        return _again, self._arguments

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._model, self._maps = None, None if self._maps is None else {}

    def _opened(self) -> Model:
        if self._model is None:
            raise ThruwayError("File is closed")
        return self._model

    def _entry(self, name: str) -> _Entry:
        self._opened()
        try:
            return self._entries[name]
        except KeyError:
            hint = _select.near(name, self._entries)
            raise InvalidInputError(f"File does not contain tensor {name}", hint=hint) from None

    def keys(self) -> list[str]:
        """The names, sorted."""
        self._opened()
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """The names, file by file in the order of their bytes."""
        self._opened()
        return list(self._entries)

    def metadata(self) -> dict[str, str] | None:
        """The text pairs in the header; of several files, of all of them."""
        model = self._opened()
        found = [model.metadata(file) for file in range(len(self._files))]
        have = [one for one in found if one is not None]
        return {key: value for one in reversed(have) for key, value in one.items()} if have else None

    def get_shape(self, name: str) -> list[int]:
        """The length of each dimension of a tensor."""
        return list(self._entry(name)[2])

    def get_dtype(self, name: str) -> str:
        """The dtype of a tensor, as the format calls it: "F32"."""
        return self._entry(name)[1]

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """What the header says of a tensor. Nothing is read."""
        _, dtype, shape, file, start, end = self._entry(name)
        if not self._data_starts:
            # The format counts from the end of the header, where the first tensor of a file begins.
            for entry in self._entries.values():
                self._data_starts[entry[3]] = min(entry[4], self._data_starts.get(entry[3], entry[4]))
        data = self._data_starts[file]
        return TensorMeta(dtype, list(shape), (start - data, end - data))

    def prefetch(
        self, plan: Mapping[str, Any] | None = None, *, device: Any = None, threads: int | None = None
    ) -> PrefetchLoader:
        """Begins to load tensors, and gives what hands them out.

        Args:
            plan: the tensors that are wanted, each with `None` for all of it or an index as `get_slice` takes it. By
                default all.
            device: where to, if not to the handle's device.
            threads: taken for programs that say how many threads shall read; that is found out here.
        """
        from thruway._prefetch import PrefetchLoader

        memory, target = (self._memory, self._device) if device is None else self._framework.place(device)
        model = self._opened() if memory == self._memory else Model(self._arguments[0], memory, self._arguments[4])
        return PrefetchLoader(self._framework, model, memory, target, self._entries, plan)

    def get_tensor(self, name: str) -> Any:
        """A tensor."""
        return self.part(name, None)

    def get_tensors(self) -> dict[str, Any]:
        """All tensors, in the order of their bytes."""
        if self._maps is not None:
            return {name: self.part(name, None) for name in self.offset_keys()}
        return self._load(None, [])

    def get_slice(self, name: str) -> Slice:
        """A tensor to be indexed: only the part that is asked for is read."""
        return Slice(self, self._entry(name))

    def part(self, name: str, narrowed: tuple[int, int, int] | None) -> Any:
        """A tensor, or of one dimension a range."""
        entry = self._entry(name)
        _, dtype, shape, file, start, _ = entry
        if self._maps is None and narrowed is not None and self._has_short_rows(entry, narrowed[0]):
            return _select.cut(self.part(name, None), shape, narrowed)
        if self._maps is None:
            return self._load([name] if narrowed is None else [], [] if narrowed is None else [(name, *narrowed)])[name]
        if file not in self._maps:
            self._maps[file] = _host.mapped(self._files[file], self._opened().identity(file))
        tensor = self._framework.view(name, self._maps[file], dtype, shape, start)
        if narrowed is not None:
            tensor = _select.cut(tensor, shape, narrowed)
        return self._framework.to(tensor, self._device)

    def _has_short_rows(self, entry: _Entry, dimension: int) -> bool:
        _, _, shape, _, start, end = entry
        rows = math.prod(shape[:dimension])
        return rows >= _MANY_ROWS and end - start <= rows * _SHORT_ROW_BYTES

    def _load(self, select: list[str] | None, slices: list[tuple[str, int, int, int]]) -> dict[str, Any]:
        loaded, _ = Load(self._framework, self._opened(), self._memory, select, slices).wait()
        return {name: self._framework.to(tensor, self._device) for name, tensor in loaded.items()}


class TensorMeta(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: list[int]
    # Where its bytes begin and end in the file's data.
    data_offsets: tuple[int, int]


def _again(filename: Path, framework: str, device: Any, backend: str, path: str) -> safe_open:
    return safe_open(filename, framework, device, backend=backend, path=path)


class Slice:
    """A tensor that is read only where it is indexed, by integers, slices with a step of 1 or more, and an ellipsis."""

    def __init__(self, opened: safe_open, entry: _Entry) -> None:
        self._opened, self._entry = opened, entry

    def get_shape(self) -> list[int]:
        """The length of each dimension of the whole tensor."""
        return list(self._entry[2])

    def get_dtype(self) -> str:
        """The dtype, as the format calls it: "F32"."""
        return self._entry[1]

    def __getitem__(self, index: Any) -> Any:
        """A part of the tensor, by numpy's rules."""
        shape = self._opened._framework.shape_of(self._entry[1], self._entry[2])
        parts = _index.parts_of(index, shape)
        narrowed = _index.narrowest(parts, shape)
        if shape != self._entry[2]:
            # Two elements of the format in one of torch's: what lies between two of those cannot be told apart.
            narrowed = None
        tensor = self._opened.part(self._entry[0], narrowed)
        return self._opened._framework.packed(tensor[_index.within(parts, narrowed)])


class Load:
    """A load under way, of some tensors of a model or of all, into host memory or a GPU's.

    On a GPU the framework allocates: `place` waits until so many tensors have memory, while bytes move into it.
    """

    def __init__(
        self,
        framework: ModuleType,
        model: Model,
        memory: str,
        select: list[str] | None,
        slices: list[tuple[str, int, int, int]],
        *,
        into: Sequence[tuple[str, Bytes]] = (),
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._framework, self._memory = framework, memory
        self._tensors: dict[str, Any] = {}
        self._loading = model.load(
            select=select,
            slices=slices,
            into=list(into),
            shared_bytes=_SHARED_BYTES,
            stream=framework.current_stream(memory),
            progress=progress,
        )

    def place(self, count: int) -> None:
        """Returns when `count` tensors have memory, or at once in host memory, which needs none beforehand."""
        while self._memory != "host" and self._loading.placed < count and self._gave():
            pass

    def _gave(self) -> bool:
        """Waits until the load wants memory, and gives it; or until the load is done."""
        try:
            wanted = self._loading.next()
            if wanted is not None:
                self._loading.give(self._framework.allocate(wanted, self._memory))
            return wanted is not None
        except BaseException:
            # Who keeps the exception keeps this frame, and would keep the load and its memory with it.
            self.cancel()
            raise

    def _make(self, until: Callable[[], bool]) -> None:
        """Makes the tensors of the blocks of memory for which that was not done."""
        try:
            with _no_collection():
                while not until() and (block := self._loading.block()) is not None:
                    self._framework.make(*block, self._tensors)
        except BaseException:
            self.cancel()
            raise

    def wait(self) -> tuple[dict[str, Any], Receipt]:
        """The tensors, in the order of their bytes, and what the load did."""
        while self._gave():
            # Tensors are made while their bytes are on the way, but for memory the load would stand still.
            self._make(self._loading.asks)
        self._make(lambda: False)
        if self._memory == "host":
            self._tensors = {one.name: _owned(self._framework, one) for one in self._loading.tensors()}
        tensors, self._tensors = self._tensors, {}
        return tensors, self._loading.receipt

    def cancel(self) -> None:
        """Stops it, waits until nothing moves any more, and lets go of its memory."""
        self._loading.cancel()
        self._tensors.clear()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """For what is brief and makes many objects, none of them garbage.

    Python would look for garbage among them again and again, and at every third load of 20,000 tensors among all that
    the program has, which took as long as the load.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _owned(framework: ModuleType, tensor: Any) -> Any:
    return framework.view(tensor.name, _host.buffer_of(tensor), tensor.dtype, tensor.shape, 0)
