"""The exceptions. All are `ThruwayError`s; those that Python has a name for are that too."""

from __future__ import annotations

from typing import Any


class ThruwayError(Exception):
    """A failure, with what is known of it.

    `kind` is a short name of what kind of failure it is, `context` holds facts such as `file`, `tensor` and `offset`,
    and `hint` says what to do next, where there is something to do.
    """

    kind: str = "failure"
    hint: str | None
    context: dict[str, str]

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.hint, self.context = hint, {}

    def __str__(self) -> str:
        # An `OSError` that has a file name would tell only that.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        os_facts = {name: getattr(self, name) for name in ("errno", "filename") if isinstance(self, OSError)}
        return _again, (type(self), self.args, {**vars(self), **os_facts})


def _again(kind: type[ThruwayError], args: tuple[str, ...], facts: dict[str, Any]) -> ThruwayError:
    """An exception that was pickled, in another process."""
    made = kind(*args)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


# The name under which programs written for the safetensors package catch it.
SafetensorError = ThruwayError


class NotFoundError(ThruwayError, FileNotFoundError):
    """A file or directory that was named does not exist."""

    kind = "not found"


class PermissionDeniedError(ThruwayError, PermissionError):
    """The operating system refused access."""

    kind = "permission denied"


class AlreadyExistsError(ThruwayError, FileExistsError):
    """Something stands where something new was to be made."""

    kind = "already exists"


class InvalidInputError(ThruwayError, ValueError):
    """The call makes no sense: an unknown tensor, a slice out of bounds, a dtype that does not exist."""

    kind = "invalid input"


class BadIndexError(InvalidInputError, IndexError):
    """A tensor cannot be indexed so."""


class MalformedError(ThruwayError):
    """A file breaks the rules of its format."""

    kind = "malformed"


class ChangedError(ThruwayError):
    """A file was changed, replaced or cut while it was being read."""

    kind = "changed while read"


class TruncatedError(MalformedError, ChangedError):
    """A file ends before it should: it was cut, before it was opened or afterwards."""

    kind = "unexpected end of file"


class MismatchError(ThruwayError):
    """Bytes are not those that they should be."""

    kind = "mismatch"


class PathUnavailableError(ThruwayError):
    """The path that was required is not to be had here."""

    kind = "path unavailable"


class UnsupportedError(ThruwayError, RuntimeError):
    """This machine or this build cannot do it."""

    kind = "unsupported"


class OutOfMemoryError(ThruwayError, MemoryError):
    """There is not enough memory, on the host or on the GPU."""

    kind = "out of memory"


class NoSpaceError(ThruwayError, OSError):
    """The filesystem is full, or a quota is."""

    kind = "no space"


class GpuError(ThruwayError, RuntimeError):
    """The CUDA driver or a GPU failed to carry out an operation."""

    kind = "GPU failure"


class CancelledError(ThruwayError):
    """The work was given up."""

    kind = "cancelled"


class StorageError(ThruwayError, OSError):
    """The operating system or a drive failed, or a limit was reached."""

    kind = "I/O error"


class LimitReachedError(StorageError):
    """A limit was reached: the process's of open files or locked memory, or the caller's of what may be under way."""

    kind = "limit reached"


_BY_KIND: dict[str, type[ThruwayError]] = {
    one.kind: one
    for one in (
        NotFoundError,
        PermissionDeniedError,
        AlreadyExistsError,
        InvalidInputError,
        MalformedError,
        ChangedError,
        TruncatedError,
        MismatchError,
        PathUnavailableError,
        UnsupportedError,
        OutOfMemoryError,
        NoSpaceError,
        GpuError,
        CancelledError,
        StorageError,
        LimitReachedError,
    )
}


def make(kind: str, message: str, hint: str | None, context: dict[str, str], os_error: int | None) -> ThruwayError:
    """The exception for an error of the native half, which calls this."""
    made = _BY_KIND.get(kind, StorageError)(message, hint=hint)
    made.kind, made.context = kind, context
    if isinstance(made, OSError):
        made.errno, made.filename = os_error, context.get("file")
    return made
