"""`workbench rehearse`: what a checkpoint would do on a card that is not here, what to change, and what that costs."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.inputs import print_assumptions, prompt_ids, register_bridges
from workbench.cli.options import add_command, model_options, prompt_options
from workbench.cli.output import check_file, text_table, write_file, write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.analysis.rehearse import Rehearsal

#: Options that are a prompt each.
PROMPTS = ("prompt", "prompt_file", "ids", "chat", "messages")

#: Columns of the printed tables: name in the report -> heading.
OP_COLUMNS = {"op": "op", "tokens": "tokens", "on_card": "on the card", "backend": "served here by", "calls": "calls",
              "dtype": "dtype"}  # fmt: skip
PRODUCT_COLUMNS = {"op": "op", "primitive": "product", "dtype": "dtype", "outcome": "outcome", "library": "asked first",
                   "to": "went to", "calls": "calls", "factor": "times longer", "overflowed": "overflow"}  # fmt: skip


def add(commands) -> None:
    parser = add_command(
        commands, "rehearse", run,
        "Say what a checkpoint would do on a card that is not here: what runs, what overflows, what to change.",
        'workbench rehearse data/miniature --card bi-v100 --prompt "Shall I compare thee" --out card.html',
        [model_options(), prompt_options(is_optional=True)],
    )  # fmt: skip
    plan = parser.add_argument_group("plan")
    plan.add_argument("--length", metavar="N", type=int, help="tokens of a sequence to plan memory for; default: the "
                      "longest of the model")  # fmt: skip
    plan.add_argument("--sequences", metavar="N", type=int, default=1, help="sequences at once (default 1)")
    plan.add_argument("--prefill", metavar="N", type=int, default=2048, help="tokens of a prompt that one pass takes, "
                      "in the plan and the table of times (default 2048)")  # fmt: skip
    plan.add_argument("--utilisation", metavar="SHARE", type=float, default=0.9,
                      help="share of the card's memory to plan with (default 0.9)")  # fmt: skip
    plan.add_argument("--plan-only", action="store_true", help="run nothing: memory and least times from the headers "
                      "of the files, for a checkpoint that this machine cannot hold")  # fmt: skip
    parser.add_argument("--no-readiness", action="store_true",
                        help="leave out what float16 does to the checkpoint and the remedies for it")  # fmt: skip
    parser.add_argument("--json", metavar="FILE|-", help="write the verdict and all tables as JSON")
    parser.add_argument("--out", metavar="FILE.html", type=Path, help="write a page of figures and tables")


def run(options: argparse.Namespace) -> int:
    if options.card is None:
        raise InputError("--card: expected the card to rehearse, found none; `workbench rehearse --help` names some")
    if not options.checkpoint.exists():
        raise InputError(f"checkpoint {options.checkpoint}: expected a directory, found nothing there")
    has_prompt = any(getattr(options, name) is not None for name in PROMPTS)
    if not has_prompt and not options.plan_only:
        raise InputError("--prompt: expected a prompt to run, found none; give one, or --plan-only")
    if options.out is not None:
        check_file(options.out, "--out", makes_folders=True)
    from workbench.analysis.rehearse import rehearse
    from workbench.checkpoint import expert_assumptions

    register_bridges(options)
    ids = prompt_ids(options) if has_prompt else ()
    report = rehearse(
        options.checkpoint, options.card, ids, dtype=options.dtype, backend=options.backend, policy=options.policy,
        router_dtype=options.router_dtype, device=options.device, expert_layout=options.expert_layout,
        strict=not options.lenient, length=options.length, sequences=options.sequences, prefill=options.prefill,
        utilisation=options.utilisation, with_readiness=not options.no_readiness, with_run=not options.plan_only,
        progress=_progress,
    )  # fmt: skip
    if options.expert_layout is None:
        print_assumptions(expert_assumptions(options.checkpoint))
    if options.json is not None:
        write_json(report.to_json(), options.json)
    if options.out is not None:
        _write(report, options)
    if options.json != "-":
        print(report_text(report))
    return report.verdict.exit_code


def _progress(line: str) -> None:
    print(f"rehearse: {line}", file=sys.stderr, flush=True)


def _write(report: Rehearsal, options: argparse.Namespace) -> None:
    from workbench.report.card import card_page

    text = card_page(report, _command(options))
    with suppress(OSError):  # the write itself says what is wrong
        options.out.parent.mkdir(parents=True, exist_ok=True)
    write_file(text, options.out, "--out")


def _command(options: argparse.Namespace) -> str:
    """What repeats the rehearsal."""
    words = ["workbench", "rehearse", str(options.checkpoint)]
    for name in (
        "card", "backend", "policy", "dtype", "router_dtype", "expert_layout", *PROMPTS, "tools", "thinking", "length",
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += [word for file in options.bridge for word in ("--bridge", str(file))]
    for name, default in (("sequences", 1), ("prefill", 2048), ("utilisation", 0.9), ("device", "cpu")):
        if getattr(options, name) != default:
            words += [f"--{name}", str(getattr(options, name))]
    for name in ("lenient", "plan_only", "no_readiness"):
        words += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
    return shlex.join(words)


def report_text(report: Rehearsal) -> str:
    """The report for a terminal: verdict, changes, then the tables."""
    verdict = report.verdict
    lines = [verdict.verdict]
    lines += [f"  evidence   {sentence}" for sentence in verdict.evidence]
    if verdict.is_fault:
        lines.append(f"  cause      {verdict.cause_id}")
    if verdict.fix is not None:
        lines.append(f"  fix        {verdict.fix}")
    if report.changes:
        lines += ["", "what to change:"]
    for number, change in enumerate(report.changes, 1):
        lines += [f"{number:>3}. {change.what}", f"     why   {change.why}", f"     cost  {change.cost}"]
    if len(report.ops):
        lines += ["", "what runs for each op:", text_table(report.ops[list(OP_COLUMNS)].rename(columns=OP_COLUMNS))]
        refused = report.ops[report.ops["refused"] != ""].drop_duplicates(["op", "refused"])
        lines += [f"  {row.op}, {row.tokens} tokens: refused {row.refused}" for row in refused.itertuples()]
    if report.ended is not None:
        lines.append(f"  the run ended in {report.ended}; ops that come after it are not in this table")
    can = report.named[report.named["can"].astype(bool)]
    if len(can):
        names = ", ".join(f"{row.op}={row.backend}" for row in can.itertuples())
        lines.append(f"  within its limits if installed there and named: {names}")
    if len(report.products):
        shown = report.products[list(PRODUCT_COLUMNS)].replace({"to": {"": "-"}}).rename(columns=PRODUCT_COLUMNS)
        lines += ["", "products under the card's rules:", text_table(shown)]
    return "\n".join(lines)
