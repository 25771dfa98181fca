"""The whole region of `spec` in one Triton kernel: a program is one value head of one sequence.

It holds that head's state [BK, BW] in registers, which it reads before anything else and writes last but for the
window; convolution, norms and gates happen while the state is on its way. Value heads that share a key head each
compute its q and k. In place, the window of those channels may not be written before all of them have read it: each
counts up `arrivals` after its reads, and the last one writes and sets the count back to 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.gated_delta_rule.triton_recurrent_kernels import limited, one_token, raise_words_above


@triton.jit
def inputs_of(
    rows, window, channels, mask, CHANNELS: tl.constexpr, PAST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The inputs of the convolution of some channels, oldest first: [BLOCK, n], the current one in row PAST."""
    place = tl.arange(0, BLOCK)[:, None]
    past = tl.load(window + place * CHANNELS + channels[None, :], mask=(place < PAST) & mask[None, :], other=0.0)
    current = tl.load(rows + channels, mask=mask, other=0.0)
    return tl.where(place == PAST, current[None, :], past)


@triton.jit
def taps_of(weight, channels, mask, PAST: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of the convolution beside `inputs_of`, [BLOCK, n]."""
    place = tl.arange(0, BLOCK)[:, None]
    return tl.load(weight + channels[None, :] * (PAST + 1) + place, mask=(place <= PAST) & mask[None, :], other=0.0)


@triton.jit
def convolved(inputs, taps):
    """silu of the convolution of some channels, [n] in the dtype of the inputs, widened to fp32 again.

    The sum over the first axis also keeps the compiler from spreading these loads as the rows of a state are spread:
    every warp would load all channels.
    """
    sums = tl.sum(inputs.to(tl.float32) * taps.to(tl.float32), 0)
    return (sums / (1.0 + tl.exp(-sums))).to(inputs.dtype).to(tl.float32)


@triton.jit
def keep_inputs(inputs, window, channels, mask, CHANNELS: tl.constexpr, PAST: tl.constexpr, BLOCK: tl.constexpr):
    """Write the window of some channels after this token: all inputs but the oldest."""
    place = tl.arange(0, BLOCK)[:, None] - 1
    has_place = (place >= 0) & (place < PAST) & mask[None, :]
    tl.store(window + place * CHANNELS + channels[None, :], inputs, mask=has_place)


@triton.jit
def softplus(x):
    """log(1 + e^x), as exact for small e^x as for large: log(u) z / (u - 1) with u the rounded 1 + z makes good what
    rounding z away has lost."""
    z = tl.exp(-tl.abs(x))
    u = 1.0 + z
    return tl.where(x > 0.0, x, 0.0) + tl.where(u == 1.0, z, tl.log(u) * (z / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def packed_decode_kernel(
    qkv, z, raw_beta, raw_gate, conv_weight, A_log, dt_bias, norm_weight, window, state, new_window, new_state, out,
    slots, arrivals, flags, qkv_b, z_b, beta_b, gate_b, eps, rate_lo, rate_hi, gate_lo, gate_hi, state_lo, state_hi,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr,
    BW: tl.constexpr, PAST_BLOCK: tl.constexpr, L2_EPS: tl.constexpr, SCALE: tl.constexpr, IN_PLACE: tl.constexpr,
    HAS_SLOTS: tl.constexpr, CLAMPS_RATE: tl.constexpr, CLAMPS_GATE: tl.constexpr, CLAMPS_STATE: tl.constexpr,
    RAISES_FLAGS: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """Program b V + h, for value head h of sequence b. Arguments as in `spec`, row-major but for the strides given
    (in elements) of the first axis; slots int32 [B] or None; arrivals int32 [B, H] zeros, where IN_PLACE and V > H;
    flags int32 [3, 2]: state, output of the recurrence, output of the norm. IN_PLACE: the new tensors are the old.
    """
    GROUP: tl.constexpr = V // H
    CHANNELS: tl.constexpr = 2 * H * K + V * W
    PAST: tl.constexpr = WIDTH - 1
    dtype = out.dtype.element_ty
    b = (tl.program_id(0) // V).to(tl.int64)
    head = tl.program_id(0) % V
    key_head = head // GROUP
    rows, columns = tl.arange(0, BK), tl.arange(0, BW)
    has_row, has_column = rows < K, columns < W
    slot = b
    if HAS_SLOTS:
        slot = tl.load(slots + b).to(tl.int64)
        if slot < 0:
            tl.store(out + (b * V + head) * W + columns, tl.zeros([BW], dtype), mask=has_column)
            return

    qkv += b * qkv_b
    window += slot * (PAST * CHANNELS)
    new_window += slot * (PAST * CHANNELS)
    of_q, of_k = key_head * K + rows, (H + key_head) * K + rows
    of_v = 2 * H * K + head * W + columns
    q_inputs = inputs_of(qkv, window, of_q, has_row, CHANNELS, PAST, PAST_BLOCK)
    k_inputs = inputs_of(qkv, window, of_k, has_row, CHANNELS, PAST, PAST_BLOCK)
    v_inputs = inputs_of(qkv, window, of_v, has_column, CHANNELS, PAST, PAST_BLOCK)
    q_taps = taps_of(conv_weight, of_q, has_row, PAST, PAST_BLOCK)
    k_taps = taps_of(conv_weight, of_k, has_row, PAST, PAST_BLOCK)
    v_taps = taps_of(conv_weight, of_v, has_column, PAST, PAST_BLOCK)
    beta = tl.load(raw_beta + b * beta_b + head).to(tl.float32)
    gate = tl.load(raw_gate + b * gate_b + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    rate = tl.load(A_log + head).to(tl.float32)
    weight = tl.load(norm_weight + columns, mask=has_column, other=0.0)
    gate_z = tl.load(z + b * z_b + head * W + columns, mask=has_column, other=0.0)
    place = (slot * V + head) * (K * W) + rows[:, None] * W + columns[None, :]
    inside = has_row[:, None] & has_column[None, :]
    old = tl.load(state + place, mask=inside, other=0.0, eviction_policy=EVICTION)

    q, k, v = convolved(q_inputs, q_taps), convolved(k_inputs, k_taps), convolved(v_inputs, v_taps)
    q *= tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * SCALE
    k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
    if PAST > 0:
        is_last = head % GROUP == 0
        if IN_PLACE:
            tl.debug_barrier()  # every thread has read before one writes
            if GROUP > 1:
                is_last = tl.atomic_add(arrivals + b * H + key_head, 1) == GROUP - 1
        keep_inputs(v_inputs, new_window, of_v, has_column, CHANNELS, PAST, PAST_BLOCK)
        if is_last:
            keep_inputs(q_inputs, new_window, of_q, has_row, CHANNELS, PAST, PAST_BLOCK)
            keep_inputs(k_inputs, new_window, of_k, has_row, CHANNELS, PAST, PAST_BLOCK)
            if IN_PLACE and GROUP > 1:
                tl.store(arrivals + b * H + key_head, 0)

    beta = (1.0 / (1.0 + tl.exp(-beta))).to(dtype).to(tl.float32)
    if CLAMPS_RATE:
        rate = limited(rate, rate_lo, rate_hi)
    gate = -tl.exp(rate) * softplus(gate)
    if CLAMPS_GATE:
        gate = limited(gate, gate_lo, gate_hi)

    read, new = one_token(old, q, k, v, tl.exp(gate), beta, state_lo, state_hi, CLAMPS_STATE)
    tl.store(new_state + place, new, mask=inside, eviction_policy=EVICTION)
    if RAISES_FLAGS:
        raise_words_above(flags, 0, new)

    read = read.to(dtype)
    wide = read.to(tl.float32)
    normalised = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / W + eps)).to(dtype).to(tl.float32)
    gate_z = gate_z.to(tl.float32)
    gated = (gate_z / (1.0 + tl.exp(-gate_z)) * weight.to(tl.float32) * normalised).to(dtype)
    tl.store(out + (b * V + head) * W + columns, gated, mask=has_column)
    if RAISES_FLAGS:
        raise_words_above(flags, 1, read)
        raise_words_above(flags, 2, gated)
