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

    from workbench.analysis.verdict import Verdict


def add(commands) -> None:
    parser = add_command(
        commands, "trace", run, "Run one prompt, watch every tap point, and name the first bad op.",
        'workbench trace data/miniature --prompt "To be, or not to be" --policy factored --json verdict.json',
        [model_options(), prompt_options()],
    )  # fmt: skip
    parser.add_argument(
        "--top", metavar="N", type=int, default=12, help="rows of the table to print (default 12)"
    )
    parser.add_argument("--json", metavar="FILE|-", help="write the verdict and the whole table as JSON")


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

    model = load_model(options)
    input_ids = input_tensor(model, prompt_ids(options))
    with torch.inference_mode(), trace(model) as seen:
        model(input_ids, use_cache=False)
    verdict = nans.diagnose(seen.table, model.kernels.policy)
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
            "table": seen.table.astype(object).to_dict("records"),
        }
        write_json(content, options.json)
    if options.json != "-":
        print(_text(verdict, seen.table, options.top))
    return verdict.exit_code


def _text(verdict: Verdict, table: pd.DataFrame, count: int) -> str:
    from workbench.analysis import nans

    lines = [verdict.verdict]
    lines += [f"  evidence   {sentence}" for sentence in verdict.evidence]
    lines += [f"  ruled out  {sentence}" for sentence in verdict.ruled_out]
    if verdict.is_fault:
        lines.append(f"  cause      {verdict.cause_id}")
    if verdict.fix is not None:
        lines.append(f"  fix        {verdict.fix}")
    shown = nans.worst_rows(table, count)[list(TRACE_COLUMNS)].rename(columns=TRACE_COLUMNS)
    what = (
        "not finite, in the order of computation" if verdict.is_fault else "nearest to the limit of its dtype"
    )
    lines += ["", f"{len(shown)} of {len(table)} tensors, {what}:", text_table(shown, {"shape": "shape"})]
    return "\n".join(lines)
