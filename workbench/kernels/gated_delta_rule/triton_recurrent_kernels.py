"""The recurrence of `spec` in Triton: a block of the state stays in registers from the first token to the last.

Letters: B batch, T time, S sequences, H key heads, V value heads, K key dim, W value dim. A program holds a block of
BK >= K rows and BW columns of one state as [R, C, N, D], BK = R N, BW = C D: row r N + n, column c D + d. Triton lays
the lanes of a warp along R and D, which it reads in whole lines, its warps along C and the registers of a thread along
N. So a warp has all rows of its columns, and sums over the rows need no other warp: they are taken over N in a thread
and over R between lanes.

A program reads its block of the state once and writes it once: one token moves 8 K W bytes of fp32 state for a few
operations each, and memory is all that counts. With the old state, S_new^T q = e^g S^T q + (k . q) u, so that S^T k and
S^T q are taken in one reading; only a clamp on the state, which acts between the two, needs the new state's own
product.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def limited(x, lo, hi):
    """x within [lo, hi]; NaN stays NaN, as no comparison with it is true."""
    return tl.where(x < lo, lo, tl.where(x > hi, hi, x))


@triton.jit
def over_rows(x):
    """[R, C, N, D] -> sums [C, D]."""
    return tl.sum(tl.sum(x, 2), 0)


@triton.jit
def one_token(state, q, k, q_dot_k, v, decay, beta, state_lo, state_hi, CLAMPS_STATE: tl.constexpr):
    """One token: state [R, C, N, D], q, k [R, N], v [C, D], fp32, 0 outside of K and W -> (out [C, D], state)."""
    q_rows, k_rows = q[:, None, :, None], k[:, None, :, None]
    delta = beta * (v - decay * over_rows(state * k_rows))
    if CLAMPS_STATE:
        state = limited(decay * state + k_rows * delta[None, :, None, :], state_lo, state_hi)
        return over_rows(state * q_rows), state
    out = decay * over_rows(state * q_rows) + q_dot_k * delta
    return out, decay * state + k_rows * delta[None, :, None, :]


@triton.jit
def signed_bits(x):
    """(bits of x, bits of -x) in float32 as whole numbers: above 0 in the order of the values, NaN last in one."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits, bits ^ -0x80000000


@triton.jit
def bits_of_columns(state):
    """`signed_bits` of a block [R, C, N, D], the largest of each column: two of [C, D]."""
    high, low = signed_bits(state)
    return tl.max(tl.max(high, 2), 0), tl.max(tl.max(low, 2), 0)


@triton.jit
def word_places(POINTS: tl.constexpr):
    """[2, 2, 2]: where the words of up to 4 points lie, by sign and by the number of the point; and which there are."""
    sign = tl.arange(0, 2)[:, None, None]
    point = tl.arange(0, 2)[None, :, None] + 2 * tl.arange(0, 2)[None, None, :]
    return 2 * point + sign, (point < POINTS) & (sign < 2)


@triton.jit
def words_so_far(flags, POINTS: tl.constexpr):
    """The words of all points: read at the start of a program, they are there when it needs them."""
    places, are_points = word_places(POINTS)
    return tl.load(flags + places, mask=are_points, other=0, cache_modifier=".cg")


@triton.jit
def raise_all(flags, so_far, first, second, third, POINTS: tl.constexpr):
    """Raise the words of up to three points at once (`tracing.flags`), from pairs of `signed_bits` [C, D] each.

    One reduction for all: it ends the program, and every step of it is time in which the memory rests. `so_far` is
    what `words_so_far` has read: too low at worst, so that a word which need not be raised is no atomic operation.
    """
    pairs = tl.join(
        tl.join(tl.join(first[0], first[1]), tl.join(second[0], second[1])),
        tl.join(tl.join(third[0], third[1]), tl.join(third[0], third[1])),
    )  # [C, D, sign, 2, 2]
    words = tl.max(tl.max(pairs, 1), 0)
    larger = tl.max(words, 0)[None, :, :]
    words = tl.where(larger > INFINITY_BITS, larger, tl.where(words > 0, words, 0))  # a NaN is put in both
    places, are_points = word_places(POINTS)
    tl.atomic_max(flags + places, words, mask=are_points & (words > so_far), sem="relaxed")


