"""The two kernels behind `triton_chunk`: what a chunk needs no state for, and the scan of chunks.

For a chunk of C rows with cumulative log decay G, D_ij = exp(G_i - G_j) for j <= i and 0 above, and S entering:

    systems:  T = (I + strictly lower part of beta_i (k_i . k_j) D_ij)^-1 diag(beta)
              R = (q k^T) D T,   E = diag(e^{G_C - G}) T
    scan:     r = v - e^G S k,   o = e^G S q + R r,   S <- e^{G_C} S + k^T E r

U = T v and W = T e^G k of the textbook form are never formed: T r = U - W S, for one product with T instead of two
and nothing of size [C, K] in memory. Nor is T r rounded for a product with (q k^T) D: R is multiplied out before, to
more digits. Where keys repeat, the sum over T r telescopes, and its rounding would be most of the error.

Where CHAINED, a kernel is started while the one before it drains, and waits for its results just before it reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workbench.kernels import flags_kernels, triton_runs
from workbench.kernels.gated_delta_rule import triton_chunk_stages
from workbench.kernels.gated_delta_rule.triton_chunk_stages_kernels import show

#: Rows of the diagonal blocks that are inverted in one batch, before they are merged in the whole matrix.
LEAF = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)
#: Columns of the table of chunks, and of segments: see `triton_chunk.Layout`.
CHUNK_COLUMNS, SEGMENT_COLUMNS = tl.constexpr(3), tl.constexpr(9)

INTERPRETED = tl.constexpr(triton_runs.is_interpreted())
#: What SEEN says: see `triton_chunk_stages`.
TENSORS, RANGES = tl.constexpr(triton_chunk_stages.TENSORS), tl.constexpr(triton_chunk_stages.RANGES)
NUMBERS = tl.constexpr(triton_chunk_stages.NUMBERS)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b in fp32; under the precision `float16` of operands rounded to that."""
    if PRECISION == "float16":
        a, b = a.to(tl.float16), b.to(tl.float16)
    if INTERPRETED:  # Triton's interpreter would multiply the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32" if PRECISION == "float16" else PRECISION)


