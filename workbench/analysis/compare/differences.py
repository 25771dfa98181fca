"""What differs between two sides: tap points, router choices, logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.compare.hf import order_of
from workbench.analysis.compare.sides import Side, named
from workbench.analysis.nans import OP_OF_TAP
from workbench.analysis.routing import RoutingFlips, RoutingPrompt, RoutingRecord
from workbench.analysis.routing import compare as compare_routing
from workbench.analysis.routing.load import NEAR_TIE
from workbench.analysis.routing.record import stack_parts
from workbench.analysis.routing.recorder import measure, stack_layers
from workbench.analysis.stages import AFTER_A_PROJECTION, Seen, reads_of, stage_limit, unit
from workbench.kernels.agreement import relative_error, worst_row

STAGE_COLUMNS = (
    "step", "layer", "tap", "op", "dtype_a", "dtype_b", "equal", "finite_a", "finite_b", "error", "max_error",
    "worst_row", "worst_row_error", "roundings", "rounding", "inherited", "limit", "own_a", "own_b", "fault_a",
    "fault_b",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """How far `b` is from `a` at one tap point, see `Comparison.stages`."""

    equal: bool
    error: float
    max_error: float
    worst_row: tuple[int, ...]
    worst_row_error: float


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same bits."""
    if a.dtype != b.dtype:
        return False
    one, other = (x.contiguous().view(torch.uint8) if x.dim() else x[None].view(torch.uint8) for x in (a, b))
    return torch.equal(one, other)


def difference(a: Tensor, b: Tensor) -> Difference:
    """Values that are not finite and the same on both sides are no difference; elsewhere they are infinitely far."""
    if is_equal(a, b):
        return Difference(True, 0.0, 0.0, (0,) * max(a.dim() - 1, 0), 0.0)
    x, y = a.double(), b.double()
    same_bad = (~x.isfinite()) & ((x == y) | (x.isnan() & y.isnan()))
    apart = ~(x.isfinite() & y.isfinite()) & ~same_bad
    if bool(apart.any()):
        index = tuple(int(i) for i in torch.unravel_index(apart.flatten().int().argmax(), apart.shape))
        return Difference(False, math.inf, math.inf, index[:-1], math.inf)
    zero = torch.zeros((), dtype=torch.float64)
    x, y = (torch.where(same_bad, zero, z) for z in (x, y))
    largest, most = x.abs().max().item(), (y - x).abs().max().item()
    row, row_error = worst_row(y, x) if x.dim() else ((), 0.0)
    max_error = 0.0 if most == 0.0 else most / largest if largest > 0.0 else math.inf
    return Difference(False, relative_error(y, x), max_error, row, row_error)


