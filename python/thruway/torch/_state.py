"""`save` and `load`, each in two shapes: the safetensors package's, and torch's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from typing import IO, Any, overload

import torch

from thruway import _nest, _save
from thruway._errors import InvalidInputError
from thruway._nest import Encoding
from thruway._open import safe_open
from thruway._thruway import Receipt, parse_header
from thruway.torch import _load, _tensors
from thruway.torch import _save as _tensors_save

# Where the structure of a state stands in a file's header.
STRUCTURE = "thruway.state"

# What `torch.load` takes to say where tensors belong, but for a function.
Location = str | torch.device | int | Mapping[str, str] | None


@overload
def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes: ...


@overload
def save(
    obj: Any,
    f: str | PathLike[str] | IO[bytes],
    *,
    metadata: Mapping[str, str] | None = None,
    encoder: Encoding = None,
    receipt: Callable[[Receipt], object] | None = None,
) -> None: ...


def save(*args: Any, **options: Any) -> bytes | None:
    """Saves a state, as `torch.save` does; or without a place to save to, gives the bytes that `save_file` would write.

    With a path or a file as second argument it is the first: one safetensors file, with all that is no tensor in its
    header. What stands at the path is replaced only when the new is complete and on the drive.

    Args:
        obj: any nest of dicts, lists, tuples and the like with tensors, numpy's arrays and plain values. Tensors that
            share memory are stored once, and share it again when they are loaded.
        f: a path, or what has been opened for writing bytes.
        metadata: text pairs for the header.
        encoder: has two functions, `encode` and `decode`, or is a pair of them, for values of other types: the first
            gives a nest that stands for the value, or `NotImplemented`.
        receipt: called with what the save did, if it is to a path.

    Raises:
        InvalidInputError: a value that cannot be saved, by its path in `obj`.
    """
    if "f" in options or (len(args) > 1 and (isinstance(args[1], (str, PathLike)) or hasattr(args[1], "write"))):
        _save_state(*args, **options)
        return None
    return _tensors_save.save(*args, **options)


@overload
def load(data: bytes | bytearray | memoryview) -> dict[str, torch.Tensor]: ...


@overload
def load(
    f: str | PathLike[str] | IO[bytes],
    map_location: Location = None,
    *,
    weights_only: bool = True,
    mmap: bool | None = None,
    encoder: Encoding = None,
    only: Collection[str] | None = None,
    receipt: Callable[[Receipt], object] | None = None,
) -> Any: ...


def load(*args: Any, **options: Any) -> Any:
    """Loads what `save` saved to a file, as `torch.load` does; or of the bytes of a file, its tensors, as copies.

    Args:
        f: a path, or what has been opened for reading bytes. Of a file that another program wrote, and of a directory
            of shards, it is the tensors by name.
        map_location: the device for all tensors, or a dict of devices that they were on to those that they shall be on;
            by default they go where they were. numpy's arrays are always in host memory.
        weights_only: taken for programs that say it; no value of it makes this unpickle anything.
        mmap: maps the file instead of reading it now, if tensors go to the CPU.
        encoder: the one that it was saved with, if any.
        only: of a state that is a dict, the keys that are wanted. No other tensors are read.
        receipt: called with what the load did; once for each device.
    """
    first = args[0] if args else options.get("f", options.get("data"))
    if isinstance(first, (str, PathLike)) or (hasattr(first, "read") and not _is_buffer(first)):
        return _load_state(*args, **options)
    return _load.load(*args, **options)


def _is_buffer(data: Any) -> bool:
    try:
        memoryview(data)
    except TypeError:
        return False
    return True


def _save_state(
    obj: Any,
    f: str | PathLike[str] | IO[bytes],
    *,
    metadata: Mapping[str, str] | None = None,
    encoder: Encoding = None,
    receipt: Callable[[Receipt], object] | None = None,
) -> None:
    nest = _nest.encode(obj, encoder, grouped=False)
    pairs = {"format": "pt", **(metadata or {})}
    if STRUCTURE in pairs:
        raise InvalidInputError(f"metadata has {STRUCTURE!r}, under which the structure of the state stands")
    pairs[STRUCTURE] = nest.structure
    tensors = nest.groups.get("", {})
    if isinstance(f, (str, PathLike)):
        sources = _save.checked(tensors, source)
        stream = _tensors.stream_before(sources)
        _save.to_storage(sources, f, pairs, None, stream, receipt)
        return
    in_host_memory = {name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in tensors.items()}
    left = memoryview(_save.to_bytes(_save.checked(in_host_memory, source), pairs))
    while left:
        # What was opened without a buffer may write less than it is given.
        written = f.write(left)
        left = left[len(left) if written is None else written :]


def source(name: str, value: Any) -> _save.Source:
    """A tensor or an array of a state that is to be saved."""
    if isinstance(value, torch.Tensor):
        return _tensors_save._source(name, value)
    from thruway import numpy

    return numpy._source(name, value)


def _load_state(
    f: str | PathLike[str] | IO[bytes],
    map_location: Location = None,
    *,
    weights_only: bool = True,
    mmap: bool | None = None,
    encoder: Encoding = None,
    only: Collection[str] | None = None,
    receipt: Callable[[Receipt], object] | None = None,
) -> Any:
    if callable(map_location):
        hint = "name a device, or give a dict of devices to devices"
        raise InvalidInputError("map_location is a function, which is asked storage by storage", hint=hint)
    if isinstance(f, (str, PathLike)):
        path = os.fspath(f)
        with safe_open(path, "pt") as opened:
            names, metadata = opened.keys(), opened.metadata() or {}

        def read(device: Any, names: list[str]) -> dict[str, torch.Tensor]:
            backend = "mmap" if mmap else "pread"
            return _load.load_file(path, device, backend=backend, names=names, receipt=receipt)
    else:
        data = f.read()
        entries, found = parse_header(data, len(data))
        names, metadata = [name for name, *_ in entries], found or {}
        tensors = _load.load(data)

        def read(device: Any, names: list[str]) -> dict[str, torch.Tensor]:
            return {name: tensors[name].to(device) for name in names}

    structure = metadata.get(STRUCTURE)
    if structure is None:
        if only is not None:
            names = [name for name in names if name in only]
        return _read_all(dict.fromkeys(names, "cpu"), map_location, read)
    devices = _nest.wanted(structure, only=only).get("", {})
    have = set(names)
    # What is not there is told of by where it belongs in the state.
    devices = {name: device for name, device in devices.items() if name in have}
    return _nest.decode(structure, {"": _read_all(devices, map_location, read)}, encoder, only=only)


def _read_all(
    devices: Mapping[str, str | None], location: Location, read: Callable[[Any, list[str]], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Tensors by name, read device by device."""
    by_device: dict[Any, list[str]] = {}
    for name, device in devices.items():
        if device is None:
            target: Any = "cpu"
        elif isinstance(location, Mapping):
            target = location.get(device, device)
        else:
            target = device if location is None else location
        by_device.setdefault(target, []).append(name)
    return {name: tensor for device, names in by_device.items() for name, tensor in read(device, names).items()}
