"""`workbench sweep`: a checkpoint, or a dump of tensors, under every combination of policy, chunk, dtype and length."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.inputs import parse_ids, print_assumptions, print_plan, register_bridges
from workbench.cli.options import add_bridge, add_card, add_command
from workbench.cli.outcome import FINE
from workbench.cli.output import text_table
from workbench.errors import InputError
from workbench.numerics import LARGEST, PRESETS

if TYPE_CHECKING:
    from workbench.cards import Card

BAR_WIDTH = 24
FORMATS = {"finite": ".1%", "flips": ".1%", "dialogue": ".1%", "seconds": ".3g", "peak_bytes": ",d"}


def add(commands) -> None:
    parser = add_command(
        commands, "sweep", run, "Measure every combination of policy, chunk, dtype and length.",
        "workbench sweep data/miniature --policy safe,factored --length 64,256 --resume sweep.jsonl --out sweep.csv",
    )  # fmt: skip
    parser.add_argument("target", metavar="CHECKPOINT|FILE",
                        help="a checkpoint, or a .safetensors or .npz file of q, k, v, g, beta")  # fmt: skip
    grid = parser.add_argument_group("grid", "several values are separated by commas; all combinations are measured")
    grid.add_argument("--policy", metavar="NAME|FILE,..", type=_names, default=["safe"],
                      help=f"all, or some of {', '.join(PRESETS)}, or JSON files (safe)")  # fmt: skip
    grid.add_argument("--chunk", metavar="N,..", type=_numbers, default=[None], help="the policy's own")
    grid.add_argument("--dtype", metavar="DTYPE,..", type=_names,
                      help=f"{', '.join(LARGEST)}; default: float32, of a card what it runs models in")  # fmt: skip
    grid.add_argument("--length", metavar="N,..", type=_numbers, default=[None],
                      help="first tokens of the text or the tensors (256, or all of the tensors)")  # fmt: skip
    parser.add_argument("--metric", metavar="NAME,..", type=_names,
                        help="finite, first_bad, error_out, error_state, kl, flips, perplexity, dialogue, seconds, "
                        "peak_bytes; default: all that there are but perplexity and dialogue")  # fmt: skip
    parser.add_argument("--ids", metavar="1,2,3", help="token ids in the place of the held-out text")
    parser.add_argument("--backend", metavar="[OP=]NAME", help="backends by name, several separated by commas")
    add_bridge(parser)
    add_card(parser)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--resume", metavar="FILE",
                        help="keep finished cells here (JSON lines); none of them is measured again")  # fmt: skip
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="processes (1)")
    parser.add_argument("--cluster", metavar="dask:ADDRESS|ray:ADDRESS",
                        help="an existing cluster for the cells, such as dask:tcp://host:8786")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", action="append", default=[],
                        help="write the table as .csv, .json or .parquet; may be given several times")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from workbench import sweeps
    from workbench.cards import card_named
    from workbench.checkpoint import expert_assumptions

    for file in options.out:
        sweeps.check_output(file)
    if options.bridge and (options.jobs != 1 or options.cluster is not None):
        raise InputError("--bridge: expected with one process, found --jobs or --cluster; a bridge is built in each")
    register_bridges(options)
    card = None if options.card is None else card_named(options.card)
    options.dtype = options.dtype or ["float32" if card is None else card.model_dtype]
    if card is not None:
        _print_plans(card, options)
    grid = {
        "policy": [name for given in options.policy for name in (PRESETS if given == "all" else [given])],
        "chunk": options.chunk, "dtype": options.dtype, "length": options.length,
    }  # fmt: skip
    frame = sweeps.sweep(
        Path(options.target), grid, options.metric, resume=options.resume, jobs=options.jobs, cluster=options.cluster,
        progress=Bar(), ids=None if options.ids is None else parse_ids(options.ids), backend=options.backend,
        device=options.device, card=card,
    )  # fmt: skip
    failed = frame["error"].notna()
    shown = frame.astype(object).where(frame.notna(), None)
    # Printed first: whatever happens to a file by now, the table is seen.
    wide = ["ran", *([] if failed.any() else ["error"])]  # sentences: in the files
    print(text_table(shown.drop(columns=wide), FORMATS), flush=True)
    for file in options.out:
        sweeps.write_sweep(frame, file)
    if Path(options.target).is_dir() and not failed.all():
        print_assumptions(expert_assumptions(options.target))
    if failed.all():
        first = frame["error"].iloc[0]
        raise InputError(f"sweep: expected cells that can be measured, found none; the first: {first}")
    return FINE


def _print_plans(card: Card, options: argparse.Namespace) -> None:
    """What of a checkpoint fits the card to rehearse, a line for each dtype."""
    from workbench.config import ModelConfig
    from workbench.loading import dtype_named

    if Path(options.target).is_dir():
        for name in dict.fromkeys(options.dtype):
            dtype_named(name)
            print_plan(ModelConfig.from_file(options.target), card, name)


class Bar:
    """Progress on stderr: a bar that is drawn over on a terminal, else a line for each cell."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.measured = self.failed = 0
        self.is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, done: int, total: int, row: dict[str, Any] | None) -> None:
        if row is not None:
            self.measured += 1
            self.failed += row["error"] is not None
        line = f"{done} of {total} cells"
        if row is None and done:
            line += ", kept from before"
        if self.failed:
            line += f", {self.failed} failed"
        if self.is_terminal:
            filled = BAR_WIDTH * done // total
            left = (time.monotonic() - self.started) / max(self.measured, 1) * (total - done)
            line = f"\r[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {line}"
            line += f", about {left:.0f} s left" if self.measured and done < total else ""
            print(f"{line}\x1b[K", end="\n" if done == total else "", file=sys.stderr, flush=True)
        else:
            if row is not None:
                cell = " ".join(f"{axis} {row[axis]}" for axis in ("policy", "chunk", "dtype", "length"))
                line += f": {cell}" + (f": {row['error']}" if row["error"] is not None else "")
            print(f"sweep: {line}", file=sys.stderr, flush=True)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names separated by commas, found {text!r}")
    return names


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in parts):
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, found {text!r}")
    return [int(part) for part in parts]
