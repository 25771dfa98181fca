"""`workbench convert-experts`: a checkpoint with its experts in another layout."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from workbench.cli.options import EXPERT_LAYOUTS, add_command
from workbench.cli.outcome import FINE
from workbench.errors import InputError

#: Seconds between two lines of progress.
INTERVAL = 5.0


def add(commands) -> None:
    parser = add_command(
        commands, "convert-experts", run,
        "Write a checkpoint anew with its experts in another layout, layer by layer and bit for bit.",
        "workbench convert-experts data/miniature miniature-w13 --to w13_w2",
    )  # fmt: skip
    parser.add_argument("source", metavar="SRC", type=Path, help="directory with config.json and safetensors")
    parser.add_argument("target", metavar="DST", type=Path, help="directory to be made; must not exist")
    parser.add_argument(
        "--to", metavar="LAYOUT", choices=EXPERT_LAYOUTS, required=True,
        help=f"layout to write: {', '.join(EXPERT_LAYOUTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="expert_layout", metavar="LAYOUT", choices=EXPERT_LAYOUTS,
        help="layout of SRC, where neither shapes nor metadata tell; one that they contradict is refused",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from workbench.checkpoint import convert_experts

    if not options.source.exists():
        raise InputError(f"checkpoint {options.source}: expected a directory, found nothing there")
    conversion = convert_experts(
        options.source, options.target, options.to, expert_layout=options.expert_layout, progress=Progress()
    )
    print(f"{options.target}: experts of {conversion.n_blocks} layers in the layout {conversion.target_layout}")
    print(conversion.summary())
    if conversion.copied_files:
        print(f"copied: {', '.join(conversion.copied_files)}")
    return FINE


class Progress:
    """A line on stderr at the start, now and then, and at the end."""

    def __init__(self) -> None:
        self.started = self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if 0 < done < total and now < self.last + INTERVAL:
            return
        self.last = now
        left = f", about {(now - self.started) / done * (total - done):.0f} s left" if 0 < done < total else ""
        print(f"convert-experts: {done} of {total} layers{left}", file=sys.stderr, flush=True)
