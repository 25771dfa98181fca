"""How far two results are apart: the gated delta rule against its fp64 oracle, logits against logits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.errors import InputError
from workbench.kernels import gated_delta_rule
from workbench.kernels.gated_delta_rule.reference import oracle

#: Tap points of one layer that hold the inputs of the op, by the name of the argument.
ARGUMENT_TAPS = {
    "q": taps.GDN_Q,
    "k": taps.GDN_K,
    "v": taps.GDN_V,
    "log_decay": taps.GDN_LOG_DECAY,
    "beta": taps.GDN_BETA,
}
#: What to give `workbench.trace(model, keep=...)` for `delta_rule_errors` and `gates.gate_table`.
KEEP_DELTA_RULE_INPUTS = tuple(f"*.{tap}" for tap in ARGUMENT_TAPS.values())

#: Headings of the columns of `worst_errors` where people read them.
ERROR_HEADINGS = {
    "error_out": "error of the output",
    "error_state": "error of the state",
    "layer": "worst layer",
    "bad_out": "share of output not finite",
}


def relative_error(x: Tensor, reference: Tensor) -> float:
    """norm(x - reference) / norm(reference), Frobenius, in float64; 0 for 0 / 0, NaN where `x` is not finite.

    Raises InputError for different shapes and for a reference that is not finite.
    """
    if x.shape != reference.shape:
        raise InputError(f"relative error: expected shape {tuple(reference.shape)}, found {tuple(x.shape)}")
    x, reference = x.double(), reference.double()
    if not torch.isfinite(reference).all():
        raise InputError("relative error: expected a finite reference, found NaN or Inf in it")
    if not torch.isfinite(x).all():
        return math.nan
    difference, size = (
        torch.linalg.vector_norm(x - reference).item(),
        torch.linalg.vector_norm(reference).item(),
    )
    return 0.0 if difference == 0.0 else difference / size if size else math.inf


def worst_row(x: Tensor, reference: Tensor) -> tuple[float, tuple[int, ...] | None]:
    """Largest `relative_error` of one row (last axis) and its index; rows of a zero reference are left out.

    For information beside `relative_error`: a single small row reaches 1e-2 on correct code. (NaN, index of
    the first such row) where `x` is not finite, (0.0, None) where no row can be judged.
    """
    x, reference = x.double(), reference.double()
    bad = (~torch.isfinite(x)).any(-1)
    if bad.any():
        return math.nan, tuple(bad.nonzero()[0].tolist())
    size = torch.linalg.vector_norm(reference, dim=-1)
    ratio = torch.where(size > 0, torch.linalg.vector_norm(x - reference, dim=-1) / size, 0.0)
    if not ratio.any():
        return 0.0, None
    flat = int(ratio.flatten().argmax())
    return ratio.max().item(), tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), ratio.shape))


def logit_parity(logits: Tensor, reference: Tensor) -> float:
    """max |logits - reference| / max |reference|, in float64; NaN where `logits` is not finite."""
    if logits.shape != reference.shape:
        raise InputError(
            f"logit parity: expected shape {tuple(reference.shape)}, found {tuple(logits.shape)}"
        )
    if not torch.isfinite(logits).all():
        return math.nan
    reference = reference.double()
    return ((logits.double() - reference).abs().max() / reference.abs().max()).item()


def kept_inputs(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Layer -> arguments of its gated delta rule, from what a trace kept with KEEP_DELTA_RULE_INPUTS."""
    layers = sorted({layer for layer, tap in map(taps.split_name, tensors) if tap in ARGUMENT_TAPS.values()})
    if not layers:
        raise InputError(
            "parity: expected the kept inputs of the gated delta rule, found none; trace a model that has "
            f"linear layers with keep={list(KEEP_DELTA_RULE_INPUTS)}"
        )
    return {
        layer: {argument: tensors[taps.full_name(layer, tap)] for argument, tap in ARGUMENT_TAPS.items()}
        for layer in layers
    }


def delta_rule_errors(
    tensors: Mapping[str, Tensor], policies: Collection[str], backend: str = "torch_chunk"
) -> pd.DataFrame:
    """Error of the op against the fp64 oracle on the very inputs that each layer had, one row per layer and
    policy.

    `tensors` are what a trace of one forward pass without cache kept with KEEP_DELTA_RULE_INPUTS. Columns:
    layer, policy, error_out and error_state (`relative_error`; NaN where not finite), worst_row,
    worst_token, worst_head (see `worst_row`; sequence 0 has its token number, later ones too), bad_out
    (share of the output that is not finite).
    """
    rows = []
    for layer, inputs in kept_inputs(tensors).items():
        exact_out, exact_state = oracle(**inputs)
        for policy in policies:
            out, state = gated_delta_rule(**inputs, policy=policy, backend=backend)
            worst, index = worst_row(out, exact_out)
            _, token, head = index if index is not None else (None, None, None)
            rows.append(
                {
                    "layer": layer,
                    "policy": policy,
                    "error_out": relative_error(out, exact_out),
                    "error_state": relative_error(state, exact_state),
                    "worst_row": worst,
                    "worst_token": token,
                    "worst_head": head,
                    "bad_out": (~torch.isfinite(out)).double().mean().item(),
                }
            )
    return pd.DataFrame(rows).astype({"worst_token": "Int64", "worst_head": "Int64"})


def worst_errors(errors: pd.DataFrame) -> pd.DataFrame:
    """`delta_rule_errors` by policy, in the order given: largest errors over layers, the layer, share not
    finite.

    An error is NaN as soon as one layer's is: a result that is not finite has no accuracy.
    """
    rows = []
    for policy, group in errors.groupby("policy", sort=False):
        both = group[["error_out", "error_state"]]
        finite = bool(both.notna().all(axis=None))
        layer = group.loc[both.max(axis=1).idxmax() if finite else both.isna().any(axis=1).idxmax(), "layer"]
        row = {name: both[name].max(skipna=False) for name in both}
        rows.append({"policy": policy, **row, "layer": int(layer), "bad_out": group["bad_out"].max()})
    return pd.DataFrame(rows)
