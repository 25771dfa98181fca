"""Faults of vendor libraries that do not come as exceptions: what their C code prints on stderr.

Seen in the field: a matrix product that prints ``matmul.cu:149 'Expected input.dtype() == kHalf'`` for every call with
another dtype, and goes on with a wrong result or an exception whose text does not say why. Around a vendor's call the
process's stderr is kept: a complaint in it is an error, and it is part of the text of any other.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from workbench.errors import BackendError, one_line

#: What a complaint of C code looks like. Anything else that it prints is handed on as it came.
COMPLAINT = re.compile(r"\b(error|expected|assert(ion)?|fail(ed|ure)?|invalid|unsupported|not supported|abort)\b", re.I)

#: Held by the thread that keeps stderr; it may do so again inside, where an op calls another.
_ONE_AT_A_TIME = threading.RLock()

#: The most of it that goes into a message; a call in a loop may print the same line hundreds of times.
SHOWN = 400


def complaints(text: str) -> str:
    """The lines of `text` that complain, each once with how often it came, shortened; empty for none."""
    lines = [one_line(line) for line in text.splitlines() if COMPLAINT.search(line)]
    counts = {line: lines.count(line) for line in lines}
    counted = [f"{line} ({count} times)" if count > 1 else line for line, count in counts.items()]
    whole = "; ".join(counted)
    return whole if len(whole) <= SHOWN else whole[:SHOWN] + " ..."


@contextmanager
def native_stderr(what: str) -> Iterator[None]:
    """Run a vendor's call with the process's stderr kept.

    Raises BackendError where the call printed a complaint, with the complaint; an exception of the call is told
    together with it and stays the cause. What was printed goes on to stderr in any case. File descriptor 2 belongs to
    the whole process: what another thread prints meanwhile is kept, read and handed on as well, and calls of several
    threads take turns, or one would leave the file of another in the place of stderr.
    """
    raised: Exception | None = None
    with _ONE_AT_A_TIME, tempfile.TemporaryFile() as kept:
        sys.stderr.flush()
        own = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again below, with what was printed
            raised = error
        finally:
            os.dup2(own, 2)
            os.close(own)
            kept.seek(0)
            text = kept.read().decode(errors="replace")
            sys.stderr.write(text)  # before anything is raised: an interruption keeps what was printed too
    said = complaints(text)
    if raised is not None and not said:
        raise raised
    if raised is not None:
        raise BackendError(f"{what}: {type(raised).__name__}: {raised}; its C code printed: {said}") from raised
    if said:
        raise BackendError(f"{what} returned, but its C code printed: {said}; its result is not used")
