"""The kernels of `triton_few`: the products of a few tokens with the experts hit, bound by the memory of the weights.

Pair p = token * A + rank; `hidden` is held times the weight of its pair, so that the second product sums over the
experts as well. Two ways, both deterministic and without sorting. By pair: each pair reads the matrices of
its expert and multiplies them in float32 (`gate_up_of_pair_kernel`, `down_of_token_kernel`). By expert: each expert
hit is read once, for the tokens that chose it, on tensor cores (`gate_up_of_expert_kernel`, `down_of_expert_kernel`,
`sum_of_pairs_kernel`).

With CHAINED each kernel may be started while the one before it still runs (programmatic dependent launch, from compute
capability 9.0 on). It then waits before it reads what that one writes; what it reads before the wait was complete when
the one before it passed its own, after which alone that one lets its successor start.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workbench.kernels import triton_runs
from workbench.kernels.flags_kernels import raise_words

INTERPRETED = tl.constexpr(triton_runs.is_interpreted())


@triton.jit
def add_product(sums, a, b):
    """sums [M, N] + a [M, K] b [N, K]^T, float32 operands not rounded."""
    if INTERPRETED:  # the interpreter would multiply the bit patterns of bfloat16
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), sums, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_up_of_pair_kernel(
    x_ptr, weights_ptr, experts_ptr, gate_up_ptr, hidden_ptr,
    A: tl.constexpr, D: tl.constexpr, I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr, DEPTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """hidden[p] = weights[p] * silu(gate[e] x_t) * (up[e] x_t), e = experts[p]; a program has ROWS values of one pair.

    x [tokens, D]; weights, experts (int64) [tokens, A]; gate_up [E, 2 I, D]; hidden [tokens * A, I]
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert_ptr = gate_up_ptr + tl.load(experts_ptr + pair) * (2 * I * D)
    share = tl.load(weights_ptr + pair).to(tl.float32)
    gate = tl.zeros([ROWS, DEPTH], tl.float32)
    up = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in tl.static_range(0, D, DEPTH):
        channel = start + tl.arange(0, DEPTH)
        place = expert_ptr + row[:, None] * D + channel[None, :]
        is_inside = (row < I)[:, None] & (channel < D)[None, :]
        gate_weight = tl.load(place, mask=is_inside, other=0.0)
        up_weight = tl.load(place + I * D, mask=is_inside, other=0.0)
        x = tl.load(x_ptr + (pair // A) * D + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]
        gate += gate_weight.to(tl.float32) * x
        up += up_weight.to(tl.float32) * x
    hidden = swiglu(tl.sum(gate, 1), tl.sum(up, 1)) * share
    tl.store(hidden_ptr + pair * I + row, hidden.to(hidden_ptr.dtype.element_ty), mask=row < I)


@triton.jit
def down_of_token_kernel(
    hidden_ptr, experts_ptr, down_ptr, out_ptr, flags_ptr,
    A: tl.constexpr, D: tl.constexpr, I: tl.constexpr,  # noqa: E741
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr, CHAINED: tl.constexpr, RAISES_FLAGS: tl.constexpr,
):  # fmt: skip
    """out[t] = sum_a down[e] hidden[t * A + a], e = experts[t, a]; a program has COLUMNS values of one token.

    hidden [tokens * A, I]; experts [tokens, A] int64; down [E, D, I]; out [tokens, D]; RANKS is A rounded up to a
    power of two. With EARLY weights of the experts are read before the wait.
    """
    if CHAINED and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(1)
    rank = tl.arange(0, RANKS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_rank = rank < A
    expert = tl.load(experts_ptr + token * A + rank, mask=is_rank, other=0)
    products = tl.zeros([RANKS, COLUMNS, DEPTH], tl.float32)
    for start in tl.static_range(0, I, DEPTH):
        channel = start + tl.arange(0, DEPTH)
        place = expert[:, None, None] * (D * I) + column[None, :, None] * I + channel[None, None, :]
        is_inside = is_rank[:, None, None] & (column < D)[None, :, None] & (channel < I)[None, None, :]
        weight = tl.load(down_ptr + place, mask=is_inside, other=0.0)
        if CHAINED and EARLY and start == 0:
            gdc_wait()
            gdc_launch_dependents()
        hidden = tl.load(
            hidden_ptr + (token * A + rank)[:, None, None] * I + channel[None, None, :],
            mask=is_rank[:, None, None] & (channel < I)[None, None, :], other=0.0,
        )  # fmt: skip
        products += weight.to(tl.float32) * hidden.to(tl.float32)
    if EARLY:  # in fewer registers, where a warp has all ranks of its columns
        out = tl.sum(tl.sum(products, 0), 1)
    else:
        out = tl.sum(products.permute(1, 0, 2).reshape(COLUMNS, RANKS * DEPTH), 1)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * D + column, out, mask=column < D)
    if RAISES_FLAGS:
        raise_words(flags_ptr, 0, tl.where(column < D, out, 0.0))


@triton.jit
def tokens_of_slot(
    experts_ptr, slot, tokens,
    A: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, BY_EXPERT: tl.constexpr,
):  # fmt: skip
    """(expert, whether this slot serves it, which tokens chose it [TOKENS], the pair of each [TOKENS]).

    A slot is an expert with BY_EXPERT, else a pair: of those on the same expert, the first serves it for all.
    """
    token = tl.arange(0, TOKENS)[:, None]
    rank = tl.arange(0, RANKS)[None, :]
    pair = token * A + rank
    chosen = tl.load(experts_ptr + pair, mask=(token < tokens) & (rank < A), other=-1)
    if BY_EXPERT:
        expert = slot.to(tl.int64)
    else:
        expert = tl.load(experts_ptr + slot)
    is_hit = chosen == expert
    own = tl.max(tl.where(is_hit, pair, -1), 1)  # the experts of a token are distinct: it has at most one such pair
    first = tl.min(tl.where(own < 0, TOKENS * RANKS * 2, own), 0)
    serves = first < TOKENS * RANKS * 2 if BY_EXPERT else first == slot
    return expert, serves, own >= 0, own


@triton.jit
def gate_up_of_expert_kernel(
    x_ptr, weights_ptr, experts_ptr, gate_up_ptr, hidden_ptr, tokens,
    A: tl.constexpr, D: tl.constexpr, I: tl.constexpr,  # noqa: E741
    TOKENS: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    BY_EXPERT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """As `gate_up_of_pair_kernel`; a program has ROWS values of all pairs of one expert, see `tokens_of_slot`.

    TOKENS is the number of tokens rounded up to a power of two, at least 16. The weights are the left operand: they
    have enough rows for the widest instructions, the tokens do not.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    expert, serves, is_hit, pair = tokens_of_slot(experts_ptr, tl.program_id(1), tokens, A, TOKENS, RANKS, BY_EXPERT)
    if serves:
        token = tl.arange(0, TOKENS)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        gate = tl.zeros([ROWS, TOKENS], tl.float32)
        up = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in tl.range(0, D, DEPTH, num_stages=STAGES):
            channel = start + tl.arange(0, DEPTH)
            is_channel = (channel < D)[None, :]
            place = gate_up_ptr + expert * (2 * I * D) + row[:, None] * D + channel[None, :]
            is_inside = (row < I)[:, None] & is_channel
            gate_weight = tl.load(place, mask=is_inside, other=0.0)
            up_weight = tl.load(place + I * D, mask=is_inside, other=0.0)
            x = tl.load(x_ptr + token[:, None] * D + channel[None, :], mask=is_hit[:, None] & is_channel, other=0.0)
            gate = add_product(gate, gate_weight, x)
            up = add_product(up, up_weight, x)
        share = tl.load(weights_ptr + pair, mask=is_hit, other=0.0).to(tl.float32)
        hidden = swiglu(gate, up) * share[None, :]
        tl.store(
            hidden_ptr + pair[None, :] * I + row[:, None], hidden.to(hidden_ptr.dtype.element_ty),
            mask=is_hit[None, :] & (row < I)[:, None],
        )  # fmt: skip


@triton.jit
def down_of_expert_kernel(
    hidden_ptr, experts_ptr, down_ptr, products_ptr, tokens,
    A: tl.constexpr, D: tl.constexpr, I: tl.constexpr,  # noqa: E741
    TOKENS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    BY_EXPERT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """products[p] = down[e] hidden[p]; a program has COLUMNS values of all pairs of one expert, see `tokens_of_slot`.

    products [tokens * A, D] float32
    """
    expert, serves, is_hit, pair = tokens_of_slot(experts_ptr, tl.program_id(1), tokens, A, TOKENS, RANKS, BY_EXPERT)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if serves:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        product = tl.zeros([COLUMNS, TOKENS], tl.float32)
        for start in tl.range(0, I, DEPTH, num_stages=STAGES):
            channel = start + tl.arange(0, DEPTH)
            is_channel = (channel < I)[None, :]
            place = down_ptr + expert * (D * I) + column[:, None] * I + channel[None, :]
            weight = tl.load(place, mask=(column < D)[:, None] & is_channel, other=0.0)
            place = hidden_ptr + pair[:, None] * I + channel[None, :]
            hidden = tl.load(place, mask=is_hit[:, None] & is_channel, other=0.0)
            product = add_product(product, weight, hidden)
        place = products_ptr + pair[None, :] * D + column[:, None]
        tl.store(place, product, mask=is_hit[None, :] & (column < D)[:, None])


@triton.jit
def sum_of_pairs_kernel(
    products_ptr, out_ptr, flags_ptr,
    A: tl.constexpr, D: tl.constexpr,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr, RAISES_FLAGS: tl.constexpr,
):  # fmt: skip
    """out[t] = sum_a products[t * A + a], the ranks in a fixed order; a program has COLUMNS values of one token."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(1)
    rank = tl.arange(0, RANKS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    products = tl.load(
        products_ptr + (token * A + rank) * D + column[None, :], mask=(rank < A) & (column < D)[None, :], other=0.0
    )
    out = tl.sum(products, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * D + column, out, mask=column < D)
    if RAISES_FLAGS:
        raise_words(flags_ptr, 0, out)