@triton.jit
def recurrent_kernel(
    q, k, v, log_decay, beta, initial_state, bounds, out, final_state, flags,
    gate_lo, gate_hi, state_lo, state_hi, tokens,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, gate_b, gate_t, gate_h, beta_b, beta_t, beta_h,
    V: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, ONE_TOKEN: tl.constexpr, IS_PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
    CLAMPS_GATE: tl.constexpr, CLAMPS_STATE: tl.constexpr, RAISES_FLAGS: tl.constexpr,
):  # fmt: skip
    """A program for each sequence, value head and block of columns, in this order. Strides are in elements, the last
    axis of q, k, v has stride 1.

    q, k [B, T, H, K], v [B, T, V, W], log_decay, beta [B, T, V], out [B, T, V, W] row-major, states [S, V, K, W] fp32
    row-major (initial_state of any float dtype), bounds [S + 1] int32 where IS_PACKED, flags int32 [2, 2]: the state,
    the output.
    """
    BLOCKS: tl.constexpr = (W + C * D - 1) // (C * D)
    head = tl.program_id(0) // BLOCKS % V
    sequence = (tl.program_id(0) // (BLOCKS * V)).to(tl.int64)
    rows = tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :]
    columns = tl.program_id(0) % BLOCKS * (C * D) + tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]
    has_row, has_column = rows < K, columns < W
    inside = has_row[:, None, :, None] & has_column[None, :, None, :]
    place = (sequence * V + head) * (K * W) + rows[:, None, :, None] * W + columns[None, :, None, :]
    if HAS_STATE:
        state = tl.load(initial_state + place, mask=inside, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([R, C, N, D], tl.float32)
    if RAISES_FLAGS:
        so_far = words_so_far(flags, 2)

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
        q_now = tl.load(q, mask=has_row, other=0.0).to(tl.float32)
        k_now = tl.load(k, mask=has_row, other=0.0).to(tl.float32)
        v_now = tl.load(v, mask=has_column, other=0.0).to(tl.float32)
        gate, strength = tl.load(log_decay).to(tl.float32), tl.load(beta).to(tl.float32)
        if CLAMPS_GATE:
            gate = limited(gate, gate_lo, gate_hi)
        q_dot_k = tl.sum(tl.sum(k_now * q_now, 1), 0)
        read, state = one_token(
            state, q_now, k_now, q_dot_k, v_now, tl.exp(gate), strength, state_lo, state_hi, CLAMPS_STATE
        )
        read = read.to(out.dtype.element_ty)
        tl.store(out, read, mask=has_column)
        if RAISES_FLAGS:
            high, low = signed_bits(tl.where(has_column, read, 0.0))
    else:
        if RAISES_FLAGS:
            high, low = tl.zeros([C, D], tl.int32), tl.zeros([C, D], tl.int32)
        for t in range(first, end):
            q_now = tl.load(q + t * q_t, mask=has_row, other=0.0).to(tl.float32)
            k_now = tl.load(k + t * k_t, mask=has_row, other=0.0).to(tl.float32)
            v_now = tl.load(v + t * v_t, mask=has_column, other=0.0).to(tl.float32)
            gate = tl.load(log_decay + t * gate_t).to(tl.float32)
            strength = tl.load(beta + t * beta_t).to(tl.float32)
            if CLAMPS_GATE:
                gate = limited(gate, gate_lo, gate_hi)
            q_dot_k = tl.sum(tl.sum(k_now * q_now, 1), 0)
            read, state = one_token(
                state, q_now, k_now, q_dot_k, v_now, tl.exp(gate), strength, state_lo, state_hi, CLAMPS_STATE
            )
            read = read.to(out.dtype.element_ty)
            tl.store(out + t * V * W, read, mask=has_column)
            if RAISES_FLAGS:
                now_high, now_low = signed_bits(tl.where(has_column, read, 0.0))
                high, low = tl.maximum(high, now_high), tl.maximum(low, now_low)
    tl.store(final_state + place, state, mask=inside)
    if RAISES_FLAGS:
        raise_all(flags, so_far, bits_of_columns(state), (high, low), (high, low), 2)
