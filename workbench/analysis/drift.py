"""The recurrent state over a long input: how large it grows, and how far from float64 it drifts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import pandas as pd
import torch
from torch import Tensor

from workbench.analysis import parity
from workbench.errors import InputError
from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.numerics import NumericsPolicy, resolve_policy

#: Policies that the drift is shown for, and the dtype of q, k, v and beta.
SETTINGS = (
    ("safe", "float32"), ("safe", "bfloat16"), ("safe", "float16"), ("fp32_cumsum", "float32"),
    ("clamp_cumsum_20", "float32"), ("five_clamps", "float32"),
)  # fmt: skip

EXACT = NumericsPolicy(state_dtype="float64")


def longest_memory(tensors: Mapping[str, Tensor]) -> int:
    """The layer whose weakest gates are weakest: where a state lasts longest and an error with it."""
    inputs = parity.kept_inputs(tensors)
    return max(inputs, key=lambda layer: inputs[layer]["log_decay"].double().mean((0, 1)).max().item())


def state_drift(
    tensors: Mapping[str, Tensor],
    layer: int,
    settings: Collection[tuple[str, str]] = SETTINGS,
    *,
    tokens: int = 100_000,
    piece: int = 2048,
) -> pd.DataFrame:
    """The inputs of one layer over and over, `tokens` tokens of them, read in pieces that hand the state on.

    `tensors` as for `parity.delta_rule_errors`. One row for each setting and piece: setting ("policy, dtype"), tokens
    read so far, `norm` of the state (Frobenius, all heads), `error`, its relative distance from the state that float64
    gives for the unrounded inputs (inf where it is not finite). Raises InputError for a layer without kept inputs.
    """
    known = parity.kept_inputs(tensors)
    if layer not in known:
        raise InputError(f"layer {layer}: expected one of {sorted(known)}, whose inputs were kept")
    if min(tokens, piece) < 1:
        raise InputError(f"tokens and piece: expected at least 1, found {tokens} and {piece}")
    short = {name: x[:1] for name, x in known[layer].items()}
    repeats = math.ceil(piece / short["q"].shape[1])
    block = {name: x.repeat(1, repeats, *[1] * (x.dim() - 2))[:, :piece] for name, x in short.items()}
    exact_block = {name: x.double() for name, x in block.items()}
    runs = [
        (f"{name}, {dtype}", resolve_policy(name), {
            key: x if key == "log_decay" else x.to(getattr(torch, dtype)) for key, x in block.items()
        })
        for name, dtype in settings
    ]  # fmt: skip
    states: list[Tensor | None] = [None] * len(runs)
    exact: Tensor | None = None
    rows = []
    with torch.inference_mode():
        for start in range(0, tokens, piece):
            exact = gated_delta_rule(**exact_block, policy=EXACT, initial_state=exact, backend="torch_chunk")[1]
            for i, (label, policy, inputs) in enumerate(runs):
                state = gated_delta_rule(**inputs, policy=policy, initial_state=states[i], backend="torch_chunk")[1]
                states[i] = state
                norm = torch.linalg.vector_norm(state.double()).item()
                rows.append((label, start + piece, norm, relative_error(state, exact)))
    return pd.DataFrame(rows, columns=["setting", "tokens", "norm", "error"])
