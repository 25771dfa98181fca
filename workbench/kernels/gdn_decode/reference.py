"""The arbiter: the formula of `spec` in float64, one line per equation."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule.reference import supports as supports
from workbench.kernels.gdn_decode import spec
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap


def oracle(
    qkv: Tensor, z: Tensor, raw_beta: Tensor, raw_gate: Tensor, *, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, window: Tensor, state: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, window and state of each sequence in float64 from inputs of any dtype; no slots."""
    batch, (heads, key_dim, value_dim), keys = qkv.shape[0], state.shape[1:], spec.key_heads(qkv, state)
    qkv, z, raw_beta, raw_gate, conv_weight, A_log, dt_bias, norm_weight, window, state = (
        x.double() for x in (qkv, z, raw_beta, raw_gate, conv_weight, A_log, dt_bias, norm_weight, window, state)
    )
    x = torch.cat([window, qkv[:, None]], dim=1)
    y = torch.einsum("bjc,cj->bc", x, conv_weight)
    y = y * torch.sigmoid(y)
    q, k, v = y.split([keys * key_dim, keys * key_dim, heads * value_dim], -1)
    q, k, v = q.view(batch, keys, key_dim), k.view(batch, keys, key_dim), v.view(batch, heads, value_dim)
    q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + spec.L2_NORM_EPS) * key_dim**-0.5
    k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + spec.L2_NORM_EPS)
    q, k = (x.repeat_interleave(heads // keys, dim=1) for x in (q, k))  # [B, V, K]
    beta = torch.sigmoid(raw_beta)
    log_decay = -torch.exp(A_log) * torch.nn.functional.softplus(raw_gate + dt_bias)
    state = torch.exp(log_decay)[..., None, None] * state
    delta = beta[..., None] * (v - torch.einsum("bvkw,bvk->bvw", state, k))
    state = state + k[..., :, None] * delta[..., None, :]
    out = torch.einsum("bvkw,bvk->bvw", state, q)
    out = norm_weight * out / torch.sqrt(out.square().mean(-1, keepdim=True) + eps)
    return out * z * torch.sigmoid(z), x[:, 1:], state


def run(
    qkv: Tensor, z: Tensor, raw_beta: Tensor, raw_gate: Tensor, *, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, window: Tensor, state: Tensor, eps: float, slots: Tensor | None = None,
    in_place: bool = False, policy: NumericsPolicy, tap: Tap | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`oracle`, rounded to the dtypes of the contract. Of the policy only the dtype of the state: see `supports`."""

    def step(taken: tuple[Tensor, ...], window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, new_window, new_state = oracle(
            *taken, conv_weight=conv_weight, A_log=A_log, dt_bias=dt_bias, norm_weight=norm_weight, window=window,
            state=state, eps=eps,
        )  # fmt: skip
        return out.to(qkv.dtype), new_window.to(window.dtype), new_state

    out, new_window, new_state = spec.placed(step, (qkv, z, raw_beta, raw_gate), window, state, slots, in_place)
    wide = torch.promote_types(torch.float32, getattr(torch, policy.state_dtype))
    new_state = new_state if in_place else new_state.to(torch.promote_types(qkv.dtype, wide))
    return out, new_window, taps.observe(tap, taps.GDN_STATE, new_state)
