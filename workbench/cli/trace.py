"""`workbench trace`: one prompt, every tap point, the first bad op."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from workbench.cli.inputs import input_tensor, load_model, prompt_ids
from workbench.cli.options import add_command, model_options, prompt_options
from workbench.cli.output import text_table, write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from workbench.analysis.verdict import Verdict
    from workbench.model import CausalLM


def add(commands) -> None:
    parser = add_command(
        commands, "trace", run, "Run one prompt, watch every tap point, and name the first bad op.",
        'workbench trace data/miniature --prompt "To be, or not to be" --policy factored --json verdict.json',
        [model_options(), prompt_options()],
    )  # fmt: skip
    parser.add_argument(
        "--top", metavar="N", type=int, default=12, help="rows of the table to print (default 12)"
    )
    parser.add_argument(
        "--check", choices=("statistics", "exact", "sampled", "float64"), default="statistics",
        help="what to measure of each tensor: everything (default); only which values are not finite; only that, and "
        "only of its first and last 64 values, which misses most faults; or how far it is from what float64 makes of "
        "the same inputs, which finds the op that made a fault, also one that stays finite, and takes several times as "
        "long",
    )  # fmt: skip
    parser.add_argument(
        "--decode", metavar="N", type=int, default=0,
        help="with --check float64: decode N tokens after the prompt and judge those passes and the memory between "
        "them too (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--casts", action="store_true",
        help="count what narrowing casts lose before each tap point; few are left in a float32 model (--dtype)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE|-", help="write the verdict and the whole table as JSON")


#: Columns that the checks other than `statistics` do not measure.
NOT_CHECKED = ("absmax", "rms", "frac_near_limit")

#: Columns of the printed table: name in the trace -> heading.
TRACE_COLUMNS = {
    "tap": "tap", "dtype": "dtype", "shape": "shape", "absmax": "absmax", "rms": "rms", "frac_nan": "NaN",
    "frac_pinf": "+Inf", "frac_ninf": "-Inf", "frac_near_limit": "near limit", "first_bad": "first bad",
}  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.top < 1:
        raise InputError(f"--top: expected at least 1, found {options.top}")
    import torch

    from workbench.analysis import nans
    from workbench.tracing import trace

    if options.decode < 0 or (options.decode and options.check != "float64"):
        raise InputError(f"--decode {options.decode}: expected a number of tokens, with --check float64")
    if options.casts and options.check == "float64":
        raise InputError("--casts: not with --check float64, which computes in float64 between the passes; run both")
    model = load_model(options)
    input_ids = input_tensor(model, prompt_ids(options))
    if options.check == "float64":
        return _judge(model, input_ids, options)
    with torch.inference_mode(), trace(model, casts=options.casts, check=options.check) as seen:
        model(input_ids, use_cache=False)
    verdict = nans.diagnose(seen.table, model.kernels.policy, options.check)
    if options.json is not None:
        content = {
            **verdict.to_json(),
            "checkpoint": str(options.checkpoint),
            "tokens": input_ids.shape[1],
            "dtype": str(model.dtype).removeprefix("torch."),
            "policy": model.kernels.policy.to_json(),
            "backends": [
                {"op": row.op, "backend": row.backend, "calls": row.calls}
                for row in model.kernels.attestation()
            ],
            "logits_bad_share": nans.output_share(seen.table),
            "check": options.check,
            "table": seen.table.astype(object).to_dict("records"),
        }
        if options.casts:
            content["casts"] = seen.casts.astype(object).to_dict("records")
        write_json(content, options.json)
    if options.json != "-":
        print(_text(verdict, seen.table, options))
        if options.casts:
            print("\n" + _casts_text(seen.casts, options.top))
    return verdict.exit_code


#: Columns of the printed table of --check float64.
STAGE_HEADINGS = {
    "step": "pass", "tap": "tap", "op": "op", "dtype": "dtype", "error": "error", "row_error": "worst row",
    "limit": "explained", "is_fault": "fault",
}  # fmt: skip


def _judge(model: CausalLM, input_ids: Tensor, options: argparse.Namespace) -> int:
    """Every op beside float64 of its own inputs, in the prompt's pass and those of the tokens decoded after it."""
    import torch

    from workbench.analysis.provenance import diagnose_stages
    from workbench.analysis.stages import stage_watch

    with torch.inference_mode(), stage_watch(model) as watch:
        output = model(input_ids)
        for _ in range(options.decode):
            output = model(output.logits[:, -1:].argmax(-1), cache=output.cache)
    verdict, table = diagnose_stages(watch), watch.table
    if options.json is not None:
        content = {
            **verdict.to_json(), "checkpoint": str(options.checkpoint), "tokens": input_ids.shape[1],
            "dtype": str(model.dtype).removeprefix("torch."), "policy": model.kernels.policy.to_json(),
            "check": options.check, "decoded": options.decode, "table": table.astype(object).to_dict("records"),
        }  # fmt: skip
        write_json(content, options.json)
    if options.json != "-":
        share = (table["error"] / table["limit"].where(table["limit"] > 0)).fillna(0.0)
        worst = table[table["is_fault"]] if verdict.is_fault else table.loc[share.sort_values(ascending=False).index]
        shown = worst.head(options.top)[list(STAGE_HEADINGS)].rename(columns=STAGE_HEADINGS)
        what = "at fault, in the order of computation" if verdict.is_fault else "nearest to what roundings explain"
        print("\n".join([*_verdict_lines(verdict), "", f"{len(shown)} of {len(table)} tensors, {what}:",
                         text_table(shown)]))  # fmt: skip
    return verdict.exit_code


