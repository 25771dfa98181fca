"""How far the gated delta rule of each layer is from its fp64 oracle, under each policy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.runs import label_of
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error, worst_row
from workbench.kernels.gated_delta_rule import spec
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


def output_shape(tensors: Mapping[str, Tensor]) -> tuple[int, int, int, int]:
    """[B, T, V, W] of what the gated delta rule of a layer returns, from what a trace kept."""
    return tuple(next(iter(kept_inputs(tensors).values()))["v"].shape)


def error(x: Tensor, exact: Tensor) -> float:
    """`relative_error`; inf also where `exact` itself, what the oracle made of NaN or Inf inputs, is not finite."""
    return relative_error(x, exact) if bool(torch.isfinite(exact).all()) else math.inf


def _or_missing(error: float) -> float:
    """Tables and JSON have no infinity: what is not finite has no accuracy to state."""
    return error if math.isfinite(error) else math.nan


def delta_rule_errors(
    tensors: Mapping[str, Tensor], policies: Collection[str], backend: str = "torch_chunk"
) -> pd.DataFrame:
    """Error of the op against the fp64 oracle on the very inputs that each layer had, one row per layer and
    policy. The op is called as a model calls it, its gates not checked.

    `tensors` are what a trace of one forward pass without cache kept with KEEP_DELTA_RULE_INPUTS. Columns:
    layer, policy, error_out and error_state (`relative_error`; NaN, a missing value, where the result is not
    finite, nor can be since the inputs are not), worst_row, worst_token and worst_head (see `worst_row`; the token is
    that of its own sequence; missing where the oracle is not finite), bad_out (share of the output that is not
    finite).
    """
    rows = []
    for layer, inputs in kept_inputs(tensors).items():
        exact_out, exact_state = oracle(**inputs)
        for policy in policies:
            kernels = Kernels({spec.OP: backend}, policy)
            out, state = kernels.gated_delta_rule(**inputs)
            if bool(torch.isfinite(exact_out).all()):
                (_, token, head), worst = worst_row(out, exact_out)
            else:
                token, head, worst = None, None, math.nan
            rows.append(
                {
                    "layer": layer,
                    "policy": label_of(policy),
                    "error_out": _or_missing(error(out, exact_out)),
                    "error_state": _or_missing(error(state, exact_state)),
                    "worst_row": _or_missing(worst),
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
