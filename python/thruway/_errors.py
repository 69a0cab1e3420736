"""The exceptions. All are `ThruwayError`s; those that Python has a name for are that too."""

from __future__ import annotations


class ThruwayError(Exception):
    """A failure, with what is known of it.

    `kind` is a short name of what kind of failure it is, `context` holds facts such as `file`, `tensor` and `offset`,
    and `hint` says what to do next, where there is something to do.
    """

    kind: str = "failure"
    hint: str | None = None
    context: dict[str, str]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.context = {}


# The name under which programs written for the safetensors package catch it.
SafetensorError = ThruwayError


class NotFoundError(ThruwayError, FileNotFoundError):
    """A file or directory that was named does not exist."""


class PermissionDeniedError(ThruwayError, PermissionError):
    """The operating system refused access."""


class InvalidInputError(ThruwayError, ValueError):
    """The call makes no sense: an unknown tensor, a slice out of bounds, a dtype that does not exist."""


class MalformedError(ThruwayError):
    """A file breaks the rules of its format."""


class ChangedError(ThruwayError):
    """A file was changed, replaced or cut while it was being read."""


class TruncatedError(MalformedError, ChangedError):
    """A file ends before it should: it was cut, before it was opened or afterwards."""


class PathUnavailableError(ThruwayError):
    """The path that was required is not to be had here."""


class UnsupportedError(ThruwayError, RuntimeError):
    """This machine or this build cannot do it."""


class OutOfMemoryError(ThruwayError, MemoryError):
    """There is not enough memory, on the host or on the GPU."""


class NoSpaceError(ThruwayError, OSError):
    """The filesystem is full, or a quota is."""


class GpuError(ThruwayError, RuntimeError):
    """The CUDA driver or a GPU failed to carry out an operation."""


class CancelledError(ThruwayError):
    """The work was given up."""


class StorageError(ThruwayError, OSError):
    """The operating system or a drive failed, or a limit was reached."""


_BY_KIND: dict[str, type[ThruwayError]] = {
    "not found": NotFoundError,
    "permission denied": PermissionDeniedError,
    "invalid input": InvalidInputError,
    "malformed": MalformedError,
    "unexpected end of file": TruncatedError,
    "changed while read": ChangedError,
    "path unavailable": PathUnavailableError,
    "unsupported": UnsupportedError,
    "out of memory": OutOfMemoryError,
    "no space": NoSpaceError,
    "GPU failure": GpuError,
    "cancelled": CancelledError,
    "already exists": StorageError,
    "limit reached": StorageError,
    "I/O error": StorageError,
    "poisoned": StorageError,
}


def make(kind: str, message: str, hint: str | None, context: dict[str, str], os_error: int | None) -> ThruwayError:
    """The exception for an error of the native half, which calls this."""
    made = _BY_KIND.get(kind, ThruwayError)(message if hint is None else f"{message}\nhint: {hint}")
    made.kind, made.hint, made.context = kind, hint, context
    if isinstance(made, OSError):
        made.errno, made.filename = os_error, context.get("file")
    return made
