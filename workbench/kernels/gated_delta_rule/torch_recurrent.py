"""The recurrence of `spec` token by token in PyTorch, fp32 accumulation: the decode step, and a slow prefill."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.registry import Call
from workbench.numerics import CHUNK_SITES, Clamp, NumericsPolicy
from workbench.taps import Tap


def supports(call: Call) -> str | None:
    """For two tokens and more, the policies that a recurrence can honour; for one, all: chunks bind nothing there."""
    if call.tokens == 1:
        return None
    for site in CHUNK_SITES:
        if call.policy.clamp(site, "prefill") is not None:
            return f"the policy clamps {site}, which only the chunked form has; use torch_chunk"
    return spec.form_refusal(call.policy, call.tokens)


def step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor]:
    """One token of every sequence and value head, P pairs of them; `clamp` limits the new state.

    q, k [P, 1, K], v [P, 1, W], decay, beta [P, 1, 1], state [P, K, W] -> (out [P, 1, W], new state)
    """
    state = state * decay
    delta = (v - torch.bmm(k, state)) * beta
    state = spec.limited(torch.addcmul(state, k.transpose(1, 2), delta), clamp)
    return torch.bmm(q, state), state


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
    """See `spec`. Exponent form, cumsum, solver and chunk belong to the chunked form and bind nothing here: `supports`
    refuses the choices of them that would show in the result."""
    batch, tokens, key_heads, key_dim = q.shape
    phase = spec.phase_of(tokens)
    log_decay, clamp = spec.limited_gates(log_decay, policy, phase), policy.clamp("state", phase)
    value_heads, value_dim = v.shape[2:]
    state_dtype = torch.promote_types(torch.float32, getattr(torch, policy.state_dtype))
    compute = torch.promote_types(q.dtype, state_dtype)
    group = value_heads // key_heads
    if group > 1:
        q, k = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (q, k))
    pairs = batch * value_heads
    rows = [x if x.dtype == compute else x.to(compute) for x in (q, k, v, log_decay, beta)]
    if tokens > 1:  # [T pairs, 1, ...], so that a token is one slice: packed sequences have B = 1
        rows = [x.transpose(0, 1) for x in rows]
    q, k, values, decay, beta = (x.reshape(tokens * pairs, 1, -1) for x in rows)
    decay = decay.exp()
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    sequences = batch if bounds is None else len(bounds) - 1
    if initial_state is None:
        state = torch.zeros(sequences, value_heads, key_dim, value_dim, dtype=compute, device=q.device)
    else:
        state = initial_state.to(compute)

    if tokens == 1 and sequences == batch:  # a packed row may hold empty sequences besides
        out, state = step(q, k, values, decay, beta, state.reshape(pairs, key_dim, value_dim), clamp)
    else:
        outs, states = [], []
        for sequence, part in enumerate([(0, tokens)] if bounds is None else itertools.pairwise(bounds)):
            current = (state if bounds is None else state[sequence]).reshape(pairs, key_dim, value_dim)
            for t in range(*part):
                here = slice(t * pairs, (t + 1) * pairs)
                out, current = step(q[here], k[here], values[here], decay[here], beta[here], current, clamp)
                outs.append(out)
            states.append(current)
        out, state = torch.cat(outs), torch.cat(states)
    out = out.view(tokens, batch, value_heads, value_dim).transpose(0, 1)
    state = state.view(sequences, value_heads, key_dim, value_dim)
    return spec.without_nan(policy, out.to(v.dtype), taps.observe(tap, taps.GDN_STATE, state))
