"""The recurrence of `spec` token by token in PyTorch, fp32 accumulation: the decode step, and a slow prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.registry import Call
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap


def supports(call: Call) -> str | None:
    return None


def step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of every sequence.

    q, k [S, V, 1, K], v [S, V, 1, W], decay, beta [S, V, 1, 1], state [S, V, K, W] -> (out [S, V, 1, W], new state)
    """
    state = state * decay
    delta = beta * (v - k @ state)
    state = state + k.transpose(-1, -2) * delta
    return q @ state, state


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
    """See `spec`. Any policy is met: exponent form, cumsum, solver and chunk belong to the chunked form alone."""
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    compute = torch.promote_types(q.dtype, torch.promote_types(torch.float32, getattr(torch, policy.state_dtype)))
    group = value_heads // key_heads
    if group > 1:
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q, k, values = (x.to(compute).unsqueeze(3) for x in (q, k, v))  # [B, T, V, 1, K or W]
    decay = log_decay.to(compute).exp()[..., None, None]  # [B, T, V, 1, 1]
    beta = beta.to(compute)[..., None, None]

    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    sequences = batch if bounds is None else len(bounds) - 1
    if initial_state is None:
        state = torch.zeros(sequences, value_heads, key_dim, value_dim, dtype=compute, device=q.device)
    else:
        state = initial_state.to(compute)

    if tokens == 1:
        out, state = step(q[:, 0], k[:, 0], values[:, 0], decay[:, 0], beta[:, 0], state)
        out = out.transpose(1, 2)
    elif bounds is None:
        outs = []
        for t in range(tokens):
            out_t, state = step(q[:, t], k[:, t], values[:, t], decay[:, t], beta[:, t], state)
            outs.append(out_t.squeeze(2))
        out = torch.stack(outs, dim=1)
    else:
        outs, states = [], []
        for sequence, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            current = state[sequence : sequence + 1]
            for t in range(start, stop):
                out_t, current = step(q[:, t], k[:, t], values[:, t], decay[:, t], beta[:, t], current)
                outs.append(out_t.squeeze(2))
            states.append(current)
        out, state = torch.stack(outs, dim=1), torch.cat(states)
    return out.to(v.dtype), taps.observe(tap, taps.GDN_STATE, state)
