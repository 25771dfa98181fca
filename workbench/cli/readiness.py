"""`workbench readiness`: whether a checkpoint runs in float16, where it does not, and a remedy that a rerun proves."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.inputs import folder_of, input_tensor, load_model, print_plan, prompt_ids
from workbench.cli.options import add_command, model_options, prompt_options
from workbench.cli.outcome import FAULT, FINE
from workbench.cli.output import text_table, write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.analysis.half_precision import Readiness
    from workbench.model import CausalLM

#: What lies beside the weights of a checkpoint and belongs to whoever runs it.
COMPANIONS = (
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "generation_config.json",
)  # fmt: skip

#: Columns of the printed tables: name in the report -> heading.
ACTIVATION_COLUMNS = {
    "name": "tensor", "held": "held in", "absmax": "absmax", "share": "of 65504", "token": "token", "unit": "unit",
    "expert": "expert", "overflows": "overflow", "flushes": "flush", "values": "of values",
}  # fmt: skip
REMEDY_COLUMNS = {
    "remedy": "remedy", "finite": "finite", "serves": "serves", "same_experts": "logits off", "flips": "flips",
    "weights_overflow": "weights over", "weights_flush": "weights flush", "values_bad": "values bad",
    "values_flush": "values flush", "extra_bytes": "bytes", "wide_flops": "flops per token",
}  # fmt: skip


def add(commands) -> None:
    parser = add_command(
        commands, "readiness", run,
        "Say whether a checkpoint runs in float16 on a prompt, where it leaves the range, and what sets it right.",
        'workbench readiness data/miniature --prompt "To be, or not to be" --json readiness.json',
        [model_options(), prompt_options()],
    )  # fmt: skip
    parser.add_argument("--top", metavar="N", type=int, default=8, help="rows of activations to print (default 8)")
    parser.add_argument("--all", action="store_true", help="try every remedy, also after one that serves")
    parser.add_argument(
        "--write", metavar="DIR", type=Path,
        help="write the checkpoint with the remedy applied, in float16, where weights and config can hold it; DIR must "
        "not exist. It is read back and run",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE|-", help="write the verdict and all tables as JSON")


def run(options: argparse.Namespace) -> int:
    if options.top < 1:
        raise InputError(f"--top: expected at least 1, found {options.top}")
    if options.write is not None and os.path.lexists(options.write):
        raise InputError(f"--write {options.write}: expected a name that is free, found something; nothing is replaced")
    from workbench.analysis.half_precision import fp16_readiness
    from workbench.cards import card_named

    card = None if options.card is None else card_named(options.card)
    options.card = None  # it would choose the dtype that weights are read in; here only float16 runs rehearse it
    model = load_model(options)
    input_ids = input_tensor(model, prompt_ids(options))
    if card is not None:
        print_plan(model.config, card, "float16")
    report = fp16_readiness(model, input_ids, card=card, every=options.all, progress=_progress)
    written = None if options.write is None else _write(report, model, input_ids, options)
    if options.json is not None:
        content = {
            **report.to_json(), "checkpoint": str(options.checkpoint),
            "dtype": str(model.dtype).removeprefix("torch."), "card": None if card is None else card.name,
            "policy": model.kernels.policy.to_json(), "written": written,
        }  # fmt: skip
        write_json(content, options.json)
    if options.json != "-":
        print(_text(report, written, options))
    is_applied = written is not None and written["finite"]
    return FAULT if report.verdict.is_fault and not is_applied else FINE


def _progress(line: str) -> None:
    print(f"readiness: {line}", file=sys.stderr, flush=True)


def _write(report: Readiness, model: CausalLM, input_ids: Tensor, options: argparse.Namespace) -> dict | None:
    """Write the remedied checkpoint, read it back and run it in float16; None where there is nothing to write."""
    import torch

    from workbench.checkpoint import write_checkpoint
    from workbench.kernels.agreement import logit_difference
    from workbench.loading import load

    if report.remedy is None or not report.remedy.is_writable:
        return None
    scaled = report.remedied(model.state_dict())
    source = folder_of(options.checkpoint)
    files = (path for pattern in COMPANIONS for path in sorted(source.glob(pattern)))
    companions = {path.name: path.read_bytes() for path in files if path.is_file()}
    # Every tensor in the dtype of the proven run: dt_bias is float32 there, which `dtype` would narrow.
    write_checkpoint(
        options.write, replace(scaled.config, dtype="float16"), scaled.tensors, dtype=None, extra_files=companions
    )
    _progress(f"float16 run of {options.write}")
    again = load(options.write, device=options.device, backend=options.backend, policy=options.policy,
                 router_dtype=options.router_dtype)  # fmt: skip
    with torch.inference_mode():
        logits = again(input_ids, use_cache=False).logits
    return {
        "path": str(options.write), "dtype": str(again.dtype).removeprefix("torch."),
        "finite": bool(logits.isfinite().all()), "difference": logit_difference(logits, report.logits),
    }  # fmt: skip


def _text(report: Readiness, written: dict | None, options: argparse.Namespace) -> str:
    verdict, activations = report.verdict, report.activations
    lines = [verdict.verdict]
    lines += [f"  evidence   {sentence}" for sentence in verdict.evidence]
    lines += [f"  ruled out  {sentence}" for sentence in verdict.ruled_out]
    if verdict.is_fault:
        lines.append(f"  cause      {verdict.cause_id}")
    if verdict.fix is not None:
        lines.append(f"  fix        {verdict.fix}")
    held = activations[activations["held"] == "float16"].sort_values("absmax", ascending=False, kind="stable")
    shown = held.head(options.top)[list(ACTIVATION_COLUMNS)].astype(object).rename(columns=ACTIVATION_COLUMNS)
    shown = shown.where(shown.notna(), None)
    lines += ["", f"{len(shown)} of {len(held)} tensors held in float16, nearest to 65504 or beyond it:",
              text_table(shown)]  # fmt: skip
    changed = report.weights[(report.weights["overflows"] > 0) | (report.weights["flushes"] > 0)]
    if len(changed):
        lines += ["", f"{len(changed)} of {len(report.weights)} weights lose values on load:",
                  text_table(changed.head(options.top))]  # fmt: skip
    if len(report.remedies) > 1:
        tried = report.remedies[list(REMEDY_COLUMNS)].rename(columns=REMEDY_COLUMNS)
        count = "one remedy" if len(tried) == 2 else f"{len(tried) - 1} remedies"
        lines += ["", f"{count}, by a rerun in float16:", text_table(tried)]
    if written is not None:
        end = f"logits off by {written['difference']:.2g} from float32's" if written["finite"] else "NOT finite"
        lines += ["", f"{written['path']}: written, read back and run in {written['dtype']}: {end}"]
    elif options.write is not None:
        why = (
            "float16 serves as it is" if not verdict.is_fault
            else "no remedy serves" if report.remedy is None
            else f"{report.remedy.name} is nothing that weights and config can hold"
        )  # fmt: skip
        lines += ["", f"{options.write}: not written, {why}"]
    return "\n".join(lines)