def _verdict_lines(verdict: Verdict) -> list[str]:
    lines = [verdict.verdict]
    lines += [f"  evidence   {sentence}" for sentence in verdict.evidence]
    lines += [f"  ruled out  {sentence}" for sentence in verdict.ruled_out]
    if verdict.is_fault:
        lines.append(f"  cause      {verdict.cause_id}")
    if verdict.fix is not None:
        lines.append(f"  fix        {verdict.fix}")
    return lines


def _text(verdict: Verdict, table: pd.DataFrame, options: argparse.Namespace) -> str:
    from workbench.analysis import nans

    lines = _verdict_lines(verdict)
    has_range = options.check == "statistics"
    if not (verdict.is_fault or has_range):
        return "\n".join(lines)  # nothing is bad, and no range says what comes nearest to it
    columns = {name: head for name, head in TRACE_COLUMNS.items() if has_range or name not in NOT_CHECKED}
    shown = nans.worst_rows(table, options.top)[list(columns)].rename(columns=columns)
    what = (
        "not finite, in the order of computation" if verdict.is_fault else "nearest to the limit of its dtype"
    )
    lines += ["", f"{len(shown)} of {len(table)} tensors, {what}:", text_table(shown, {"shape": "shape"})]
    return "\n".join(lines)


def _casts_text(casts: pd.DataFrame, count: int) -> str:
    """Sums over all narrowing casts, then those that lost most, largest share first."""
    if casts.empty:
        return "Narrowing casts: none in this pass."
    total = casts[["values", "overflowed", "flushed", "halved"]].sum()
    lost = casts[["overflowed", "flushed", "halved"]].sum(axis=1)
    share = (lost / casts["values"].clip(lower=1)).sort_values(ascending=False, kind="stable")
    shown = casts.loc[share[share > 0].index[:count]]
    lines = [
        f"Narrowing casts before {casts['tap'].nunique()} tap points: of {total['values']} values "
        f"{total['overflowed']} overflowed, {total['flushed']} became zero, {total['halved']} lost more than half of "
        "their bits"
    ]
    if len(shown):
        lines += [f"{len(shown)} of {len(casts)} rows, those that lost most:", text_table(shown)]
    return "\n".join(lines)
