"""The arbiter: the recurrence of `spec`, token by token in float64, one line per equation."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.registry import Call
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap


def supports(call: Call) -> str | None:
    """The exact recurrence alone: no clamp, no NaN replaced, no form that loses digits on purpose."""
    if call.policy.clamps:
        sites = ", ".join(dict.fromkeys(clamp.site for clamp in call.policy.clamps))
        return f"the policy clamps {sites}, and the arbiter is the exact recurrence; use torch_chunk"
    if call.policy.nan_to_num:
        return "the policy replaces NaN, and the arbiter shows what there is; use torch_chunk"
    return spec.form_refusal(call.policy, call.tokens)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and final state in float64 from inputs of any dtype; shapes as in `spec`. No policy applies."""
    spec.check(q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // key_heads
    q, k, v, log_decay, beta = (x.double() for x in (q, k, v, log_decay, beta))
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))  # [B, T, V, K]
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    rows = [(b, 0, tokens) for b in range(batch)] if bounds is None else [
        (0, start, stop) for start, stop in itertools.pairwise(bounds)
    ]
    out = torch.full((batch, tokens, value_heads, value_dim), torch.nan, dtype=torch.float64, device=q.device)
    states = []
    for sequence, (b, start, stop) in enumerate(rows):
        if initial_state is None:
            state = torch.zeros(value_heads, key_dim, value_dim, dtype=torch.float64, device=q.device)
        else:
            state = initial_state[sequence].double()
        for t in range(start, stop):
            state = torch.exp(log_decay[b, t])[:, None, None] * state
            read = torch.einsum("vkw,vk->vw", state, k[b, t])
            delta = beta[b, t][:, None] * (v[b, t] - read)
            state = state + k[b, t][:, :, None] * delta[:, None, :]
            out[b, t] = torch.einsum("vkw,vk->vw", state, q[b, t])
        states.append(state)
    return out, torch.stack(states)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    policy: NumericsPolicy,
    tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:
    """`oracle`, rounded to the dtypes of the contract. Of the policy only the dtype of the state: see `supports`."""
    out, state = oracle(
        q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    wide = torch.promote_types(torch.float32, getattr(torch, policy.state_dtype))
    state = state.to(torch.promote_types(q.dtype, wide))
    return out.to(v.dtype), taps.observe(tap, taps.GDN_STATE, state)