def aligned(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Of the states only the last of each sequence where one side has one for each chunk; all else as it is."""
    if taps.split_name(name)[1] == taps.GDN_STATE and a.shape[0] != b.shape[0]:
        last = min(a.shape[0], b.shape[0])
        return a[-last:], b[-last:]
    return a, b


def own_errors(side: Side) -> dict[tuple[int, str], tuple[float, bool]]:
    """(pass, tap) -> (error beside float64 of the side's own inputs, whether that is a fault)."""
    if side.judged is None:
        return {}
    rows = side.judged
    return {
        (step, tap): (error, fault)
        for step, tap, error, fault in zip(rows["step"], rows["tap"], rows["error"], rows["is_fault"], strict=True)
    }


def stage_table(a: Side, b: Side) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(`Comparison.stages`, `Comparison.not_compared`)."""
    own_a, own_b = own_errors(a), own_errors(b)
    rows, left_out = [], []
    errors: dict[tuple[int, str], tuple[float, torch.dtype]] = {}
    for step, (one, other) in enumerate(zip(a.passes, b.passes, strict=True)):
        is_chunked = any(taps.split_name(name)[1] == taps.GDN_CUMSUM for name in one.tensors)
        for name in order_of(list(one.tensors.keys() | other.tensors.keys())):
            missing = [side.label for side, seen in ((a, one), (b, other)) if name not in seen.tensors]
            if missing:
                left_out.append((step, name, f"{missing[0]} does not show it"))
                continue
            x, y = aligned(name, one.tensors[name].cpu(), other.tensors[name].cpu())
            if x.shape != y.shape:
                left_out.append((step, name, f"shapes {tuple(x.shape)} and {tuple(y.shape)}"))
                continue
            layer, tap = taps.split_name(name)
            found = difference(x, y)
            dtypes = [x.dtype, y.dtype]
            if tap in AFTER_A_PROJECTION:  # beta comes from a projection of the same dtype, and stays in it
                beta = taps.full_name(layer, taps.GDN_BETA)
                dtypes += [seen.tensors[beta].dtype for seen in (one, other) if beta in seen.tensors]
            coarser = max(dtypes, key=unit)
            inherited, coarsest = inherited_error(errors, step, name, is_chunked)
            rounding = max(coarser, coarsest or coarser, key=unit)
            errors[step, name] = found.error, rounding
            error_a, fault_a = own_a.get((step, name), (math.nan, False))
            error_b, fault_b = own_b.get((step, name), (math.nan, False))
            rows.append((
                step, layer, name, OP_OF_TAP[tap], named(x.dtype), named(y.dtype), found.equal,
                bool(x.isfinite().all()), bool(y.isfinite().all()), found.error, found.max_error, found.worst_row,
                found.worst_row_error, found.error / unit(rounding), named(rounding), inherited, stage_limit(coarser),
                error_a, error_b, fault_a, fault_b,
            ))  # fmt: skip
    stages = pd.DataFrame(rows, columns=list(STAGE_COLUMNS)).astype({"layer": "Int64"})
    return stages, pd.DataFrame(left_out, columns=["step", "tap", "reason"])


def _inputs(step: int, name: str, is_chunked: bool) -> Iterator[tuple[int, str]]:
    """(pass, tap) that a tap point is made from, what the pass before left in memory included."""
    layer, tap = taps.split_name(name)
    if layer is None:
        return
    for read in reads_of(layer, tap, is_chunked):
        yield step, read
    for kept in (taps.GDN_QKV, taps.GDN_STATE, taps.ATTN_K, taps.ATTN_V):
        if step:
            yield step - 1, taps.full_name(layer, kept)


def inherited_error(
    errors: dict[tuple[int, str], tuple[float, torch.dtype]], step: int, name: str, is_chunked: bool,
    through: frozenset[str] = frozenset(),
) -> tuple[float, torch.dtype | None]:  # fmt: skip
    """(largest error, coarsest dtype whose rounding is in it) of what a tap point is made from.

    What was not compared stands for what it is made from itself.
    """
    found = []
    for key in _inputs(step, name, is_chunked):
        if key in errors:
            found.append(errors[key])
        elif key[0] == step and key[1] not in through:
            found.append(inherited_error(errors, step, key[1], is_chunked, through | {key[1]}))
    coarsest = max((dtype for error, dtype in found if error > 0 and dtype is not None), key=unit, default=None)
    return max((error for error, _ in found), default=0.0), coarsest


# ---- routing


def chosen_experts(seen: Seen, layer: int) -> Tensor | None:
    """[tokens, A] as the router chose, or, where only its logits were seen, the largest A of them."""
    if layer in seen.experts:
        return seen.experts[layer].cpu()
    weights = seen.tensors.get(taps.full_name(layer, taps.MOE_TOPK))
    logits = seen.tensors.get(taps.full_name(layer, taps.MOE_LOGITS))
    if weights is None or logits is None:
        return None
    ranked = logits.cpu().double().sort(dim=-1, descending=True, stable=True).indices
    return ranked[:, : weights.shape[-1]]


def routing_record(side: Side, layers: list[int]) -> RoutingRecord | None:
    """What the routers of a side did in all its passes; None where it does not show them."""
    pieces, ids = [], []
    experts = top_k = 0
    for seen in side.passes:
        tokens = seen.input_ids.flatten().tolist()
        rows = []
        for layer in layers:
            chosen = chosen_experts(seen, layer)
            logits = seen.tensors.get(taps.full_name(layer, taps.MOE_LOGITS))
            weights = seen.tensors.get(taps.full_name(layer, taps.MOE_TOPK))
            if chosen is None or logits is None or weights is None:
                return None
            experts, top_k = logits.shape[-1], chosen.shape[-1]
            rows.append(measure(logits.cpu(), weights.cpu(), chosen))
        pieces.append(stack_layers(rows, tokens, 0, seen.past))
        ids += tokens
    part = stack_parts("model", layers, pieces)
    return RoutingRecord(experts, top_k, True, side.dtype or "", (RoutingPrompt(tuple(ids)),), (part,))


def routing_flips(a: Side, b: Side) -> RoutingFlips | None:
    """Where the two sides' routers chose otherwise; None where there are none, or one side does not show them."""
    layers = sorted({
        layer for side in (a, b) for name in side.passes[0].tensors for layer, tap in (taps.split_name(name),)
        if tap == taps.MOE_LOGITS
    })  # fmt: skip
    if not layers:
        return None
    records = [routing_record(side, layers) for side in (a, b)]
    return None if None in records else compare_routing(*records)


FLIP_COLUMNS = ("layer", "position", "token", "margin", "replaced", "is_near_tie")


def flip_table(flips: RoutingFlips | None) -> pd.DataFrame:
    """A row for each layer and token with other experts: see `Comparison.flips`."""
    rows = []
    for part in () if flips is None else flips.parts:
        for layer, token in np.argwhere(part.set_flip):
            margin = float(part.first.margin[layer, token])
            rows.append((
                part.first.layers[layer], int(part.first.position[token]), int(part.first.token[token]), margin,
                int(part.replaced[layer, token]), margin < NEAR_TIE,
            ))  # fmt: skip
    return pd.DataFrame(rows, columns=list(FLIP_COLUMNS))


# ---- logits


def logit_table(a: Side, b: Side) -> pd.DataFrame:
    """A row for each position whose logits both sides show: see `Comparison.logits`."""
    frames = []
    for step, (one, other) in enumerate(zip(a.passes, b.passes, strict=True)):
        if taps.LOGITS not in one.tensors or taps.LOGITS not in other.tensors:
            continue
        x, y = (seen.tensors[taps.LOGITS].cpu().double().flatten(0, 1) for seen in (one, other))
        if x.shape != y.shape:
            continue
        finite = (x.isfinite() & y.isfinite()).all(-1)
        p, q = x.log_softmax(-1), y.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).clamp(min=0.0)
        best_a, best_b = x.argmax(-1), y.argmax(-1)
        first = one.past + one.input_ids.shape[1] - len(x)
        frames.append(pd.DataFrame({
            "step": step, "position": range(first, first + len(x)), "finite": finite.numpy(),
            "kl": torch.where(finite, kl, torch.nan).numpy(),
            "top_a": best_a.numpy(), "top_b": best_b.numpy(), "top1_flip": (finite & (best_a != best_b)).numpy(),
            "difference": torch.where(finite, (x - y).abs().amax(-1), torch.nan).numpy(),
            "largest": torch.where(finite, x.abs().amax(-1), torch.nan).numpy(),
        }))  # fmt: skip
    columns = ["step", "position", "finite", "kl", "top_a", "top_b", "top1_flip", "difference", "largest"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def logit_summary(logits: pd.DataFrame) -> dict[str, Any]:
    """positions, not_finite, kl_mean and kl_max in nats, top1_flips, parity: max |b - a| / max |a| (None without)."""
    known = logits[logits["finite"].astype(bool)]
    if known.empty:
        return {"positions": len(logits), "not_finite": len(logits), "kl_mean": None, "kl_max": None,
                "top1_flips": None, "parity": None}  # fmt: skip
    return {
        "positions": len(logits), "not_finite": len(logits) - len(known), "kl_mean": float(known["kl"].mean()),
        "kl_max": float(known["kl"].max()), "top1_flips": int(known["top1_flip"].sum()),
        "parity": float(known["difference"].max() / known["largest"].max()),
    }  # fmt: skip
