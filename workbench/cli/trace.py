"""`workbench trace`: one prompt, every tap point, the first bad op."""

from __future__ import annotations

import argparse
import dataclasses
import re
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.inputs import card_name, folder_of, input_tensor, load_model, prompt_ids
from workbench.cli.options import add_command, model_options, prompt_options
from workbench.cli.output import text_table, write_json
from workbench.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from workbench.analysis.verdict import Verdict
    from workbench.model import CausalLM
    from workbench.tracing import Selection
    from workbench.tracing.dump import TraceWriter
    from workbench.tracing.ring import FlightRecorder


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
        "--check", choices=("statistics", "exact", "sampled", "ranges", "flags", "float64"), default="statistics",
        help="what to measure of each tensor: everything (default); only which values are not finite; only that, and "
        "only of its first and last 64 values, which misses most faults; which are not finite, the smallest and the "
        "largest, for which kernels need not write their stages to memory; only whether there is such a value, at the "
        "least cost and without the stages inside an op; or how far it is from what float64 makes of "
        "the same inputs, which finds the op that made a fault, also one that stays finite, and takes several times as "
        "long",
    )  # fmt: skip
    parser.add_argument(
        "--decode", metavar="N", type=int, default=0,
        help="decode N tokens after the prompt and watch those passes too, with --check float64 also the memory "
        "between them; with --check float64 or flags, or --dump (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--casts", action="store_true",
        help="count what narrowing casts lose before each tap point; few are left in a float32 model (--dtype)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE|-", help="write the verdict and the whole table as JSON")
    chosen = parser.add_argument_group("selection", "what has rows in the table and is saved by --dump; default: all")
    chosen.add_argument("--tap", metavar="GLOB", action="append", help="names of tap points; may be repeated")
    chosen.add_argument("--layers", metavar="0-3,7", help="numbers of layers")
    chosen.add_argument("--tokens", metavar="A:B", help="tokens A to B - 1 of each pass")
    chosen.add_argument("--steps", metavar="A:B", help="passes A to B - 1; the prompt is pass 0")
    saved = parser.add_argument_group("saved tensors")
    saved.add_argument("--dump", metavar="DIR", type=Path, help="save the tensors of all passes as a bundle")
    saved.add_argument(
        "--ring", metavar="N", type=int,
        help="hold the last N passes in memory, and write them to --dump only when a value is not finite",
    )  # fmt: skip
    saved.add_argument(
        "--cap", metavar="BYTES", default="1G",
        help="most bytes of tensors in --dump, such as 500M (default 1G); the bundle lists what did not fit",
    )  # fmt: skip


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

    if options.decode < 0 or (options.decode and options.check not in ("float64", "flags") and options.dump is None):
        raise InputError(
            f"--decode {options.decode}: expected a number of tokens, with --check float64, --check flags or --dump"
        )
    if options.casts and options.check == "float64":
        raise InputError("--casts: not with --check float64, which computes in float64 between the passes; run both")
    if options.ring is not None and (options.dump is None or options.ring < 1):
        raise InputError(f"--ring {options.ring}: expected at least 1, with --dump DIR for what it writes")
    select, cap_bytes = _selection(options), _bytes(options.cap)
    if options.check == "float64" and (select is not None or options.dump is not None):
        raise InputError("--check float64: expected neither a selection nor --dump, found one; it reads every tensor")
    model = load_model(options)
    input_ids = input_tensor(model, prompt_ids(options))
    if options.check == "float64":
        return _judge(model, input_ids, options)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        watched = {"flag_steps": options.decode + 1} if options.check == "flags" else {}
        seen = stack.enter_context(trace(model, casts=options.casts, check=options.check, select=select, **watched))
        saving = None if options.dump is None else stack.enter_context(_saving(model, options, select, cap_bytes))
        output = model(input_ids, use_cache=options.decode > 0)
        for _ in range(options.decode):
            output = model(output.logits[:, -1:].argmax(-1), cache=output.cache)
    if seen.table.empty:
        raise InputError(
            f"trace: expected some tensor to watch, found that the selection left none of {options.decode + 1} passes "
            f"and {input_ids.shape[1]} tokens; widen --tap, --layers, --tokens or --steps (flags do not see inside ops)"
        )
    verdict = nans.diagnose(seen.table, model.kernels.policy, options.check)
    if options.json is not None:
        content = {
            **verdict.to_json(),
            "checkpoint": str(options.checkpoint),
            "tokens": input_ids.shape[1],
            "dtype": str(model.dtype).removeprefix("torch."),
            "policy": model.kernels.policy.to_json(),
            "backends": [row.to_json() for row in model.kernels.attestation()],
            "logits_bad_share": nans.output_share(seen.table),
            "check": options.check,
            "card": card_name(model),
            "table": seen.table.astype(object).to_dict("records"),
        }
        if saving is not None:
            content["dump"] = _saved(saving, options)
        if options.casts:
            content["casts"] = seen.casts.astype(object).to_dict("records")
        write_json(content, options.json)
    if options.json != "-":
        print(_text(verdict, seen.table, options))
        if options.casts:
            print("\n" + _casts_text(seen.casts, options.top))
        if saving is not None:
            print(_saved_text(_saved(saving, options)))
    return verdict.exit_code


