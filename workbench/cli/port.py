"""`workbench port`: what is left to do before a card computes a model well, op by op, ranked by time."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.options import add_command
from workbench.cli.outcome import FAULT, FINE
from workbench.cli.output import text_table, write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.analysis.port import Board, PortRow

#: Rounds of a timing.
ROUNDS = 7


def add(commands) -> None:
    parser = add_command(
        commands, "port", run,
        "Rank the ops of a model on a card by their share of the time: missing, wrong, slow, unproven or right.",
        "workbench port --card bi-v100 --config config.json --out port",
    )  # fmt: skip
    parser.add_argument("--card", metavar="NAME|FILE", required=True, help="a profile of data/cards, or a .toml file")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--checkpoint", metavar="DIR", type=Path,
                       help="its config.json is read, no weights; default: the miniature in data/")  # fmt: skip
    model.add_argument("--config", metavar="FILE", type=Path, help="a config.json")
    parser.add_argument("--dtype", metavar="DTYPE", help="of the model there; default: the card's")
    parser.add_argument("--device", help="cpu, cuda or cuda:N: a device of this very card, on which everything is "
                        "checked and timed; default: checked on this machine's CPU, times priced")  # fmt: skip
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=2048, help="of the request (2048)")
    parser.add_argument("--new-tokens", metavar="N", type=int, default=256, help="of the request (256)")
    parser.add_argument("--multiple", metavar="X", type=float, default=3.0,
                        help="an op is slow from this many times its least time on (3)")  # fmt: skip
    parser.add_argument("--out", metavar="DIR", type=Path, help="write port.html and port.json there")
    parser.add_argument("--json", metavar="FILE|-", help="write the board as JSON")


def run(options: argparse.Namespace) -> int:
    from workbench.analysis.port import port_board
    from workbench.cards import card_named
    from workbench.config import ModelConfig
    from workbench.dialogue import DATA

    is_default = options.checkpoint is None and options.config is None
    source = DATA / "miniature" if is_default else options.checkpoint or options.config
    started, patience = time.monotonic(), 2.0

    def progress(line: str) -> None:
        if time.monotonic() - started > patience:
            print(f"port: {line}", file=sys.stderr, flush=True)

    board = port_board(
        ModelConfig.from_file(source), card_named(options.card), model=source.name if is_default else str(source),
        dtype=options.dtype, prompt=options.prompt_tokens, following=options.new_tokens,
        multiple=options.multiple, device=options.device, measure=measured, progress=progress,
    )  # fmt: skip
    if options.json is not None:
        write_json(board.to_json(), options.json)
    if options.out is not None:
        _write(board, options)
    if options.json != "-":
        print(board_text(board))
    return FAULT if board.is_fault else FINE


def measured(call: Callable[[], object], device: str) -> float:
    """Median seconds of a call on a device, after two that are not measured."""
    import torch

    from workbench.bench.timing import interleave, spread

    def waited() -> None:
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    return spread(interleave({"call": waited}, rounds=ROUNDS)["call"])[0]


def _write(board: Board, options: argparse.Namespace) -> None:
    from workbench.report.port import port_page

    words = ["workbench", "port", "--card", str(options.card)]
    words += ["--checkpoint", str(options.checkpoint)] if options.checkpoint else ["--config", str(options.config)]
    for name, default in (
        ("dtype", None), ("device", None), ("prompt_tokens", 2048), ("new_tokens", 256), ("multiple", 3.0),
    ):  # fmt: skip
        value = getattr(options, name)
        words += [] if value == default else [f"--{name.replace('_', '-')}", str(value)]
    page, target = port_page(board, shlex.join(words)), options.out / "port.html"
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        scratch.write_text(page, encoding="utf-8")
        os.replace(scratch, target)
    except OSError as error:
        raise InputError(f"--out {options.out}: cannot be written: {error.strerror}") from None
    write_json(board.to_json(), str(options.out / "port.json"))


def board_text(board: Board) -> str:
    """The board for a terminal: the table, then what stands behind each row."""
    import pandas as pd

    counts = ", ".join(f"{n} {state}" for state, n in board.counts().items() if n)
    where = f"measured on {board.machine}" if board.device else "priced by the card's profile, nothing measured on it"
    lines = [f"{board.model} on {board.card.title}, {board.dtype}: {counts} ({where})", ""]
    lines.append(text_table(pd.DataFrame({
        "op": [row.op for row in board.rows],
        "state": [row.state for row in board.rows],
        "share": [_percent(row.share) for row in board.rows],
        "prompt": [_percent(row.prefill) for row in board.rows],
        "token": [_percent(row.decode) for row in board.rows],
        "kernel": [row.backend or "-" for row in board.rows],
        "meanwhile": [row.meanwhile or "-" for row in board.rows],
        "times least": [_ratio(row) for row in board.rows],
    })))  # fmt: skip
    for row in board.rows:
        lines += ["", f"{row.op}: {row.state}"]
        lines += [f"  next     {row.todo}"] if row.todo != "nothing" else []
        lines += [f"  failure  {row.failure}"] if row.failure else []
        lines += [f"  checked  {row.checked}"] if row.checked else []
        lines += [f"  {name}: {why}" for name, why in row.libraries]
        if row.worst is not None:
            lines.append(f"  time     {row.worst.name}, {row.worst.phase}, {row.worst.ratio:.3g} times the least: "
                         f"{row.worst.how}")  # fmt: skip
    return "\n".join([*lines, "", *board.notes])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _ratio(row: PortRow) -> str:
    return "-" if row.worst is None else f"{row.worst.ratio:.3g}"