@triton.jit
def merged(inverse, lower, half: tl.constexpr, rows, columns, PRECISION: tl.constexpr):
    """Inverse of the unit lower triangular diagonal blocks of 2 `half` rows, given that of those of `half` rows.

    inverse, lower [..., n, n] with `rows` and `columns` their indices. With N the part of `lower` that the larger
    blocks have beside the smaller, X - X N X: exact, since N X N = 0 in each of them.
    """
    beside = (rows // (2 * half) == columns // (2 * half)) & (rows // half > columns // half)
    right = product(tl.where(beside, lower, tl.zeros_like(lower)), inverse, PRECISION)
    return inverse - product(inverse, right, PRECISION)


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr, LEAVES: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular `lower` [C, C] in fp32, C a multiple of LEAF by a power of two.

    No power of `lower` is formed: its entries would reach 1e15 where those of the inverse are at most 1. LEAVES and
    PRECISION are those of the products up to LEAF rows and beyond.
    """
    count: tl.constexpr = C // LEAF
    i = tl.arange(0, LEAF)[None, :, None]
    j = tl.arange(0, LEAF)[None, None, :]
    block = tl.arange(0, count)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    leaves = tl.sum(tl.where(on_diagonal, tl.reshape(lower, [count, LEAF, count, LEAF]), 0.0), axis=2)
    if PRECISION == "float16":
        lower = lower.to(tl.float16)
    inverse = tl.where(i == j, 1.0, tl.where((i // 2 == j // 2) & (i > j), -leaves, 0.0))  # blocks of two rows
    inverse = merged(inverse, leaves, 2, i, j, LEAVES)
    inverse = merged(inverse, leaves, 4, i, j, LEAVES)
    inverse = merged(inverse, leaves, 8, i, j, LEAVES)
    whole = tl.reshape(tl.where(on_diagonal, inverse[:, :, None, :], 0.0), [C, C])
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if C > 16:
        whole = merged(whole, lower, 16, rows, columns, PRECISION)
    if C > 32:
        whole = merged(whole, lower, 32, rows, columns, PRECISION)
    if C > 64:
        whole = merged(whole, lower, 64, rows, columns, PRECISION)
    return whole


@triton.jit
def place_of_chunk(chunk, chunks_ptr, chunks_of_row, tokens, C: tl.constexpr):
    """(batch row, first token, tokens) of a chunk: by the table, or for rows of equal length (`chunks_of_row` > 0) by
    arithmetic, which waits for no memory."""
    if chunks_of_row > 0:
        batch = chunk // chunks_of_row
        first = (chunk - batch * chunks_of_row) * C
        count = tl.minimum(C, tokens - first)
    else:
        batch = tl.load(chunks_ptr + chunk * CHUNK_COLUMNS)
        first = tl.load(chunks_ptr + chunk * CHUNK_COLUMNS + 1)
        count = tl.load(chunks_ptr + chunk * CHUNK_COLUMNS + 2)
    return batch.to(tl.int64), first.to(tl.int64), count


@triton.jit(do_not_specialize=["chunks_of_row", "tokens"])
def gates(
    g_ptr, chunks_ptr, cumsum_ptr, factor_ptr, chunks_of_row, tokens, g_batch, g_token, g_head,
    V: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, WIDE_SUM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """G in base 2 as two fp32 numbers [N, V, 2, C], and e^G [N, V, C]; a program is (chunk, HEADS heads).

    Rows past the end of a sequence have no decay. Differences of sums that are rounded to fp32 lose the small gates
    beside large ones: where WIDE_SUM the second number holds what rounding takes from the sum in fp64, else zero.
    """
    if CHAINED:
        gdc_launch_dependents()
    batch, first, count = place_of_chunk(tl.program_id(0), chunks_ptr, chunks_of_row, tokens, C)
    chunk = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, C)[:, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    gate = tl.load(
        g_ptr + batch * g_batch + (first + row) * g_token + head * g_head, mask=(row < count) & (head < V), other=0.0
    )  # fmt: skip
    if WIDE_SUM:
        wide = tl.cumsum(gate.to(tl.float64) * LOG2_E, 0)
        total = wide.to(tl.float32)
        rest = (wide - total.to(tl.float64)).to(tl.float32)
    else:
        wide = tl.cumsum(gate.to(tl.float32), 0) * LOG2_E
        total, rest = wide, wide * 0.0
    place = (chunk * V + head) * C + row
    tl.store(cumsum_ptr + place + (chunk * V + head) * C, total, mask=head < V)
    tl.store(cumsum_ptr + place + (chunk * V + head) * C + C, rest, mask=head < V)
    tl.store(factor_ptr + place, tl.exp2(total), mask=head < V)


@triton.jit(do_not_specialize=["chunks_of_row", "tokens"])
def systems(
    q_ptr, k_ptr, beta_ptr, chunks_ptr, cumsum_ptr, system_ptr, seen_ptr, inverse_ptr, chunks_of_row, tokens,
    q_batch, q_token, q_head, k_batch, k_token, k_head, beta_batch, beta_token, beta_head,
    V: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    LEAVES: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, IS_BULK: tl.constexpr, CHAINED: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """E and R [N, V, 2, C, C] in the dtype of q; a program is (value head, chunk).

    Rows past the end of a sequence have keys, queries and beta of zero: they write nothing. All loads are issued before
    the first product: the copy engine, which is waited for load by load, is slower here. SEEN: debug build, see
    `triton_chunk_stages.Watch.for_systems` for what goes to `seen` and `inverse`.
    """
    head, chunk = tl.program_id(0), tl.program_id(1)
    key_head = head // GROUP
    batch, first, count = place_of_chunk(chunk, chunks_ptr, chunks_of_row, tokens, C)
    place = chunk.to(tl.int64) * V + head
    row, channel = tl.arange(0, C), tl.arange(0, BK)
    i, j = row[:, None], row[None, :]
    is_entry = (i < count) & (channel < K)[None, :]
    k_rows = k_ptr + batch * k_batch + key_head * k_head + first * k_token
    q_rows = q_ptr + batch * q_batch + key_head * q_head + first * q_token
    betas = beta_ptr + batch * beta_batch + head * beta_head + first * beta_token
    cumsum = cumsum_ptr + place * 2 * C
    k = tl.load(k_rows + (i * k_token + channel[None, :]), mask=is_entry, other=0.0)
    q = tl.load(q_rows + (i * q_token + channel[None, :]), mask=is_entry, other=0.0)
    beta_here = tl.load(betas + i * beta_token, mask=i < count, other=0.0).to(tl.float32)
    beta_there = tl.load(betas + j * beta_token, mask=j < count, other=0.0).to(tl.float32)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    total, rest = tl.load(cumsum + i), tl.load(cumsum + C + i)
    difference = (total - tl.load(cumsum + j)) + (rest - tl.load(cumsum + C + j))
    to_end = tl.exp2((tl.load(cumsum + C - 1) - total) + (tl.load(cumsum + 2 * C - 1) - rest))  # [C, 1]
    decay = tl.exp2(tl.where(i >= j, difference, float("-inf")))
    score = product(q, tl.trans(k), DOT) * decay
    if SEEN:
        each: tl.constexpr = C * C if SEEN == TENSORS else NUMBERS
        seen, apart = seen_ptr + place * each, tl.num_programs(1).to(tl.int64) * V * each
        entry, is_in = i * C + j, i + j >= 0
        show(seen, entry, decay, is_in, SEEN)
        show(seen + 3 * apart, entry, score, is_in, SEEN)
    if PRECISION == "float16":
        score = score.to(tl.float16)  # half the registers until it is needed
    lower = tl.where(i > j, product(k, tl.trans(k), DOT) * decay * beta_here, 0.0)
    inverse = unit_lower_inverse(lower, C, LEAVES, PRECISION)
    if SEEN:
        show(seen + apart, entry, lower, is_in, SEEN)
        show(seen + 2 * apart, entry, inverse, is_in, SEEN)
        tl.store(inverse_ptr + place * C * C + entry, inverse)
    system = inverse * beta_there
    readout = product(score, system, PRECISION)
    system = system * to_end
    if IS_BULK:
        system_ptr.store([(place * 2 * C).to(tl.int32), 0], system.to(q.dtype))
        system_ptr.store([(place * 2 * C).to(tl.int32) + C, 0], readout.to(q.dtype))
    else:
        square = system_ptr + place * 2 * C * C + (i * C + j)
        tl.store(square, system.to(q.dtype))
        tl.store(square + C * C, readout.to(q.dtype))


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """(x over a power of two of its row, in `dtype`; the powers [rows]) in fp16, else x itself and ones.

    A state may be larger than fp16 holds. Its rows are independent, so that each is brought to [1, 4) exactly.
    """
    power = tl.full([x.shape[0]], 1.0, tl.float32)
    if dtype == tl.float16:
        bits = tl.minimum(tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
        power = bits.to(tl.float32, bitcast=True)
        x = x * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
    return x.to(dtype), power


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """The smaller of two numbers, NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scan(
    q_ptr, k_ptr, v_ptr, system_ptr, factor_ptr, decay_ptr, segments_ptr, initial_ptr, ends_ptr,
    transition_ptr, out_ptr, state_ptr, words_ptr, seen_ptr, places,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
    V: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, HAS_INITIAL: tl.constexpr, IS_AHEAD: tl.constexpr,
    IS_BULK: tl.constexpr, HAS_FLAGS: tl.constexpr, CHAINED: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """One segment of one value head, BV value channels of it: chunk after chunk, the state in registers, transposed.

    S^T [BV, BK], r^T, (E r)^T and o^T [BV, C]: each is the left operand of the next product, which tensor cores take
    from the registers where the last one left it.

    IS_AHEAD False writes `out`, and the state after the last segment of each sequence; it reads the state before any
    segment but the first of a sequence from `ends`. True writes, before that state is known, what it needs: the state
    at the end of the segment if it began from nothing, the first of a sequence from its own, into ends [M, V, K, W];
    and in further programs, with v = 0 and a state of I, the transition [M, V, K, K] of the state over the segment.
    HAS_FLAGS raises the words (`tracing.flags`) of the state, row 0, and of `out`, row 1. SEEN: debug build, see
    `triton_chunk_stages.Watch.for_scan` for what goes to `seen`; `places` is N V.
    """
    block, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    here = segments_ptr + segment * SEGMENT_COLUMNS
    number = tl.load(here).to(tl.int64)
    chunk = tl.load(here + 1).to(tl.int64)
    chunks = tl.load(here + 2)
    batch = tl.load(here + 3).to(tl.int64)
    first = tl.load(here + 4).to(tl.int64)
    tokens = tl.load(here + 5)
    entering = tl.load(here + 6).to(tl.int64)
    leaving = tl.load(here + 7).to(tl.int64)
    key_head = head // GROUP
    dtype: tl.constexpr = k_ptr.dtype if IS_BULK else k_ptr.dtype.element_ty

    row, channel = tl.arange(0, C), tl.arange(0, BK)
    is_channel = channel < K
    # Ahead E alone, else R below it: one product gives what is written and what the output has of it.
    SQUARES: tl.constexpr = 1 if IS_AHEAD else 2
    square = tl.arange(0, SQUARES * C)[:, None] * C + row[None, :]
    is_transition = False
    width = W
    if IS_AHEAD:
        is_transition = block >= tl.cdiv(W, BV)
        if is_transition:
            if entering >= 0:
                if CHAINED:
                    gdc_wait()
                    gdc_launch_dependents()
                return
            block -= tl.cdiv(W, BV)
            width = K
    column = block * BV + tl.arange(0, BV)
    is_column = column < width
    in_state = is_column[:, None] & is_channel[None, :]
    in_chunk = is_column[:, None] & (row < C)[None, :]
    place_in_state = channel[None, :] * width + column[:, None]

    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    state = tl.zeros([BV, BK], tl.float32)
    if is_transition:
        state = tl.where(column[:, None] == channel[None, :], 1.0, state)
    elif entering >= 0:
        if HAS_INITIAL:
            state = tl.load(initial_ptr + (entering * V + head) * K * W + place_in_state, mask=in_state, other=0.0)
    elif not IS_AHEAD:
        state = tl.load(ends_ptr + ((number - 1) * V + head) * K * W + place_in_state, mask=in_state, other=0.0)

    v_row = batch.to(tl.int32)
    if is_transition:
        v_row = -1  # outside of v the copy engine gives zeros
    k_rows = k_ptr if IS_BULK else k_ptr + batch * k_batch + key_head * k_head
    q_rows = q_ptr if IS_BULK else q_ptr + batch * q_batch + key_head * q_head
    v_rows = v_ptr if IS_BULK else v_ptr + batch * v_batch + head * v_head
    out_rows = out_ptr if IS_BULK else out_ptr + batch * out_batch + head * out_head
    high, low = tl.zeros([BV, 4], tl.float32), tl.zeros([BV, 4], tl.float32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        place = (chunk + step) * V + head
        token = first + step * C
        is_row = row < tokens - step * C
        if IS_BULK:
            at = token.to(tl.int32)
            k = tl.reshape(k_rows.load([batch.to(tl.int32), at, key_head * K]), [C, BK])
            v = tl.reshape(v_rows.load([v_row, at, head * W + block * BV]), [C, BV])
            system = system_ptr.load([(place * 2 * C).to(tl.int32), 0])
            since_start = tl.reshape(factor_ptr.load([place.to(tl.int32), 0]), [C])
        else:
            is_key = is_row[:, None] & is_channel[None, :]
            is_value = is_row[:, None] & is_column[None, :]
            k = tl.load(k_rows + token * k_token + (row[:, None] * k_token + channel[None, :]), mask=is_key, other=0.0)
            v = tl.load(
                v_rows + token * v_token + (row[:, None] * v_token + column[None, :]),
                mask=is_value & (not is_transition), other=0.0,
            )  # fmt: skip
            system = tl.load(system_ptr + place * 2 * C * C + square)
            since_start = tl.load(factor_ptr + place * C + row)
        over_chunk = tl.load(decay_ptr + place * C + C - 1)

        narrow, power = narrowed(state, dtype)
        known = product(narrow, tl.trans(k), DOT) * power[:, None]
        rest, size = narrowed(tl.trans(v).to(tl.float32) - since_start[None, :] * known, dtype)
        written = product(rest, tl.trans(system), DOT) * size[:, None]
        if not IS_AHEAD:
            if IS_BULK:
                q = tl.reshape(q_rows.load([batch.to(tl.int32), at, key_head * K]), [C, BK])
            else:
                q = tl.load(
                    q_rows + token * q_token + (row[:, None] * q_token + channel[None, :]), mask=is_key, other=0.0
                )  # fmt: skip
            inter = product(narrow, tl.trans(q), DOT) * power[:, None] * since_start[None, :]
            if SEEN == TENSORS:
                show(seen_ptr + place * C * W, row[None, :] * W + column[:, None], inter, in_chunk, SEEN)
            if SEEN == RANGES:
                seen = seen_ptr + (place * tl.num_programs(0) + block) * NUMBERS
                show(seen, row[None, :], inter, in_chunk, SEEN)
            written, intra = tl.split(tl.permute(tl.reshape(written, [BV, 2, C]), [0, 2, 1]))
            wide = inter + intra
            if HAS_FLAGS:
                held = tl.reshape(wide, [BV, C // 8, 4, 2])  # a thread of a product holds these two axes: no exchange
                high = larger(high, tl.reduce(tl.reduce(held, 3, larger), 1, larger))
                low = smaller(low, tl.reduce(tl.reduce(held, 3, smaller), 1, smaller))
            out = tl.trans(wide.to(dtype))
            if IS_BULK:
                out_rows.store([batch.to(tl.int32), at, head * W + block * BV], tl.reshape(out, [1, C, BV]))
            else:
                tl.store(
                    out_rows + token * out_token + (row[:, None] * out_token + column[None, :]), out, mask=is_value
                )
        written, size = narrowed(written, dtype)
        state = state * over_chunk + product(written, k, DOT) * size[:, None]
        if SEEN == TENSORS:
            show(seen_ptr + places * C * W + place * K * W, place_in_state, state, in_state, SEEN)
        if SEEN == RANGES:
            seen = seen_ptr + ((places + place) * tl.num_programs(0) + block) * NUMBERS
            show(seen, place_in_state, state, in_state, SEEN)
    if IS_AHEAD:
        if is_transition:
            tl.store(transition_ptr + (number * V + head) * K * K + place_in_state, state, mask=in_state)
        else:
            tl.store(ends_ptr + (number * V + head) * K * W + place_in_state, state, mask=in_state)
    elif leaving >= 0:
        tl.store(state_ptr + (leaving * V + head) * K * W + place_in_state, state, mask=in_state)
        if HAS_FLAGS:
            if tl.load(here + 8) != 0:
                flags_kernels.raise_words(words_ptr, 0, state)
    if HAS_FLAGS:
        # Of what was rounded the largest is the largest rounded. No bits of a sign: of a zero or a NaN.
        high = high.to(dtype).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        low = low.to(dtype).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(words_ptr + 2, tl.max(tl.max(high, 1), 0), sem="relaxed")
        tl.atomic_max(words_ptr + 3, tl.max(tl.max(low, 1), 0), sem="relaxed")


@triton.jit
def join_segments(
    ends_ptr, transition_ptr, spans_ptr,
    V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """ends [M, V, K, W] in place, from the second segment of a sequence to the last but one: S_r <- b_r + M_r S_{r-1}.

    b_r is what segment r comes to from nothing, M_r its transition; a program is (value channels, head, sequence).
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(spans_ptr + 2 * sequence)
    count = tl.load(spans_ptr + 2 * sequence + 1)
    column, channel = block * BV + tl.arange(0, BV), tl.arange(0, BK)
    in_state = (channel < K)[:, None] & (column < W)[None, :]
    in_square = (channel < K)[:, None] & (channel < K)[None, :]
    place_in_state = channel[:, None] * W + column[None, :]
    square = channel[:, None] * K + channel[None, :]
    at = first.to(tl.int64) * V + head
    state = tl.load(ends_ptr + at * K * W + place_in_state, mask=in_state, other=0.0)
    for _ in range(1, count - 1):
        at += V
        transition = tl.load(transition_ptr + at * K * K + square, mask=in_square, other=0.0)
        ends = ends_ptr + at * K * W + place_in_state
        state = tl.load(ends, mask=in_state, other=0.0) + product(transition, state, PRECISION)
        tl.store(ends, state, mask=in_state)
