"""Producer against propagator: which op made the first wrong value, and by what path it reached the logits."""

from __future__ import annotations

import math

import pandas as pd

from workbench.analysis.nans import axes_of, relative_name
from workbench.analysis.stages import CACHE_TAPS, ROW_FACTOR, StageWatch
from workbench.analysis.verdict import NOT_ESTABLISHED, Verdict, Where
from workbench.errors import InputError
from workbench.numerics import ACCURATE_SOLVERS, LARGEST, NumericsPolicy

#: Cause of a fault in an op that computes as its policy asks, which is not the safe one; and those ops.
NUMERICS_POLICY = "numerics_policy"
POLICY_OPS = ("gated_delta_rule", "log_decay")

#: Tap points that a sentence about a path names at most; the middle of a longer one is left out.
PATH_NAMES = 7

#: Axes of what a pass found in its memory, as `nans.axes_of` gives those of tap points.
CACHE_AXES = {
    "cache.window": ("B", "row", "channel"), "cache.state": ("B", "V", "K", "W"),
    "cache.keys": ("B", "T", "kv heads", "head_dim"), "cache.values": ("B", "T", "kv heads", "head_dim"),
}  # fmt: skip


def path_to_logits(table: pd.DataFrame, row: pd.Series) -> list[str]:
    """The tap points by which a value that is not finite went from `row` to the logits, each read by the next.

    The shortest such way through tensors of the same pass that are not finite; as far as it goes where the logits are
    finite. Only `row` itself for a fault that stays finite: it changes values, and no trace of it is marked.
    """
    start = row["tap"]
    if row["output_finite"]:
        return [start]
    later = table[(table["step"] == row["step"]) & (table.index > row.name) & ~table["output_finite"]]
    before: dict[str, str] = {start: ""}
    last = start
    for tap, reads in zip(later["tap"], later["reads"], strict=True):
        source = next((read for read in reads if read in before), None)
        if source is not None and tap not in before:
            before[tap] = source
            last = tap
    path = [last]
    while before[path[-1]]:
        path.append(before[path[-1]])
    return path[::-1]


def place(row: pd.Series) -> Where:
    """Layer, op, tap point, and the token and head where the tensor has such axes."""
    name = relative_name(row["tap"])
    index: dict[str, int] = {}
    axes = CACHE_AXES[name] if name in CACHE_AXES else axes_of(row["tap"])
    for axis, position in zip(axes, row["index"], strict=True):
        index.setdefault(axis, position)
    layer = None if pd.isna(row["layer"]) else int(row["layer"])
    head = index.get("V", index.get("heads", index.get("kv heads", index.get("H"))))
    return Where(layer=layer, op=row["op"], tap=row["tap"], token=index.get("T", index.get("tokens")), head=head)


def diagnose_stages(watch: StageWatch) -> Verdict:
    """The first op at fault, with the evidence for it; see `stages` for what at fault means."""
    table = watch.table
    if table.empty:
        raise InputError("provenance: expected at least one watched pass, found none; run the model inside the watch")
    row = watch.first_fault
    passes = table["step"].nunique()
    seen = f"{len(table)} tensors of {passes} forward pass{'' if passes == 1 else 'es'}"
    if row is None:
        worst = (table["error"] / table["limit"].where(table["limit"] > 0)).max()
        spoiled = int((~table["inputs_finite"]).sum())
        evidence = [f"the largest error is {100 * worst:.2g} % of what the dtype's roundings explain"]
        if spoiled:
            evidence.append(f"{spoiled} tensors are made from inputs that are not finite, and are not judged")
        return Verdict(f"Every op gives what float64 makes of its inputs, in {seen}", evidence=tuple(evidence))
    where = place(row)
    faults = table[table["is_fault"]]
    evidence = [_what_is_wrong(row)]
    if row["index"]:
        evidence.append(
            f"at index {row['index']} it is {row['found']:.6g}, where its inputs give {row['expected']:.6g}"
        )
    path = path_to_logits(table, row)
    if len(path) > 1:
        evidence.append(f"from there through {_names(path[1:])}")
    if len(faults) > 1:
        others = faults.iloc[1:]
        ops = ", ".join(dict.fromkeys(others["op"]))
        evidence.append(f"{len(others)} more tensors are wrong beside their own inputs: {ops}")
    reading = watch.patterns.get((row["step"], where.layer)) if where.layer is not None else None
    ruled_out = [f"the {int((table.index < row.name).sum())} tensors before it follow from their inputs"]
    if reading is not None and reading.first is not None:
        evidence.append(f"rows of its output: {reading}")
        if reading.allows:
            evidence.append("which may be left by: " + "; ".join(reading.allows))
        ruled_out += list(reading.pattern.rules_out)
    kind = "is not finite" if not row["output_finite"] else "is wrong"
    sentence = f"First op at fault: {where.op}, whose output {row['tap']} {kind} in pass {row['step']}"
    traits = unsafe_traits(watch.model.kernels.policy) if where.op in POLICY_OPS else []
    if not traits:
        return Verdict(sentence, where, NOT_ESTABLISHED, tuple(evidence), tuple(ruled_out), None, NOT_ESTABLISHED)
    evidence.insert(1, f"the policy asks for what departs from float64: {'; '.join(traits)}")
    fix = "run again with policy `safe`: if the fault is gone, it was the policy's"
    return Verdict(sentence, where, NUMERICS_POLICY, tuple(evidence), tuple(ruled_out), fix, "likely")


def unsafe_traits(policy: NumericsPolicy) -> list[str]:
    """What of a policy is not as accurate as its dtype allows, each in words; empty for `safe` and its equals."""
    traits = []
    if policy.exponent != "difference_then_mask":
        traits.append(f"exponent {policy.exponent}")
    if policy.cumsum not in ("float64", "segsum"):
        traits.append(f"cumsum in {policy.cumsum}")
    if policy.solver not in ACCURATE_SOLVERS:
        traits.append(f"solver {policy.solver}")
    traits += [f"clamp of {clamp.site} to [{clamp.lo:g}, {clamp.hi:g}] in {clamp.phase}" for clamp in policy.clamps]
    return [*traits, "nan_to_num"] if policy.nan_to_num else traits


def _what_is_wrong(row: pd.Series) -> str:
    name = relative_name(row["tap"])
    if name in CACHE_TAPS:
        return f"{row['tap']} is not what the pass before left there: off by {row['error']:.3g}"
    inputs = ", ".join(relative_name(tap) for tap in row["reads"]) or "the token ids"
    if not row["inputs_finite"]:
        return f"{row['tap']} ({row['dtype']}) holds numbers where its inputs ({inputs}) give NaN: they were replaced"
    if not row["output_finite"]:
        limit = LARGEST.get(row["dtype"], math.nan)
        return f"{row['tap']} ({row['dtype']}, largest number {limit:.4g}) is not finite; its inputs are ({inputs})"
    times = max(row["error"] / row["limit"], row["row_error"] / (ROW_FACTOR * row["limit"]))
    return (
        f"{row['tap']} ({row['dtype']}) is off by {row['error']:.3g} beside float64 on the same inputs ({inputs}), "
        f"{times:.3g} times what its roundings explain"
    )


def _names(path: list[str]) -> str:
    if len(path) <= PATH_NAMES:
        return ", ".join(path)
    half = PATH_NAMES // 2
    return f"{', '.join(path[:half])}, {len(path) - 2 * half} more, {', '.join(path[-half:])}"
