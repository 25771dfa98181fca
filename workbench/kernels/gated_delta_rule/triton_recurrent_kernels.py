"""The recurrence of `spec` in Triton: a block of the state stays in registers from the first token to the last.

Letters: B batch, T time, S sequences, H key heads, V value heads, K key dim, W value dim; BK >= K and BW columns of W
are the sides of the block that a program holds. A program reads its block of the state once, before everything else,
and writes it once: one token moves 8 K W bytes of fp32 state for a few operations each, and memory is all that counts.

With the old state, S_new^T q = e^g S^T q + (k . q) u, so that S^T k and S^T q are taken in one reading; only a clamp
on the state, which acts between the two, needs the new state's own product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.flags_kernels import magnitude_bits


@triton.jit
def limited(x, lo, hi):
    """x within [lo, hi]; NaN stays NaN, as no comparison with it is true."""
    return tl.where(x < lo, lo, tl.where(x > hi, hi, x))


@triton.jit
def one_token(state, q, k, v, decay, beta, state_lo, state_hi, CLAMPS_STATE: tl.constexpr):
    """One token: state [BK, BW], q, k [BK], v [BW], all fp32 and 0 outside of K and W -> (out [BW], new state)."""
    read = decay * tl.sum(state * k[:, None], 0)
    delta = beta * (v - read)
    if CLAMPS_STATE:
        state = limited(decay * state + k[:, None] * delta[None, :], state_lo, state_hi)
        return tl.sum(state * q[:, None], 0), state
    out = decay * tl.sum(state * q[:, None], 0) + tl.sum(k * q, 0) * delta
    return out, decay * state + k[:, None] * delta[None, :]


@triton.jit
def raise_words_above(words, point: tl.constexpr, x):
    """`flags_kernels.raise_words` for many programs of one point: only what is above the word goes to it.

    Thousands of programs would wait in line for one address; most find the word as high already. A word read too early
    is too low, never too high, so the comparison spares writes and loses none.
    """
    high, low = magnitude_bits(x)
    if len(x.shape) == 2:  # axis by axis: a reshape would take the whole block through shared memory
        high, low = tl.max(high, 0), tl.max(low, 0)
    high, low = tl.max(high, 0), tl.max(low, 0)
    place = words + 2 * point
    tl.atomic_max(place, high, mask=high > tl.load(place, cache_modifier=".cg"), sem="relaxed")
    tl.atomic_max(place + 1, low, mask=low > tl.load(place + 1, cache_modifier=".cg"), sem="relaxed")


@triton.jit
def recurrent_kernel(
    q, k, v, log_decay, beta, initial_state, bounds, out, final_state, flags,
    gate_lo, gate_hi, state_lo, state_hi, tokens,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, gate_b, gate_t, gate_h, beta_b, beta_t, beta_h,
    V: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    ONE_TOKEN: tl.constexpr, IS_PACKED: tl.constexpr, HAS_STATE: tl.constexpr, CLAMPS_GATE: tl.constexpr,
    CLAMPS_STATE: tl.constexpr, RAISES_FLAGS: tl.constexpr,
):  # fmt: skip
    """A program for each sequence, value head and block of columns, in this order. Strides are in elements, the last
    axis of q, k, v has stride 1.

    q, k [B, T, H, K], v [B, T, V, W], log_decay, beta [B, T, V], out [B, T, V, W] row-major, states [S, V, K, W] fp32
    row-major (initial_state of any float dtype), bounds [S + 1] int32 where IS_PACKED, flags int32 [2, 2]: the state,
    the output.
    """
    BLOCKS: tl.constexpr = (W + BW - 1) // BW
    columns = tl.program_id(0) % BLOCKS * BW + tl.arange(0, BW)
    rows = tl.arange(0, BK)
    head = tl.program_id(0) // BLOCKS % V
    sequence = (tl.program_id(0) // (BLOCKS * V)).to(tl.int64)
    has_column, has_row = columns < W, rows < K
    inside = has_row[:, None] & has_column[None, :]
    place = (sequence * V + head) * (K * W) + rows[:, None] * W + columns[None, :]
    if HAS_STATE:
        state = tl.load(initial_state + place, mask=inside, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([BK, BW], tl.float32)

    if IS_PACKED:
        first, end = tl.load(bounds + sequence).to(tl.int64), tl.load(bounds + sequence + 1).to(tl.int64)
        batch = sequence * 0
    else:
        first, end = sequence * 0, sequence * 0 + tokens
        batch = sequence
    q += batch * q_b + head // GROUP * q_h + rows
    k += batch * k_b + head // GROUP * k_h + rows
    v += batch * v_b + head * v_h + columns
    log_decay += batch * gate_b + head * gate_h
    beta += batch * beta_b + head * beta_h
    out += (batch * tokens * V + head) * W + columns
    if ONE_TOKEN:
        q_t0 = tl.load(q, mask=has_row, other=0.0).to(tl.float32)
        k_t0 = tl.load(k, mask=has_row, other=0.0).to(tl.float32)
        v_t0 = tl.load(v, mask=has_column, other=0.0).to(tl.float32)
        gate = tl.load(log_decay).to(tl.float32)
        if CLAMPS_GATE:
            gate = limited(gate, gate_lo, gate_hi)
        read, state = one_token(
            state, q_t0, k_t0, v_t0, tl.exp(gate), tl.load(beta).to(tl.float32), state_lo, state_hi, CLAMPS_STATE
        )
        read = read.to(out.dtype.element_ty)
        tl.store(out, read, mask=has_column)
        if RAISES_FLAGS:
            raise_words_above(flags, 1, read)
    else:
        for t in range(first, end):
            q_t0 = tl.load(q + t * q_t, mask=has_row, other=0.0).to(tl.float32)
            k_t0 = tl.load(k + t * k_t, mask=has_row, other=0.0).to(tl.float32)
            v_t0 = tl.load(v + t * v_t, mask=has_column, other=0.0).to(tl.float32)
            gate = tl.load(log_decay + t * gate_t).to(tl.float32)
            if CLAMPS_GATE:
                gate = limited(gate, gate_lo, gate_hi)
            strength = tl.load(beta + t * beta_t).to(tl.float32)
            read, state = one_token(state, q_t0, k_t0, v_t0, tl.exp(gate), strength, state_lo, state_hi, CLAMPS_STATE)
            read = read.to(out.dtype.element_ty)
            tl.store(out + t * V * W, read, mask=has_column)
            if RAISES_FLAGS:
                raise_words_above(flags, 1, read)
    tl.store(final_state + place, state, mask=inside)
    if RAISES_FLAGS:
        raise_words_above(flags, 0, state)
