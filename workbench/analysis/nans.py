"""Where values stop being finite: shares per layer and tap point, the first bad op, and what its place
establishes."""

from __future__ import annotations

import math
import re

import pandas as pd

from workbench import taps
from workbench.analysis.verdict import NOT_ESTABLISHED, Verdict, Where
from workbench.numerics import EXP_OVERFLOW, EXPONENT_FORMS, LARGEST, NumericsPolicy

#: Tap point -> the op whose output it shows; a linear projection is no op of the registry and is called by
#: its weight.
OP_OF_TAP: dict[str, str] = {
    taps.EMBED: "embed_tokens",
    taps.INPUT_NORM: "rms_norm",
    taps.GDN_QKV: "in_proj_qkv",
    taps.GDN_GATE: "in_proj_z",
    taps.GDN_CONV: "causal_conv",
    taps.GDN_Q: "l2_norm",
    taps.GDN_K: "l2_norm",
    taps.GDN_V: "causal_conv",
    taps.GDN_BETA: "in_proj_b",
    taps.GDN_LOG_DECAY: "log_decay",
    **dict.fromkeys(
        (
            taps.GDN_CUMSUM, taps.GDN_DECAY, taps.GDN_KKT, taps.GDN_INVERSE, taps.GDN_U, taps.GDN_W,
            taps.GDN_INTRA, taps.GDN_INTER, taps.GDN_STATE, taps.GDN_OUT,
        ),
        "gated_delta_rule",
    ),
    taps.GDN_NORM: "gated_rms_norm",
    taps.ATTN_Q: "q_proj",
    taps.ATTN_K: "k_proj",
    taps.ATTN_V: "v_proj",
    taps.ATTN_GATE: "q_proj",
    taps.ATTN_SCORES: "attention",
    taps.ATTN_OUT: "attention",
    taps.MIXER_OUT: "out_proj",
    taps.RESIDUAL_MID: "residual",
    taps.POST_NORM: "rms_norm",
    taps.MOE_LOGITS: "router",
    taps.MOE_TOPK: "routing",
    taps.MOE_EXPERTS: "experts",
    taps.MOE_SHARED: "shared_expert",
    taps.MOE_OUT: "mlp",
    taps.RESIDUAL: "residual",
    taps.FINAL_NORM: "rms_norm",
    taps.LOGITS: "lm_head",
}  # fmt: skip

#: Tap points whose tensors the chunked gated delta rule reads.
DELTA_RULE_INPUTS = (taps.GDN_Q, taps.GDN_K, taps.GDN_V, taps.GDN_BETA, taps.GDN_LOG_DECAY)

#: The cause that `diagnose` can establish.
EXPONENT_OVERFLOW = "exponent_overflow"


def bad_share(table: pd.DataFrame) -> pd.Series:
    """Share of values that are NaN or infinite, per row of a trace table."""
    return table["frac_nan"] + table["frac_pinf"] + table["frac_ninf"]


def relative_names(table: pd.DataFrame) -> pd.Series:
    """Names of tap points without their layer (``gdn.cumsum``, ``logits``), per row of a trace table."""
    return table["tap"].map(relative_name)


def relative_name(tap: str) -> str:
    """``relative_name("layers.03.gdn.cumsum") == "gdn.cumsum"``, in the prediction head too."""
    return re.sub(r"^(mtp\.)?layers\.\d+\.", "", tap)


def share_map(table: pd.DataFrame, step: int = 0) -> pd.DataFrame:
    """Share of values that are not finite, layers down, tap points inside a layer across, in the order of
    computation.

    NaN stands where a layer has no such tap point. Rows of one tap point (packed sequences) are averaged by
    size.
    """
    rows = table[(table["step"] == step) & table["layer"].notna()]
    frame = pd.DataFrame(
        {
            "layer": rows["layer"].astype(int),
            "tap": relative_names(rows),
            "values": rows["shape"].map(math.prod),
            "bad": bad_share(rows) * rows["shape"].map(math.prod),
        }
    )
    sums = frame.groupby(["layer", "tap"])[["bad", "values"]].sum()
    shares = (sums["bad"] / sums["values"].clip(lower=1)).unstack("tap")
    return shares[[name for name in taps.LAYER_TAPS if name in shares.columns]]


def output_share(table: pd.DataFrame, step: int = 0) -> float:
    """Share of the logits of one forward pass that is not finite; NaN where the table holds no logits."""
    rows = table[(table["step"] == step) & (table["tap"] == taps.LOGITS)]
    return float(bad_share(rows).iloc[-1]) if len(rows) else math.nan


def first_bad(table: pd.DataFrame) -> pd.Series | None:
    """The first row, in the order of computation, that holds a value which is not finite."""
    bad = table[bad_share(table) > 0]
    return None if bad.empty else bad.iloc[0]


def axes_of(tap: str) -> list[str]:
    """Names of the axes at a tap point, as the table of tap points states them: ``["B", "T", "V"]``."""
    description = {**taps.LAYER_TAPS, **taps.MODEL_TAPS}[relative_name(tap)]
    return [axis.strip() for axis in description.rpartition("[")[2].rstrip("]").split(",")]


def locate(row: pd.Series, table: pd.DataFrame) -> Where:
    """The place of a row's first bad value.

    Token and head are read off its index, None without one; of packed batches the token only with a time axis.
    """
    layer, _ = taps.split_name(row["tap"])
    index: dict[str, int] = {}
    if row["first_bad"] is not None:  # flags know the tensor alone
        for axis, position in zip(axes_of(row["tap"]), row["first_bad"], strict=True):
            index.setdefault(axis, position)  # of two chunk axes the first is the row that is computed
    head = index.get("V", index.get("heads"))
    token = index.get("T", _token_of_index(index, row, table))
    return Where(layer=layer, op=OP_OF_TAP[relative_name(row["tap"])], tap=row["tap"], token=token, head=head)


