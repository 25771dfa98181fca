"""The command line: one module for each command.

Every command ends with a code of `outcome`. Heavy packages are imported by the command that needs
them, when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from types import TracebackType

from workbench import __version__
from workbench.cli import (
    backends,
    bench,
    compare,
    conformance,
    convert,
    generate,
    inspect,
    port,
    probe,
    readiness,
    rehearse,
    report,
    routing,
    score,
    sweep,
    trace,
)
from workbench.cli.options import Parser
from workbench.cli.outcome import DEFECT, FAULT, READER_GONE, STOPPED, UNUSABLE
from workbench.cli.output import check_file
from workbench.errors import BackendWarning, NonFiniteError, WorkbenchError, one_line

#: In the order in which `--help` lists them.
COMMANDS = (
    report,
    trace,
    compare,
    routing,
    generate,
    score,
    sweep,
    backends,
    conformance,
    bench,
    probe,
    inspect,
    readiness,
    rehearse,
    port,
    convert,
)


def run_process() -> int:
    """The `workbench` program: `main` with the settings that belong to a whole process."""
    sys.excepthook = _end_with_defect
    if sys.stdout is None:  # closed by the shell, as by `>&-`: what is written goes nowhere
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    # A console that lacks a character shows its escape; it must not end a command halfway.
    sys.stdout.reconfigure(errors="backslashreplace")
    _show = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: object) -> None:
        """A fault of a backend in the form of every other line; other warnings as Python has them."""
        if issubclass(category, BackendWarning):
            print(f"workbench: warning: {one_line(str(message))}", file=sys.stderr)
        else:
            _show(message, category, *place)

    warnings.showwarning = show
    warnings.simplefilter("always", BackendWarning)  # each one counts, also the tenth of a kind
    return main()


def _end_with_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Last hook of the interpreter, whose own code for this, 1, means that a fault was found in a model."""
    sys.__excepthook__(kind, error, trace)
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(STOPPED)
    if not issubclass(kind, WorkbenchError | OSError | ModuleNotFoundError):  # those come here by --debug
        print("workbench: this is a defect of the workbench, please report it with the lines above",
              file=sys.stderr)  # fmt: skip
        raise SystemExit(DEFECT)
    raise SystemExit(_code_of(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to those of the process."""
    parser = build_parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # --help and --version end with 0, a wrong command line with 2
        return stop.code if isinstance(stop.code, int) else UNUSABLE
    try:
        if isinstance(getattr(options, "json", None), str) and options.json != "-":
            check_file(options.json, "--json")  # before the time of a run is spent
        code = options.run(options)
        getattr(options, "closing", lambda: None)()  # what a command has to say once its work is done
        sys.stdout.flush()  # a reader that went away shows here, not in the interpreter's last flush
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        print("workbench: stopped", file=sys.stderr)
        return STOPPED
    except (WorkbenchError, OSError, ModuleNotFoundError) as error:
        if options.debug:
            raise
        print(f"workbench: error: {_message(error)}", file=sys.stderr)
        return _code_of(error)


def _code_of(error: BaseException) -> int:
    return FAULT if isinstance(error, NonFiniteError) else UNUSABLE


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"package {error.name} is needed for this and not installed; run `python3 bootstrap.py setup`"
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return one_line(f"{error.filename}: {error.strerror}")
    return one_line(str(error))


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options; imports nothing heavy."""
    parser = Parser(
        prog="workbench",
        description="Run, trace and question hybrid linear-attention mixture-of-experts language models.",
        epilog="exit codes: 0 fine, 1 a fault was found, 2 unusable input, 70 a defect of the workbench",
    )
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add(commands)
    return parser
