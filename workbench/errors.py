"""Errors that the workbench raises on purpose.

Every message is one line that answers: what was found wrong, where, what was expected, what was there instead
and what to do next. The command line prints the message and exits with code 2 (1 for `NonFiniteError`);
`--debug` adds the traceback. Any other exception is a defect of the workbench, which ends with code 70.
"""


def one_line(text: str) -> str:
    """Text as a single line that a terminal shows and never obeys: control characters come out as escapes."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class WorkbenchError(Exception):
    """Base of every deliberate error. `str(error)` is always a single line that can be printed as it is."""

    def __str__(self) -> str:
        # Messages embed text from files and libraries, which may hold newlines and terminal sequences.
        return one_line(super().__str__())


class ConfigError(WorkbenchError):
    """A model configuration lacks a field, contradicts itself or describes an unsupported architecture."""


class CheckpointError(WorkbenchError):
    """A checkpoint file is damaged, incomplete, of an unsupported kind, or does not fit its configuration."""


class BackendError(WorkbenchError):
    """A kernel backend was asked for that is unknown, or that cannot run these arguments on this machine."""


class Unserved(BackendError):
    """No backend may serve a call: the one that was named refuses, or all do."""


class BackendFailure(BackendError):
    """A backend failed while it ran: `op` and `backend` say which; the cause is the exception that it raised."""

    def __init__(self, message: str, op: str, backend: str):
        super().__init__(message)
        self.op, self.backend = op, backend


class BackendWarning(UserWarning):
    """A backend failed and was tried again, or another took its place: only with strict=False (`--lenient`)."""


class PolicyError(WorkbenchError):
    """A numerics policy holds an unknown or contradictory setting."""


class InputError(WorkbenchError):
    """A prompt, token sequence, option or data file given by the user cannot be used."""


class NonFiniteError(WorkbenchError):
    """The model computed NaN or Inf where its result was needed: a fault was found, not a bad input."""


class ServerError(WorkbenchError):
    """A model server cannot be reached, refuses a request, or answers in another form than expected."""


class WorkspaceError(WorkbenchError):
    """A scratch buffer was used that was not declared, not allocated, of another dtype, too small or taken already."""


class WorkspaceWarning(UserWarning):
    """A workspace ended with buffers that were declared and never taken."""
