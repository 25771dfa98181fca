"""`workbench bench`: how long each backend takes at the shapes of models, against float64 and the measured limits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.options import add_command
from workbench.cli.outcome import FAULT, FINE
from workbench.cli.output import text_table, write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.bench.suite import Entry, Outcome, Settings

#: Name of the result file of `--out`.
NAME = "kernels"

#: What is timed where nothing is said: a step of decoding and a prompt.
TOKENS = "1x1,1x512"


def add(commands) -> None:
    parser = add_command(
        commands, "bench", run,
        "Time the backends of an op at a model's shape, each held to float64 first, against what the machine can do.",
        "workbench bench --op gated_delta_rule --tokens 1x16384,8x4096 --backend torch_chunk,fla --device cuda",
    )  # fmt: skip
    parser.add_argument("--op", metavar="OP", action="append", help="an op of `workbench backends`, or moe_layer: "
                        "routing, alignment and experts as a model calls them; may be repeated; default: all that are "
                        "timed")  # fmt: skip
    parser.add_argument("--shape", metavar="NAME", help="35b-a3b, 27b, 397b, miniature, or the part of one GPU of "
                        "several, as in 397b-tp8; default: 35b-a3b on cuda, miniature on cpu")  # fmt: skip
    parser.add_argument("--tokens", metavar="BxT,..", default=TOKENS, help="sequences times tokens of each, several "
                        f"separated by commas (default {TOKENS})")  # fmt: skip
    parser.add_argument("--backend", metavar="NAME,..", help="sides, separated by commas; NAME+NAME names backends of "
                        "several ops of one side; `automatic` is what would be chosen; default: it and every "
                        "backend")  # fmt: skip
    parser.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16, float16 or float64; default: bfloat16 on "
                        "cuda, float32 on cpu")  # fmt: skip
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where this machine has it, else cpu")
    parser.add_argument("--clock", choices=("graph", "eager"), default="graph", help="eager: single calls with "
                        "what the host takes to launch them; graph (default): the kernels alone, replayed")  # fmt: skip
    parser.add_argument("--flags", action="store_true", help="each side once more with the flags that its own kernels "
                        "raise, where they do")  # fmt: skip
    parser.add_argument("--rounds", metavar="N", type=int, default=11, help="samples of each side (default 11)")
    parser.add_argument("--seed", metavar="N", type=int, help="of the inputs; default: a new one for each case")
    parser.add_argument("--minutes", metavar="N", type=float, help="begin no case after so many; what is left is told")
    parser.add_argument("--json", metavar="FILE|-", help="write rows and conditions as JSON")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"write {NAME}.HARDWARE.json there after every "
                        "case, with the commit; the same command goes on after a stop")  # fmt: skip
    parser.add_argument("--commit", metavar="HASH", help="of this tree, where it was copied without its history")


def run(options: argparse.Namespace) -> int:
    import torch

    from workbench.bench.suite import Settings, run_suite

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: expected cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {device}: this machine has no CUDA device that torch can use")
    settings = Settings(
        device=device, rounds=options.rounds, clock=options.clock, seed=options.seed, minutes=options.minutes
    )
    outcome = run_suite(
        _entries(options, settings), settings, name=NAME, folder=options.out, project=None,
        measured=None if options.commit is None else (options.commit, False), say=_progress,
    )  # fmt: skip
    if options.json is not None:
        write_json(_content(outcome, settings), options.json)
    if options.json != "-":
        print(_text(outcome))
    if outcome.path is not None:
        print(outcome.path, file=sys.stderr)
    if not any(row.unit == "ms" for row in outcome.rows):
        reasons = "; ".join(f"{side}: {why}" for side, why in outcome.not_timed.items()) or "no time was left"
        raise InputError(f"bench: nothing was timed: {reasons}")
    return FAULT if any(why.startswith(("wrong", "failed")) for why in outcome.not_timed.values()) else FINE


def _entries(options: argparse.Namespace, settings: Settings) -> list[Entry]:
    """A case for each op and number of tokens that fit together."""
    from workbench.bench.cases import TIMED, case_of, fits, parse_tokens
    from workbench.bench.measure import all_sides, flagged, side_named
    from workbench.bench.shapes import shape_named
    from workbench.bench.suite import Entry
    from workbench.loading import dtype_named

    on_cpu = settings.device == "cpu"
    shape = shape_named(options.shape or ("miniature" if on_cpu else "35b-a3b"))
    dtype = dtype_named(options.dtype or ("float32" if on_cpu else "bfloat16"))
    found = []
    for op in options.op or TIMED:
        for text in options.tokens.split(","):
            tokens = parse_tokens(text)
            if not options.op and not fits(op, shape, tokens):
                continue  # nobody asked for it
            case = case_of(op, shape, tokens, dtype)
            if options.backend is None:
                sides = all_sides(case)
            else:
                sides = [side_named(case, name.strip()) for name in options.backend.split(",")]
            found.append(Entry(case, [*sides, *(flagged(sides) if options.flags else ())]))
    return found


def _progress(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr)


def _content(outcome: Outcome, settings: Settings) -> dict[str, object]:
    from workbench.bench import hardware

    return {
        "hardware": hardware(settings.device), "clock": settings.clock, "rounds": settings.rounds,
        **outcome.conditions(), "error_over_limit": outcome.share, "rows": [row.to_json() for row in outcome.rows],
    }  # fmt: skip


def _text(outcome: Outcome) -> str:
    """A table of times for each case, its errors, and who is not in it and why."""
    import pandas as pd

    lines: list[str] = []
    for case in dict.fromkeys(row.case for row in outcome.rows):
        rows = [row for row in outcome.rows if row.case == case]
        errors = {(row.backend, row.unit): row.median for row in rows}
        times = [row for row in rows if row.unit == "ms"]
        if not times:
            continue
        outputs = [unit for unit in dict.fromkeys(row.unit for row in rows) if unit.startswith("relative error")]
        table = pd.DataFrame([
            {
                "backend": row.backend, "ms": row.median, "iqr": row.iqr,
                "% of limit": None if row.share_of_limit is None else 100.0 * row.share_of_limit,
                **{unit.removeprefix("relative "): errors.get((row.backend, unit)) for unit in outputs},
                "": f"rejected: {row.rejected}" if row.rejected else row.attested[-1] if row.attested else "",
            }
            for row in times
        ])  # fmt: skip
        patterns = {"ms": ".4f", "iqr": ".4f", "% of limit": ".1f"}
        patterns |= {unit.removeprefix("relative "): ".1e" for unit in outputs}
        lines += [case, text_table(table, patterns), ""]
    for title, found in (("not timed", outcome.not_timed), ("not held to", outcome.not_held)):
        lines += [f"{title}: {name}: {why}" for name, why in found.items()]
    lines += [f"no time was left: {name}" for name in outcome.left]
    return "\n".join(lines)