def _selection(options: argparse.Namespace) -> Selection | None:
    """What --tap, --layers, --tokens and --steps choose; None without any of them."""
    from workbench.tracing import Selection

    if all(given is None for given in (options.tap, options.layers, options.tokens, options.steps)):
        return None
    layers: set[int] = set()
    for part in () if options.layers is None else options.layers.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if found is None:
            raise InputError(f"--layers: expected numbers and ranges such as 0-3,7, found {options.layers!r:.60}")
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last:
            raise InputError(f"--layers: expected ranges that rise such as 0-3, found {part.strip()!r:.60}")
        layers.update(range(first, last + 1))
    ranges = {}
    for name in ("tokens", "steps"):
        text = getattr(options, name)
        found = None if text is None else re.fullmatch(r"\s*(\d{1,9}):(\d{1,9})\s*", text)
        if text is not None and (found is None or int(found[1]) >= int(found[2])):
            raise InputError(f"--{name}: expected A:B with A below B, such as 0:64, found {text!r:.60}")
        ranges[name] = None if found is None else (int(found[1]), int(found[2]))
    return Selection(tuple(options.tap or ("*",)), tuple(sorted(layers)) or None, **ranges)


def _bytes(text: str) -> int:
    """A size such as 500M or 2G: powers of 1024."""
    found = re.fullmatch(r"(\d{1,9})([kKMG]?)", text)
    if found is None or int(found[1]) == 0:
        raise InputError(f"--cap: expected a number of bytes such as 500M, found {text!r:.60}")
    return int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ")


def _saving(
    model: CausalLM, options: argparse.Namespace, select: Selection | None, cap_bytes: int
) -> AbstractContextManager[TraceWriter | FlightRecorder]:
    from workbench.provenance import checkpoint_hash
    from workbench.tracing.dump import dump, origin_of
    from workbench.tracing.ring import flight_recorder

    origin = dataclasses.replace(origin_of(model), model_hash=checkpoint_hash(folder_of(options.checkpoint)))
    if options.ring is None:
        return dump(model, options.dump, select=select, cap_bytes=cap_bytes, origin=origin)
    return flight_recorder(
        model, options.dump, steps=options.ring, select=select, cap_bytes=cap_bytes, origin=origin
    )


def _saved(saving: TraceWriter | FlightRecorder, options: argparse.Namespace) -> dict:
    """What is in the bundle now; of a recorder that never tripped, nothing."""
    from workbench.tracing.dump import TraceWriter

    writer = saving if isinstance(saving, TraceWriter) else saving.written
    if writer is None:
        return {"path": None, "tensors": 0, "bytes": 0, "left_out": 0, "passes": []}
    return {
        "path": str(options.dump), "tensors": len(writer.entries), "bytes": writer.written_bytes,
        "left_out": len(writer.left_out), "passes": sorted({entry["step"] for entry in writer.entries}),
    }  # fmt: skip


def _saved_text(saved: dict) -> str:
    if saved["path"] is None:
        return "\nNo flag tripped: nothing was written."
    left_out = f"; {saved['left_out']} more did not fit and are listed in it" if saved["left_out"] else ""
    passes = f"{len(saved['passes'])} pass{'' if len(saved['passes']) == 1 else 'es'}"
    return f"\n{saved['path']}: {saved['tensors']} tensors of {passes}, {saved['bytes']} bytes{left_out}"


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
            "backends": [row.to_json() for row in model.kernels.attestation()], "card": card_name(model),
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
    has_range = options.check in ("statistics", "ranges")
    if options.check == "flags":
        return "\n".join([*lines, *_flagged(table, options.top)])
    if not (verdict.is_fault or has_range):
        return "\n".join(lines)  # nothing is bad, and no range says what comes nearest to it
    columns = {name: head for name, head in TRACE_COLUMNS.items() if has_range or name not in NOT_CHECKED}
    if options.check == "ranges":
        columns = {name: head for name, head in columns.items() if name not in ("rms", "frac_near_limit")}
    shown = nans.worst_rows(table, options.top)[list(columns)].rename(columns=columns)
    what = (
        "not finite, in the order of computation" if verdict.is_fault else "nearest to the limit of its dtype"
    )
    lines += ["", f"{len(shown)} of {len(table)} tensors, {what}:", text_table(shown, {"shape": "shape"})]
    return "\n".join(lines)


def _flagged(table: pd.DataFrame, count: int) -> list[str]:
    """Which tensors hold something that is not finite: how much of them, and of which kind, flags do not tell."""
    from workbench.analysis.nans import bad_share

    bad = table[bad_share(table) > 0]
    if bad.empty:
        return []
    shown = bad[["step", "tap", "dtype", "shape"]].head(count).rename(columns={"step": "pass"})
    return ["", f"{len(shown)} of {len(bad)} tensors that are not finite, in the order of computation:",
            text_table(shown, {"shape": "shape"})]  # fmt: skip


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
