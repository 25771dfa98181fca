"""`workbench probe`: what this machine can do for the model: device, libraries, compilers, vendors' functions."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.options import add_command
from workbench.cli.output import write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.probe import Probe, Step

#: Progress is shown from so many seconds on.
PATIENCE = 2.0
#: Width of the printed table.
WIDTH = 118


def add(commands) -> None:
    parser = add_command(
        commands, "probe", run, "Probe device, libraries, compilers and a vendor's functions, one step at a time.",
        "workbench probe --vendor ixformer --search /opt/apps/ixformer",
    )  # fmt: skip
    group = parser.add_argument_group("libraries")
    group.add_argument(
        "--vendor", metavar="NAME", help="its libraries and functions must work: ixformer, corex_gdn, corex_moe, "
        "corex_fa2, or a Python package with --symbol",
    )  # fmt: skip
    group.add_argument("--symbol", metavar="NAME", action="append", default=[],
                       help="a function to look for in the vendor's libraries; may be given several times")  # fmt: skip
    group.add_argument("--search", metavar="DIR|FILE", type=Path, action="append", default=[],
                       help="look for libraries there too, and in all folders below; may be given several times")
    group.add_argument("--bridge", metavar="FILE", type=Path, action="append", default=[],
                       help="TOML with tables [[bridge]]: build, try and register each (docs/probe.md)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="leave out torch.compile, the slowest step")
    parser.add_argument("--patience", metavar="SECONDS", type=float,
                        help="what one check may take (30; torch.compile: the rest of 16)")
    parser.add_argument("--json", metavar="FILE|-", help="write the verdict and all steps as JSON")


def run(options: argparse.Namespace) -> int:
    if options.patience is not None and not 0 < options.patience < math.inf:
        raise InputError(f"--patience: expected a finite number of seconds above 0, found {options.patience}")
    if options.symbol and options.vendor is None:
        raise InputError("--symbol: expected with --vendor, found it alone; name the package that should have it")
    bridges = []
    if options.bridge:
        from workbench.probe.bridges import read_bridges

        bridges = [bridge for file in options.bridge for bridge in read_bridges(file)]
    from workbench.probe import probe

    result = probe(
        vendor=options.vendor, symbols=options.symbol, search=options.search, bridges=bridges, quick=options.quick,
        patience_s=options.patience, started=Progress(),
    )  # fmt: skip
    if options.json is not None:
        write_json(_content(result), options.json)
    if options.json != "-":
        print(_text(result))
    return result.verdict.exit_code


class Progress:
    """A line on stderr for each step that begins after `PATIENCE`; steps of several threads may tell it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, step: str) -> None:
        seconds = time.monotonic() - self._began
        if seconds >= PATIENCE:
            with self._lock:
                print(f"probe: {seconds:.0f} s, {step}", file=sys.stderr, flush=True)


def _content(result: Probe) -> dict[str, object]:
    from workbench.provenance import versions

    return result.verdict.to_json() | {
        "steps": [step.to_json() for step in result.steps], "device": result.device,
        "registered": list(result.registered), "seconds": round(result.seconds, 2), "versions": versions(),
    }  # fmt: skip


def _text(result: Probe) -> str:
    lines = [line for step in result.steps for line in _lines(step)]
    verdict = result.verdict
    lines += ["", *textwrap.wrap(f"{result.device}, {result.seconds:.1f} s: {verdict.verdict}", WIDTH)]
    if verdict.fix is not None:
        lines += textwrap.wrap(f"next: {verdict.fix}", WIDTH)
    return "\n".join(lines)


def _lines(step: Step) -> list[str]:
    """A step: outcome, name and finding; details and the next step below it."""
    head = f"{step.outcome}  {step.name}: "
    lines = textwrap.wrap(head + step.found, WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)
    for detail in step.details:
        lines += textwrap.wrap(detail, WIDTH, initial_indent=" " * 6 + "| ", subsequent_indent=" " * 6 + "|   ",
                               break_on_hyphens=False)  # fmt: skip
    if step.next_step is not None:
        lines += textwrap.wrap(step.next_step, WIDTH, initial_indent=" " * 6 + "next: ", subsequent_indent=" " * 12)
    return lines
