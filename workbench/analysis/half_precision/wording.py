"""What a readiness report says: the verdict, in sentences made of its tables."""

from __future__ import annotations

import math

import pandas as pd

from workbench.analysis.half_precision.watch import RULE, tap_style
from workbench.analysis.verdict import Verdict, Where
from workbench.analysis.wording import counted
from workbench.numerics import EXP_OVERFLOW, LARGEST
from workbench.taps import split_name

#: What a verdict may name.
NOT_FINITE_IN_FLOAT32, OVERFLOW, UNDERFLOW = "not_finite_in_float32", "float16_overflow", "float16_underflow"

#: Names that a sentence lists before it counts.
LISTED = 4


def not_finite_verdict(activations: pd.DataFrame) -> Verdict:
    """For a model that float32 cannot run on this prompt: float16 is not what is at fault."""
    bad = activations[activations["bad"] > 0]
    row = bad.iloc[0]
    return Verdict(
        f"Not a question of float16: the float32 run is not finite either, first at {row['name']}", _where(row),
        NOT_FINITE_IN_FLOAT32,
        (f"{row['name']}: {row['bad']} of {row['values']} values are not finite in float32, {place_of(row)}",),
        fix="find the cause in float32 first: workbench trace --dtype float32",
    )  # fmt: skip


def _where(row: pd.Series) -> Where:
    layer, token = (None if pd.isna(row[name]) else int(row[name]) for name in ("layer", "token"))
    return Where(layer=layer, op=row["op"], tap=row["name"], token=token)


def _where_weight(name: str) -> Where:
    return Where(layer=split_name(tap_style(name))[0], op=name)


def place_of(row: pd.Series) -> str:
    """``token 5, expert 3, unit 17`` of a row of activations."""
    parts = [f"{name} {int(row[name])}" for name in ("token", "expert", "unit") if not pd.isna(row[name])]
    return ", ".join(parts) or "place unknown"


def nearest(activations: pd.DataFrame) -> pd.Series:
    """The tensor held in float16 that comes nearest to its largest number, or passes it furthest."""
    held = activations[activations["held"] == "float16"]
    return held.loc[held["absmax"].idxmax()]


def fault_sentence(row: pd.Series) -> str:
    """One tensor that leaves the range."""
    return (
        f"{row['name']} (op {row['op']}, {place_of(row)}) reaches {row['absmax']:.6g} > {LARGEST['float16']:.0f} in "
        f"float32; {row['overflows']:,} of its {row['values']:,} values overflow float16"
    )


def gate_sentence(gates: pd.DataFrame) -> str:
    """What the gates would do on a card that takes exp of their sums in float16."""
    limit, span = EXP_OVERFLOW["float16"], gates["span_max"].max()
    over = int((gates["over_float16"] > 0).sum())
    head = gates.loc[gates["span_max"].idxmax()]
    place = f"layer {int(head['layer'])}, head {int(head['head'])}"
    if not over:
        return (
            f"gates: no chunk decays by more than {span:.4g} nats ({place}); exp overflows float16 beyond {limit:.2f}"
        )
    return (
        f"gates: {over} of {len(gates)} heads decay by more than {limit:.2f} nats in a chunk, up to {span:.4g} "
        f"({place}); the sums and their exp are float32 here whatever the model's dtype, and must stay it: a card that "
        "takes exp(G_i) exp(-G_j) in float16 overflows, exp of differences that are masked first does not"
    )


def _wide_sentences(activations: pd.DataFrame) -> list[str]:
    """Tensors that float32 holds also in a float16 model and that float16 would not."""
    kept = activations[(activations["overflows"] > 0) & (activations["held"] != "float16")]
    if kept.empty:
        return []
    row = kept.loc[kept["absmax"].idxmax()]
    inside = " inside an op" if row["kind"] == RULE else ""
    return [
        f"{counted(len(kept), 'tensor')} beyond {LARGEST['float16']:.0f}, which this float16 model holds wider: "
        f"the largest {row['name']}{inside} with {row['absmax']:.4g}: a card that narrows them overflows there"
    ]


def _weight_sentences(weights: pd.DataFrame) -> list[str]:
    over, flushed = weights[weights["overflows"] > 0], weights[weights["flushes"] > 0]
    total = int(weights["values"].sum())
    sentences = []
    if len(over):
        row = over.loc[over["absmax"].idxmax()]
        sentences.append(
            f"weights: {over['overflows'].sum():,} of {total:,} values overflow on load, in "
            f"{counted(len(over), 'tensor')}, the largest {row['absmax']:.6g} in {row['tensor']}"
        )
    if len(flushed):
        row = flushed.loc[(flushed["flushes"] / flushed["values"]).idxmax()]
        sentences.append(
            f"weights: {flushed['flushes'].sum():,} of {total:,} values become zero on load, in "
            f"{counted(len(flushed), 'tensor')}; of {row['tensor']} {100 * row['flushes'] / row['values']:.3g} %"
        )
    return sentences or [f"weights: all {total:,} stay finite and none becomes zero on load"]


