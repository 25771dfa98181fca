"""The gated delta rule in chunks, Triton: two kernels, or four where a sequence is split over the multiprocessors.

    systems   per chunk, all at once:      T = (I + kkt)^-1 diag(beta),   P = (q k^T) D,   e^G, e^{G_C - G}
    scan      per value head, in order:    v' = T (v - e^G S k),   o = e^G S q + P v',   S <- e^{G_C} S + (..k)^T v'

Formulas and shapes are in `triton_chunk_kernels`. A sequence whose heads leave multiprocessors idle is split into
segments of whole chunks: `scan` runs ahead over all but the last to find what each makes of a state (b_r from none, and
the transition M_r), `join_segments` forms S_{r+1} = b_r + M_r S_r, and `scan` proper starts each segment from its
state. Nothing is left out: the result differs by rounding alone.

Products are taken in the dtype of v, into which q and k are rounded first, accumulated in fp32: v, S, T, P and v' are
rounded to it for their products, the state itself stays fp32 in registers. In fp16 each row of the state is brought
into its range by a power of two. G is summed in fp64 under cumsum `float64`, and its differences are formed from two
fp32 numbers; under `float32` from one.

Source: arXiv 2406.06484 section 3 (chunk form) with the scalar gate of arXiv 2412.06464; the inverse of a unit lower
triangular matrix by blocks, as `torch_chunk.block_inverses`.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels import triton_runs
from workbench.kernels.gated_delta_rule import library_form, spec
from workbench.kernels.registry import Call
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap

REQUIRES = triton_runs.REQUIRES
#: Tensor cores take S, T, P, r and v' in the dtype of v.
ROUNDS_INSIDE = True
FLAGS = (taps.GDN_STATE, taps.GDN_OUT)
MOST_HEAD_SIZE = 256
CHUNKS = (16, 32, 64, 128)
#: How products of fp32 are taken: three products of TF32 parts, as accurate as one of fp32.
FP32_PRODUCTS = "tf32x3"
#: The same of the products that form the inverse, for narrower inputs.
INVERSE_PRODUCTS = {torch.bfloat16: ("float16", "float16"), torch.float16: ("tf32x3", "tf32x3")}


def supports(call: Call) -> str | None:
    return (
        triton_runs.refusal(call) or library_form.size_refusal(call, most=MOST_HEAD_SIZE) or _policy_refusal(call)
    )  # fmt: skip


def _policy_refusal(call: Call) -> str | None:
    """Why the kernels cannot honour the policy. For one token there is no chunk, only a state."""
    policy = call.policy
    for clamp in policy.clamps:
        if clamp.site not in library_form.GATE_SITES and (call.tokens > 1 or clamp.site == "state"):
            return f"clamps single gates alone; the policy clamps {clamp.site}; use torch_chunk"
    if policy.state_dtype != "float32":
        return f"has a state of float32; the policy asks for {policy.state_dtype}; use torch_chunk"
    if call.tokens == 1:
        return None
    for field, served in (
        ("exponent", ("difference_then_mask",)), ("cumsum", ("float64", "float32")),
        ("solver", ("block_substitution", "auto")), ("chunk", CHUNKS),
    ):  # fmt: skip
        asked = getattr(policy, field)
        if asked not in served:
            known = " or ".join(map(str, served))
            return f"computes with {field} {known}; the policy asks for {asked}; use torch_chunk"
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where chunks and segments of a call stand, int32 on its device.

    chunks    [N, 3] batch row, first token, tokens
    segments  [M, 8] number, first chunk, chunks, batch row, first token, tokens, sequence whose state enters or -1 for
              that of the segment before, sequence whose state leaves or -1
    ahead     [A, 8] those of `segments` that are not the last of their sequence
    spans     [S', 2] first segment and count, of sequences with three segments or more
    """

    chunks: Tensor
    segments: Tensor
    ahead: Tensor
    spans: Tensor


