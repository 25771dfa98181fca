"""Contract of one decode step of a gated delta rule layer: all that lies between its projections, as one op.

Of sequence b, with channels q|k|v of the projection, value head h reading key head h // (V / H), state S [K, W]:

    y = silu(sum_j conv_weight[:, j] x_j)              x: the window, then qkv_b; the new window is x without its oldest
    q, k = y / sqrt(sum y^2 + 1e-6) per key head, q also times K**-0.5;   v = y of the value head
    beta = sigmoid(raw_beta_b);   log_decay = -exp(A_log) softplus(raw_gate_b + dt_bias)
    S <- exp(log_decay) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q
    out = norm_weight o rsqrt(mean(o^2) + eps) silu(z_b)

``run(qkv, z, raw_beta, raw_gate, *, conv_weight, A_log, dt_bias, norm_weight, window, state, eps, slots, in_place,
policy, tap) -> (out, window, state)``

qkv         [B, 2HK + VW]           projected channels
z           [B, V, W]               output gate
raw_beta    [B, V]
raw_gate    [B, V]
conv_weight [2HK + VW, width]       conv_weight[:, width - 1] multiplies the current token
A_log       [V]                     fp32; dt_bias [V] fp32
norm_weight [W]
window      [P, width - 1, 2HK + VW] the last raw inputs, oldest first, dtype of qkv
state       [P, V, K, W]            fp32 (fp64 where qkv or the state of the policy is)
slots       [B]                     int32, the row of `window` and `state` of each sequence, on their device, no row
                                    twice; -1: no sequence, nothing is read or written and its `out` is 0. None: P = B,
                                    row b
in_place    window and state are updated where they lie, and returned; both row-major. False: new tensors of the same
            shape are returned and these stay as they are, without `slots` alone
out         [B, V, W]               dtype of qkv

Arithmetic is fp32 or better. Rounded to the dtype of qkv, as the single ops do (`causal_conv`, `gated_delta_rule`,
`gated_rms_norm`): y, beta, o, the normalised o, and out. B may be 0. Source: as of the gated delta rule; the layer is
that of transformers' `modular_qwen3_next.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.kernels.registry import Call

OP = "gdn_decode"

#: The ops that a layer asks for one after another where it does not ask for this one.
PARTS = ("causal_conv", "gated_delta_rule", "gated_rms_norm")

#: Of queries and keys; not the epsilon of the norm.
L2_NORM_EPS = 1e-6


def automatic_order(call: Call) -> tuple[str, ...]:
    return ("torch_composed",)


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (norm * norm).add_(L2_NORM_EPS).rsqrt_()


def key_heads(qkv: Tensor, state: Tensor) -> int:
    """H, of the channels 2HK + VW and the state [P, V, K, W]."""
    heads, key_dim, value_dim = state.shape[1:]
    return (qkv.shape[-1] - heads * value_dim) // (2 * key_dim)


def check_places(window: Tensor, state: Tensor, slots: Tensor | None, in_place: bool) -> None:
    """Raise InputError where `slots` and `in_place` do not go together or not with what they refer to."""
    if slots is not None and not in_place:
        raise InputError(
            "gdn_decode: slots: expected in_place=True beside them, found False; no whole pool is copied for a step"
        )
    if slots is not None and (slots.dtype != torch.int32 or slots.dim() != 1 or slots.device != state.device):
        raise InputError(
            f"gdn_decode: slots: expected one axis of int32 on {state.device}, found {tuple(slots.shape)} of "
            f"{slots.dtype} on {slots.device}"
        )
    for name, tensor in (("window", window), ("state", state)):
        if in_place and not tensor.is_contiguous():
            raise InputError(
                f"gdn_decode: {name}: expected a row-major tensor to update in place, found strides "
                f"{tuple(tensor.stride())} of shape {tuple(tensor.shape)}; pass one, or in_place=False"
            )


def placed(
    step: Callable[[tuple[Tensor, ...], Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], rows: tuple[Tensor, ...],
    window: Tensor, state: Tensor, slots: Tensor | None, in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``step(rows, window, state) -> (out, window, state)`` of the sequences that have a slot, and its results where
    `slots` and `in_place` want them. Without gradients where in place. Reads `slots`: the host waits for them."""
    check_places(window, state, slots, in_place)
    if not in_place:
        return step(rows, window, state)
    has_slot = torch.ones(rows[0].shape[0], dtype=torch.bool, device=state.device) if slots is None else slots >= 0
    places = torch.arange(len(has_slot), device=state.device) if slots is None else slots[has_slot].long()
    out, new_window, new_state = step(tuple(x[has_slot] for x in rows), window[places], state[places])
    window[places] = new_window
    state[places] = new_state.to(state.dtype)
    full = out.new_zeros(len(has_slot), *out.shape[1:])
    full[has_slot] = out
    return full, window, state


def example(
    *, batch: int = 2, key_heads: int = 2, value_heads: int = 4, key_dim: int = 16, value_dim: int = 24, width: int = 4,
    rows: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, object]:  # fmt: skip
    """Drawn inputs for tests and timings, `rows` of window and state (one for each sequence where None)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device, dtype)

    channels, rows = 2 * key_heads * key_dim + value_heads * value_dim, batch if rows is None else rows
    rates = 1.0 + 15.0 * torch.rand(value_heads, generator=generator)
    return {
        "qkv": normal(batch, channels), "z": normal(batch, value_heads, value_dim),
        "raw_beta": normal(batch, value_heads), "raw_gate": normal(batch, value_heads, scale=2.0),
        "conv_weight": normal(channels, width, scale=0.5), "A_log": rates.log().to(device),
        "dt_bias": normal(value_heads, scale=2.0, dtype=torch.float32) - 3.0,
        "norm_weight": 1.0 + normal(value_dim, scale=0.1), "window": normal(rows, width - 1, channels),
        "state": normal(rows, value_heads, key_dim, value_dim, dtype=torch.float32), "eps": 1e-6,
    }  # fmt: skip