def _logits_sentence(plain: pd.Series, rounding: float, limit: float) -> str:
    share = f"rounding to float16's bits alone makes {rounding:.2g}, up to {limit:.2g} counts as that"
    if not plain["finite"]:
        return f"float16 run: logits not finite, first at {plain['first_bad']}; {share}"
    flips = f"; {counted(plain['flips'], 'choice')} of experts differ" if plain["flips"] else ""
    other = f" ({plain['difference']:.2g} with its own experts{flips})" if plain["flips"] else ""
    return (
        f"float16 run: finite, logits off by {plain['same_experts']:.2g} of the largest from float32's{other}; {share}"
    )


def verdict_of(
    activations: pd.DataFrame, weights: pd.DataFrame, gates: pd.DataFrame, remedies: pd.DataFrame, rounding: float,
    limit: float,
) -> Verdict:  # fmt: skip
    """The verdict from the tables of a report whose float32 run is finite; the first remedy is `none`."""
    plain = remedies.iloc[0]
    closest = nearest(activations)
    evidence = [_logits_sentence(plain, rounding, limit), *_weight_sentences(weights)]
    also = [*_wide_sentences(activations), *([gate_sentence(gates)] if len(gates) else [])]
    if plain["serves"]:
        share = 100 * closest["share"]
        room = (
            f"nearest to {LARGEST['float16']:.0f}: {closest['name']} ({place_of(closest)}) with "
            f"{closest['absmax']:.4g}, {share:.3g} %"
        )
        lost = activations[activations["fault"]]
        if len(lost):  # what follows may saturate: a sigmoid, a gate that is closed
            also.insert(0, f"{fault_sentence(lost.iloc[0])}, and the logits do not feel it on this prompt")
        return Verdict("Float16 serves on this prompt: finite, and as close to float32 as its rounding lets it be",
                       evidence=(*evidence, room, *also))  # fmt: skip
    faults, over = activations[activations["fault"]], weights[weights["overflows"] > 0]
    if len(faults):
        where = _where(faults.iloc[0])
        evidence = [fault_sentence(faults.iloc[0]), *evidence]
        if len(faults) > 1:
            names = ", ".join(faults["name"].iloc[1 : 1 + LISTED])
            more = f" and {len(faults) - 1 - LISTED} more" if len(faults) > 1 + LISTED else ""
            evidence.append(f"beyond the range after it: {names}{more}")
    elif not plain["finite"]:
        found = activations[activations["name"] == plain["first_bad"]]
        where = _where(found.iloc[0]) if len(found) else Where(tap=plain["first_bad"])
    else:
        small = weights.loc[(weights["flushes"] / weights["values"]).idxmax()]
        where = _where_weight(small["tensor"]) if small["flushes"] else Where()
    if len(over):  # loading comes before any op
        where = _where_weight(over["tensor"].iloc[0])
    cause = OVERFLOW if not plain["finite"] or len(faults) or len(over) else UNDERFLOW
    what = "overflows" if cause == OVERFLOW else "loses too much to its smallest numbers"
    at = where.tap or where.op
    sentence = f"Float16 {what} on this prompt{'' if at is None else f', first at {at}'}"
    if len(over):
        sentence += " on load"
        evidence = [*_weight_sentences(weights), *(line for line in evidence if not line.startswith("weights:"))]
    serving = remedies[remedies["serves"]]
    tried = remedies.iloc[1:]
    ruled_out = ("the float32 run of the same weights is finite",
                 *(f"{row.remedy}: {_failure(row)}" for row in tried.itertuples() if not row.serves))  # fmt: skip
    if serving.empty:
        count = f"none of {len(tried)} remedies tried serves" if len(tried) else "no remedy applies"
        return Verdict(f"{sentence}; {count}",
                       where, cause, (*evidence, *also), ruled_out)  # fmt: skip
    row = serving.iloc[0]
    costs = [f"{row[key]:,} {unit}" for key, unit in COSTS.items() if row[key]]
    fix = (
        f"{row['remedy']}: {row['changes']}; proven by a rerun in float16: finite, logits off by "
        f"{row['same_experts']:.2g} of the largest from float32's, costs {' and '.join(costs) or 'nothing'}"
    )
    return Verdict(f"{sentence}; {row['remedy']} sets it right", where, cause, (*evidence, *also), ruled_out, fix)


#: Costs of a remedy in words.
COSTS = {
    "extra_bytes": "bytes of weights", "wide_flops": "flops per token in float32 for float16",
    "activation_bytes": "bytes per token of stream",
}  # fmt: skip


def _failure(row: object) -> str:
    if not row.finite:
        return f"not finite, first at {row.first_bad}"
    off = "inf" if math.isinf(row.same_experts) else f"{row.same_experts:.2g}"
    return f"finite, but logits off by {off}"