@functools.lru_cache(maxsize=64)
def layout_of(
    bounds: tuple[int, ...] | None, batch: int, tokens: int, chunk: int, most: int, device: torch.device
) -> Layout:
    """The layout of packed sequences between `bounds`, or of `batch` rows of `tokens`; segments have `most` chunks."""
    if bounds is None:
        places = [(row, 0, tokens) for row in range(batch)]
    else:
        places = [(0, start, stop) for start, stop in itertools.pairwise(bounds)]
    chunks: list[tuple[int, ...]] = []
    segments: list[tuple[int, ...]] = []
    ahead, spans = [], []
    for sequence, (row, start, stop) in enumerate(places):
        count = -(-(stop - start) // chunk)
        parts = max(1, -(-count // most))
        if parts > 2:
            spans.append((len(segments), parts))
        for part in range(parts):
            begin = part * count // parts
            end = (part + 1) * count // parts
            token = start + begin * chunk
            segments.append((
                len(segments), len(chunks) + begin, end - begin, row, token, min(stop, start + end * chunk) - token,
                sequence if part == 0 else -1, sequence if part == parts - 1 else -1,
            ))  # fmt: skip
            if part < parts - 1:
                ahead.append(segments[-1])
        chunks += [(row, first, min(chunk, stop - first)) for first in range(start, stop, chunk)]
    tables = (torch.tensor(rows, dtype=torch.int32).to(device) for rows in (chunks, segments, ahead, spans))
    return Layout(*tables)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the kernels are launched.

    block         value channels of a program of the scan
    warps, stages its warps, and chunks in flight
    ahead_stages  the same of the scan that runs ahead
    system_warps, system_registers
                  warps of the systems, and the most registers of a thread of theirs
    members       value heads of a program of the systems, of one key head
    segment       most chunks of a segment
    bulk          tiles are moved by the copy engine where the call allows it (`tile_descriptor`), not by threads
    """

    block: int = 64
    warps: int = 4
    stages: int = 3
    ahead_stages: int = 2
    system_warps: int = 4
    system_registers: int | None = None
    members: int = 1
    segment: int = 1 << 30
    bulk: bool = True


def chosen(dtype: torch.dtype, chunk: int) -> Plan:
    if dtype == torch.float32:
        return Plan(block=16, stages=1, ahead_stages=1)
    return Plan(block=32, stages=1, ahead_stages=1) if chunk == 128 else Plan()


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None,
    flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec` for shapes. Emits the final state to `tap`, and raises the words of state and output in `flags`."""
    out, state = launched(
        q, k, v, log_decay=spec.limited_gates(log_decay, policy, spec.phase_of(q.shape[1])), beta=beta,
        initial_state=initial_state, cu_seqlens=cu_seqlens, policy=policy, plan=chosen(v.dtype, policy.chunk),
        flags=flags,
    )  # fmt: skip
    return library_form.finished(out, state, policy, tap, like=v)


def launched(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, policy: NumericsPolicy, plan: Plan,
    flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`run` by a given plan; gates as they are."""
    import triton

    from workbench.kernels.gated_delta_rule import triton_chunk_kernels as kernels

    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    dtype, device = v.dtype, v.device
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    chunk = min(policy.chunk if tokens > 1 else CHUNKS[0], max(CHUNKS[0], triton.next_power_of_2(tokens)))
    layout = layout_of(None if bounds is None else tuple(bounds), batch, tokens, chunk, plan.segment, device)
    sequences = batch if bounds is None else len(bounds) - 1
    q, k, v, log_decay, beta = (channels_adjacent(x) for x in (q.to(dtype), k.to(dtype), v, log_decay, beta))
    initial = None if initial_state is None else initial_state.to(torch.float32).contiguous()

    count, padded_key = layout.chunks.shape[0], max(16, triton.next_power_of_2(key_dim))
    block = min(plan.block, max(16, triton.next_power_of_2(value_dim)))
    leaves, precision = INVERSE_PRODUCTS.get(dtype, (FP32_PRODUCTS, FP32_PRODUCTS))
    dot = FP32_PRODUCTS if dtype == torch.float32 else "tf32"
    system, score = (
        torch.empty(count, value_heads, chunk, chunk, dtype=dtype, device=device) for _ in range(2)
    )  # fmt: skip
    cumsum = torch.empty(count, value_heads, 2, chunk, dtype=torch.float32, device=device)
    factors = torch.empty(count, value_heads, chunk, 2, dtype=torch.float32, device=device)
    out = torch.empty(batch, tokens, value_heads, value_dim, dtype=dtype, device=device)
    state = torch.empty(sequences, value_heads, key_dim, value_dim, dtype=torch.float32, device=device)
    chained = triton_runs.is_chained(device)
    heads = min(32, max(16, triton.next_power_of_2(value_heads)))
    kernels.gates[count, triton.cdiv(value_heads, heads)](
        log_decay, layout.chunks, cumsum, factors, *log_decay.stride(),
        V=value_heads, HEADS=heads, C=chunk, WIDE_SUM=policy.cumsum == "float64", CHAINED=chained,
        num_warps=8,
    )  # fmt: skip
    blocks = triton.cdiv(value_dim, block)
    segments, ahead, spans = layout.segments.shape[0], layout.ahead.shape[0], layout.spans.shape[0]
    ends = transitions = state  # not read without segments ahead
    if ahead:
        ends = torch.empty(segments, value_heads, key_dim, value_dim, dtype=torch.float32, device=device)
    if spans:
        transitions = torch.empty(segments, value_heads, key_dim, key_dim, dtype=torch.float32, device=device)

    tiles: tuple[Any, ...] = (q, k, v, system, score, factors, out)
    is_bulk = plan.bulk and value_dim % block == 0 and key_dim == padded_key and are_whole(bounds, chunk)
    if is_bulk:
        keys, values, square = (1, chunk, key_dim), (1, chunk, block), (chunk, chunk)
        shapes = (keys, keys, values, square, square, (1, 2 * chunk), values)
        found = [tile_descriptor(x, shape) for x, shape in zip(tiles, shapes, strict=True)]
        is_bulk = None not in found
        tiles = tuple(found) if is_bulk else tiles

    group = value_heads // key_heads
    members = min(plan.members, group)
    members = members if group % members == 0 else 1
    q_tiles, k_tiles, _, system_tiles, score_tiles, *_ = tiles
    kernels.systems[value_heads // members, count](
        q_tiles, k_tiles, beta, layout.chunks, cumsum, system_tiles, score_tiles,
        *q.stride()[:3], *k.stride()[:3], *beta.stride(),
        V=value_heads, GROUP=group, MEMBERS=members, K=key_dim, BK=padded_key, C=chunk, LEAVES=leaves,
        PRECISION=precision, DOT=dot, IS_BULK=is_bulk, CHAINED=chained, num_warps=plan.system_warps,
        num_stages=1, maxnreg=plan.system_registers, launch_pdl=chained,
    )  # fmt: skip

    def scan(table: Tensor, blocks: int, is_ahead: bool) -> None:
        stages = plan.ahead_stages if is_ahead else plan.stages
        *read, out_tiles = tiles
        kernels.scan[blocks, value_heads, table.shape[0]](
            *read, factors, table, state if initial is None else initial, ends, transitions, out_tiles,
            state, state if flags is None else flags,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            V=value_heads, GROUP=group, K=key_dim, W=value_dim, BK=padded_key, BV=block, C=chunk,
            DOT=dot, STAGES=stages, HAS_INITIAL=initial is not None, IS_AHEAD=is_ahead, IS_BULK=is_bulk,
            HAS_FLAGS=flags is not None and not is_ahead, CHAINED=chained, num_warps=plan.warps, num_stages=stages,
            launch_pdl=chained,
        )  # fmt: skip

    if ahead:
        scan(layout.ahead, blocks + (triton.cdiv(key_dim, block) if spans else 0), True)
    if spans:
        kernels.join_segments[blocks, value_heads, spans](
            ends, transitions, layout.spans, V=value_heads, K=key_dim, W=value_dim, BK=padded_key, BV=block,
            PRECISION="tf32x3", CHAINED=chained, num_warps=8, num_stages=1, launch_pdl=chained,
        )  # fmt: skip
    scan(layout.segments, blocks, False)
    return out, state


def are_whole(bounds: list[int] | None, chunk: int) -> bool:
    """Whether no tile of a chunk reaches into the next sequence: the copy engine knows the end of a batch row alone."""
    return bounds is None or all((stop - start) % chunk == 0 for start, stop in itertools.pairwise(bounds[:-1]))


def tile_descriptor(x: Tensor, shape: tuple[int, ...]) -> Any | None:
    """What the copy engine needs to know of [B, T, heads, channels], or of [..., C, C], for tiles of `shape`.

    [B, T, heads * channels] or [..., C] are its axes. None where it cannot: it takes addresses and strides of 16 bytes.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    if len(shape) == 2:
        rows = x.view(-1, shape[-1])
    elif x.stride(2) != x.shape[3] * x.stride(3) and x.shape[2] > 1:
        return None
    else:
        batch = x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.stride(1)
        rows = x.as_strided((*x.shape[:2], x.shape[2] * x.shape[3]), (batch, x.stride(1), 1))
    if x.data_ptr() % 16 or any(stride * x.element_size() % 16 for stride in rows.stride()[:-1]):
        return None
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), list(shape))


def channels_adjacent(x: Tensor) -> Tensor:
    """`x` where its last axis is adjacent in memory, else a copy; the other strides are passed to the kernels."""
    return x if x.stride(-1) == 1 else x.contiguous()
