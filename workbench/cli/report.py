"""`workbench report`: run the notebooks, write HTML reports."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from workbench.cli.inputs import read_prompt
from workbench.cli.options import add_command
from workbench.cli.outcome import FAULT, FINE

#: Parameters of each notebook, as its own cell has them; here so that `--help` reads no notebook.
PARAMETERS = {
    "01": ("checkpoint", "prompt", "dtype", "policy", "max_tokens", "max_new_tokens", "full"),
    "02": ("checkpoint", "texts", "prompt", "dtype", "max_tokens", "flip_texts", "full"),
}


def add(commands) -> None:
    parser = add_command(
        commands, "report", run, "Run the notebooks on a checkpoint and write HTML reports.",
        "workbench report --notebook 01 --checkpoint data/miniature --out reports",
    )  # fmt: skip
    parser.add_argument("--notebook", metavar="NN",
                        help="only this one: 01 (gates) or 02 (expert routing); default: all")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="default: the miniature in data/")
    parser.add_argument(
        "--prompt-file", metavar="FILE", type=Path, help="UTF-8 text in the place of the notebook's prompt"
    )
    parser.add_argument(
        "--card", metavar="NAME|FILE", help="write a page besides on what the checkpoint would do on this card, as "
        "`workbench rehearse` does; the notebooks themselves run without its limits",
    )  # fmt: skip
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[],
        help="a parameter of the notebook, may be given several times; paths begin in the current folder. " + "; ".join(
            f"{number}: {', '.join(names)}" for number, names in PARAMETERS.items()
        ),
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="the long form of each notebook")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("reports"), help="default: reports")


def run(options: argparse.Namespace) -> int:
    from workbench.report.build import Request, build

    request = Request(
        notebook=options.notebook,
        checkpoint=options.checkpoint,
        prompt=None if options.prompt_file is None else read_prompt(options.prompt_file),
        settings=tuple(options.set),
        full=options.full,
        card=options.card,
        out=options.out,
        command=report_command(options),
    )
    reports = build(request, lambda line: print(line, file=sys.stderr, flush=True))
    for report in reports:
        print(report.page)
        for sentence in report.findings["verdict"]:
            print(f"  {sentence}")
    print(options.out / "index.html")
    return FAULT if any(report.findings.get("fault_found") for report in reports) else FINE


def report_command(options: argparse.Namespace) -> str:
    """The command that repeats a report; where it writes is left out, as that does not change the report."""
    words = ["workbench", "report"]
    for flag in ("notebook", "checkpoint", "prompt_file", "card"):
        value = getattr(options, flag)
        words += [] if value is None else [f"--{flag.replace('_', '-')}", str(value)]
    words += [word for setting in options.set for word in ("--set", setting)]
    return shlex.join(words + (["--full"] if options.full else []))
