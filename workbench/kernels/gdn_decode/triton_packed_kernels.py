"""The whole region of `spec` in one Triton kernel: a program is one value head of one sequence.

It holds that head's state in registers, in the layout [R, C, N, D] of `triton_recurrent_kernels`, and works out
convolution, norms and gates while the state is on its way. Value heads that share a key head each compute its q and k.
In place, the window of those channels may not be written before all of them have read it: each counts up `arrivals`
after its reads, and the last one writes and sets the count back to 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.gated_delta_rule.triton_recurrent_kernels import (
    bits_of_columns,
    limited,
    one_token,
    raise_all,
    signed_bits,
    words_so_far,
)


@triton.jit
def inputs_of(rows, window, channels, mask, CHANNELS: tl.constexpr, PAST: tl.constexpr):
    """The PAST + 1 inputs of the convolution of some channels [n], oldest first."""
    found = ()
    for j in tl.static_range(PAST):
        found = found + (tl.load(window + j * CHANNELS + channels, mask=mask, other=0.0),)  # noqa: RUF005
    return found + (tl.load(rows + channels, mask=mask, other=0.0),)  # noqa: RUF005


@triton.jit
def taps_of(weight, channels, mask, PAST: tl.constexpr):
    """The weights of the convolution beside `inputs_of`."""
    found = ()
    for j in tl.static_range(PAST + 1):
        found = found + (tl.load(weight + channels * (PAST + 1) + j, mask=mask, other=0.0),)  # noqa: RUF005
    return found


@triton.jit
def convolved(inputs, taps, SIZE: tl.constexpr):
    """silu of the convolution of some channels, [SIZE] in the dtype of the inputs, widened to fp32 again.

    The sum over an axis of one element keeps the compiler from reading these inputs in the layout that the rows of a
    state have: every warp would load all channels, one by one.
    """
    sums = inputs[0].to(tl.float32) * taps[0].to(tl.float32)
    for j in tl.static_range(1, len(inputs)):
        sums += inputs[j].to(tl.float32) * taps[j].to(tl.float32)
    sums = tl.sum(tl.reshape(sums, [1, SIZE]), 0)
    return (sums / (1.0 + tl.exp(-sums))).to(inputs[0].dtype).to(tl.float32)


@triton.jit
def keep_inputs(inputs, window, channels, mask, CHANNELS: tl.constexpr):
    """Write the window of some channels after this token: all inputs but the oldest."""
    for j in tl.static_range(1, len(inputs)):
        tl.store(window + (j - 1) * CHANNELS + channels, inputs[j], mask=mask)


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
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, N: tl.constexpr, D: tl.constexpr, L2_EPS: tl.constexpr, SCALE: tl.constexpr,
    IN_PLACE: tl.constexpr, HAS_SLOTS: tl.constexpr, CLAMPS_RATE: tl.constexpr, CLAMPS_GATE: tl.constexpr,
    CLAMPS_STATE: tl.constexpr, RAISES_FLAGS: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """Program b V + h, for value head h of sequence b. Arguments as in `spec`, row-major but for the strides given
    (in elements) of the first axis; slots int32 [B] or None; arrivals int32 [P, H] zeros, where IN_PLACE and V > H;
    flags int32 [3, 2]: state, output of the recurrence, output of the norm. IN_PLACE: the new tensors are the old.
    """
    GROUP: tl.constexpr = V // H
    CHANNELS: tl.constexpr = 2 * H * K + V * W
    PAST: tl.constexpr = WIDTH - 1
    dtype = out.dtype.element_ty
    b = (tl.program_id(0) // V).to(tl.int64)
    head = tl.program_id(0) % V
    key_head = head // GROUP
    row, column = tl.arange(0, R * N), tl.arange(0, C * D)
    has_row, has_column = row < K, column < W
    out += (b * V + head) * W + column
    slot = b
    if HAS_SLOTS:
        slot = tl.load(slots + b).to(tl.int64)
        if slot < 0:
            tl.store(out, tl.zeros([C * D], dtype), mask=has_column)
            return

    qkv += b * qkv_b
    window += slot * (PAST * CHANNELS)
    new_window += slot * (PAST * CHANNELS)
    of_q, of_k = key_head * K + row, (H + key_head) * K + row
    of_v = 2 * H * K + head * W + column
    q_inputs = inputs_of(qkv, window, of_q, has_row, CHANNELS, PAST)
    k_inputs = inputs_of(qkv, window, of_k, has_row, CHANNELS, PAST)
    v_inputs = inputs_of(qkv, window, of_v, has_column, CHANNELS, PAST)
    q_taps = taps_of(conv_weight, of_q, has_row, PAST)
    k_taps = taps_of(conv_weight, of_k, has_row, PAST)
    v_taps = taps_of(conv_weight, of_v, has_column, PAST)
    beta = tl.load(raw_beta + b * beta_b + head).to(tl.float32)
    gate = tl.load(raw_gate + b * gate_b + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    rate = tl.load(A_log + head).to(tl.float32)
    weight = tl.load(norm_weight + column, mask=has_column, other=0.0)
    z_now = tl.load(z + b * z_b + head * W + column, mask=has_column, other=0.0)
    if RAISES_FLAGS:
        so_far = words_so_far(flags, 3)
    rows = tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :]
    columns = tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]
    place = (slot * V + head) * (K * W) + rows[:, None, :, None] * W + columns[None, :, None, :]
    inside = (rows < K)[:, None, :, None] & (columns < W)[None, :, None, :]
    old = tl.load(state + place, mask=inside, other=0.0, eviction_policy=EVICTION)

    q, k = convolved(q_inputs, q_taps, R * N), convolved(k_inputs, k_taps, R * N)
    v = tl.reshape(convolved(v_inputs, v_taps, C * D), [C, D])
    # All sums over the key channels in one reduction; a sum of four numbers that every thread has picks one of them.
    sums = tl.sum(tl.join(tl.join(q * q, k * k), tl.join(q * k, q * k)), 0)
    first, second = tl.arange(0, 2)[:, None], tl.arange(0, 2)[None, :]
    q_size = tl.rsqrt(tl.sum(tl.sum(tl.where((first == 0) & (second == 0), sums, 0.0), 1), 0) + L2_EPS) * SCALE
    k_size = tl.rsqrt(tl.sum(tl.sum(tl.where((first == 1) & (second == 0), sums, 0.0), 1), 0) + L2_EPS)
    q_dot_k = tl.sum(tl.sum(tl.where((first == 0) & (second == 1), sums, 0.0), 1), 0) * (q_size * k_size)
    q, k = tl.reshape(q, [R, N]) * q_size, tl.reshape(k, [R, N]) * k_size
    if PAST > 0:
        is_last = head % GROUP == 0
        if IN_PLACE:
            # Every thread has read: its values of q and k went through shared memory to the others just above.
            tl.debug_barrier()
            if GROUP > 1:
                # Releases those reads and acquires those of the others. Relaxed is 3 us quicker for 64 sequences, but
                # a relaxed count before the reads were used was seen to let a window be written too early.
                is_last = tl.atomic_add(arrivals + slot * H + key_head, 1, sem="acq_rel") == GROUP - 1
        keep_inputs(v_inputs, new_window, of_v, has_column, CHANNELS)
        if is_last:
            keep_inputs(q_inputs, new_window, of_q, has_row, CHANNELS)
            keep_inputs(k_inputs, new_window, of_k, has_row, CHANNELS)
            if IN_PLACE and GROUP > 1:
                tl.store(arrivals + slot * H + key_head, 0)

    beta = (1.0 / (1.0 + tl.exp(-beta))).to(dtype).to(tl.float32)
    if CLAMPS_RATE:
        rate = limited(rate, rate_lo, rate_hi)
    gate = -tl.exp(rate) * softplus(gate)
    if CLAMPS_GATE:
        gate = limited(gate, gate_lo, gate_hi)
    read, new = one_token(old, q, k, q_dot_k, v, tl.exp(gate), beta, state_lo, state_hi, CLAMPS_STATE)
    tl.store(new_state + place, new, mask=inside, eviction_policy=EVICTION)

    read = tl.reshape(read.to(dtype), [C * D])
    wide = tl.where(has_column, read.to(tl.float32), 0.0)
    normalised = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / W + eps)).to(dtype).to(tl.float32)
    z_now = z_now.to(tl.float32)
    gated = (z_now / (1.0 + tl.exp(-z_now)) * weight.to(tl.float32) * normalised).to(dtype)
    tl.store(out, gated, mask=has_column)
    if RAISES_FLAGS:
        wide, gated = tl.reshape(wide, [C, D]), tl.reshape(gated, [C, D])
        raise_all(flags, so_far, bits_of_columns(new), signed_bits(wide), signed_bits(gated), 3)