def _token_of_index(index: dict[str, int], row: pd.Series, table: pd.DataFrame) -> int | None:
    """Token of a first bad value whose tensor has no time axis: rows of all sequences, or chunks.

    Chunks stand step by step, the sequences of a step side by side.
    """
    embedded = table[(table["step"] == row["step"]) & (table["tap"] == taps.EMBED)]
    if embedded.empty:
        return None
    batch, tokens = embedded["shape"].iloc[0][:2]
    if "tokens" in index:
        return index["tokens"] % tokens
    if "C" not in index:
        return None
    chunks, rows = row["shape"][0], row["shape"][2]
    if chunks != batch * -(-tokens // rows):
        return None  # packed: the trace does not hold the boundaries
    return index["N"] // batch * rows + index["C"]


#: What a trace with each check has seen of a tensor: how its values are called, and what it says nothing about.
SEEN = {
    "statistics": ("values", ""),
    "exact": ("values", ""),
    "ranges": ("values", ""),
    "flags": ("values", ""),
    "sampled": (
        "sampled values", "; the first and last 64 values of each tensor were read, a fault elsewhere is not seen"
    ),
}


def diagnose(table: pd.DataFrame, policy: NumericsPolicy, check: str = "statistics") -> Verdict:
    """What a trace alone can say about values that are not finite; `check` is what the trace was made with.

    The cause is named in one case, where the order of tap points leaves no other: everything up to and
    including the cumulative sum is finite, the pairwise decay made from it is not, the sum passes the limit
    of exp, and the policy's form is one that overflows there. Otherwise the first bad op is a place, and
    the cause is NOT_ESTABLISHED: so too with the checks `exact`, `flags` and `sampled`, which measure no range. With
    `sampled` the place is the first that the sample met; `flags` sees ops from outside and neither token nor head.
    """
    values, unseen = SEEN[check]
    row = first_bad(table)
    if row is None:
        passes = table["step"].nunique()
        seen = f"{len(table)} tensors of {passes} forward pass{'' if passes == 1 else 'es'}"
        return Verdict(
            f"All {values} are finite in {seen}{unseen}",
            evidence=(_closest_to_limit(table),) if table["absmax"].notna().any() else (),
        )
    where = locate(row, table)
    share = float(bad_share(pd.DataFrame([row])).iloc[0])
    before = int((table.index < row.name).sum())
    sentence = f"First value that is not finite: {row['tap']}, op {where.op}{unseen}"
    what = f"{row['tap']} ({row['dtype']}, shape {tuple(row['shape'])})"
    if check == "flags":
        evidence = [f"{what}: at least one of its values is not finite; check exact says how many and which is first"]
    elif row["first_bad"] is None:  # a stage of which a kernel told the ranges alone
        evidence = [f"{what}: {100 * share:.3g} % of its {values} are not finite; check exact says which is the first"]
    else:
        evidence = [
            f"{what}: {100 * share:.3g} % of its {values} are not finite, the first at index {tuple(row['first_bad'])}"
        ]
    ruled_out = [f"the {before} tensors computed before it in this trace are finite"] if not unseen else []
    cause = _exponent_overflow(row, table, policy)
    if cause is None:
        return Verdict(
            sentence, where, NOT_ESTABLISHED, tuple(evidence), tuple(ruled_out), None, NOT_ESTABLISHED
        )
    depth, limit = cause
    evidence += [
        f"the cumulative log decay it is made from is finite and reaches -{depth:.4g} nats; "
        f"exp overflows float32 beyond {limit:.2f}",
        f"policy exponent {policy.exponent!r}: {EXPONENT_FORMS[policy.exponent]}",
    ]
    ruled_out.append(f"its inputs ({', '.join(DELTA_RULE_INPUTS)}) are finite in this layer")
    fix = "evaluate differences before exp: policy `safe` (exponent difference_then_mask) needs no clamp"
    return Verdict(sentence, where, EXPONENT_OVERFLOW, tuple(evidence), tuple(ruled_out), fix)


def _exponent_overflow(
    row: pd.Series, table: pd.DataFrame, policy: NumericsPolicy
) -> tuple[float, float] | None:
    """(depth of the cumulative sum, limit of exp) where the exponent form is what spoiled this first row."""
    layer, relative = taps.split_name(row["tap"])
    if relative != taps.GDN_DECAY or policy.exponent == "difference_then_mask":
        return None
    cumsum = table[(table["tap"] == taps.full_name(layer, taps.GDN_CUMSUM)) & (table["step"] == row["step"])]
    if cumsum.empty:
        return None
    depth = float(cumsum["absmax"].iloc[0])
    limit = EXP_OVERFLOW[row["dtype"]]
    return (depth, limit) if depth > limit else None


def _closest_to_limit(table: pd.DataFrame) -> str:
    """The tensor whose largest magnitude is nearest to the largest number of its dtype, as a sentence."""
    share = table["absmax"] / table["dtype"].map(LARGEST)
    row = table.loc[share.fillna(0.0).idxmax()]
    return f"nearest to the limit of its dtype: {row['tap']} ({row['dtype']}) reaches {row['absmax']:.4g}"


def worst_rows(table: pd.DataFrame, count: int) -> pd.DataFrame:
    """The rows to look at first: those not finite, in the order of computation.

    Where all are finite: those nearest to the largest number of their dtype.
    """
    bad = table[bad_share(table) > 0]
    if len(bad):
        return bad.head(count)
    share = (table["absmax"] / table["dtype"].map(LARGEST)).fillna(0.0)
    return table.loc[share.sort_values(ascending=False, kind="stable").index[:count]]
