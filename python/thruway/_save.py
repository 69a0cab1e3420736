"""What saving has in common for all frameworks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, NamedTuple

from thruway import _thruway
from thruway._errors import InvalidInputError
from thruway._thruway import Receipt


class Source(NamedTuple):
    """A tensor to be saved."""

    name: str
    dtype: str
    shape: list[int]
    # "host" or "cuda:N".
    device: str
    address: int
    nbytes: int
    keep: object


def checked(tensors: Mapping[str, Any], source: Callable[[str, Any], Source]) -> list[Source]:
    """The sources of all tensors of a dictionary."""
    if not isinstance(tensors, Mapping):
        raise InvalidInputError(f"Expected a dict of [str, tensor] but received {type(tensors)}")
    for name in tensors:
        if not isinstance(name, str):
            raise InvalidInputError(f"the names of tensors are str, not {type(name).__name__}: {name!r}")
        _check_text("the name of a tensor", name)
    return [source(name, tensor) for name, tensor in tensors.items()]


def _pairs(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidInputError(f"metadata is a dict of text to text, not {type(metadata).__name__}")
    pairs = dict(metadata or {})
    for key, value in pairs.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidInputError(f"metadata is text, and this is not: {key!r}: {value!r}")
        _check_text("metadata", key + value)
    return pairs


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"{what} has half of a surrogate pair, which no file can hold: {text!r}") from None


def to_storage(
    sources: list[Source],
    filename: str | PathLike[str],
    metadata: Mapping[str, str] | None,
    max_shard_bytes: int | None,
    stream: int | None,
    receipt: Callable[[Receipt], object] | None,
) -> None:
    """Saves as a file, or as a directory of shards."""
    if max_shard_bytes is not None and not (type(max_shard_bytes) is int and 0 < max_shard_bytes < 1 << 63):
        raise InvalidInputError(f"max_shard_bytes is a number of bytes, not {max_shard_bytes!r}")
    devices = {source.device for source in sources} - {"host"}
    if len(devices) > 1:
        raise InvalidInputError(
            f"the tensors lie on several GPUs ({', '.join(sorted(devices))}): save those of one at a time"
        )
    told = _thruway.save(
        [((one.name, one.dtype, one.shape), (one.device, one.address, one.nbytes, one.keep)) for one in sources],
        filename,
        device=devices.pop() if devices else "host",
        metadata=_pairs(metadata),
        max_shard_bytes=max_shard_bytes,
        way="auto",
        stream=stream,
        progress=None,
    )
    if receipt is not None:
        receipt(told)


def bytes_of(data: bytes | bytearray | memoryview) -> bytes:
    """What is given to `load`."""
    try:
        return data if isinstance(data, bytes) else bytes(memoryview(data))
    except TypeError:
        raise TypeError("load takes the bytes of a file; load_file takes its path") from None


def to_bytes(sources: list[Source], metadata: Mapping[str, str] | None) -> bytes:
    """The bytes of a file. All sources lie in host memory."""
    specs = [((one.name, one.dtype, one.shape), one.nbytes) for one in sources]
    head, order = _thruway.layout(specs, _pairs(metadata))
    return b"".join([head, *(_memory_of(sources[at]) for at in order)])


def _memory_of(source: Source) -> memoryview:
    # `ctypes.string_at` takes no more than 2 GiB, and says nothing of more.
    return memoryview((ctypes.c_char * source.nbytes).from_address(source.address) if source.nbytes else b"")
