"""The gated delta rule in chunks, Triton: three kernels, or five where a sequence is split over the multiprocessors.

    gates     per chunk, all at once:      G, e^G
    systems   per chunk, all at once:      T = (I + kkt)^-1 diag(beta),   R = (q k^T) D T,   E = diag(e^{G_C - G}) T
    scan      per value head, in order:    r = v - e^G S k,   o = e^G S q + R r,   S <- e^{G_C} S + k^T E r

Formulas and shapes are in `triton_chunk_kernels`. A sequence whose heads leave multiprocessors idle is split into
segments of whole chunks: `scan` runs ahead over all but the last to find what each makes of a state (b_r from none, and
the transition M_r), `join_segments` forms S_{r+1} = b_r + M_r S_r, and `scan` proper starts each segment from its
state. Nothing is left out: the result differs by rounding alone.

Products are taken in the dtype of v, into which q and k are rounded first, accumulated in fp32: S, E, R and r are
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
from workbench.kernels.gated_delta_rule.triton_chunk_stages import NOTHING, Watch
from workbench.kernels.registry import Call
from workbench.kernels.triton_runs import padded
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap

REQUIRES = triton_runs.REQUIRES
#: Tensor cores take S, E, R and r in the dtype of v.
ROUNDS_INSIDE = True
FLAGS = (taps.GDN_STATE, taps.GDN_OUT)
MOST_HEAD_SIZE = 256
CHUNKS = (16, 32, 64, 128)
#: Rows of the smallest tiles that the copy engine moves; with those of 16 an H200 reports a misaligned address.
LEAST_BULK_CHUNK = 32
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
    segments  [M, 9] number, first chunk, chunks, batch row, first token, tokens, sequence whose state enters or -1 for
              that of the segment before, sequence whose state leaves or -1, 1 where that is its last state
    ahead     [A, 9] those of `segments` that are not the last of their sequence
    spans     [S', 2] first segment and count, of sequences with three segments or more
    tails     [R, 9] last chunks that are not whole, where they go apart: segments that begin with the state that the
              others have left
    """

    chunks: Tensor
    segments: Tensor
    ahead: Tensor
    spans: Tensor
    tails: Tensor


Bounds = tuple[int, ...] | None


def _places(bounds: Bounds, batch: int, tokens: int) -> list[tuple[int, int, int]]:
    """(batch row, first token, end) of every sequence."""
    if bounds is None:
        return [(row, 0, tokens) for row in range(batch)]
    return [(0, start, stop) for start, stop in itertools.pairwise(bounds)]


@functools.lru_cache(maxsize=64)
def layout_of(
    bounds: Bounds, batch: int, tokens: int, chunk: int, segment: int, has_tails: bool, device: torch.device
) -> Layout:
    """The layout of packed sequences between `bounds`, or of `batch` rows of `tokens`. Each has as many segments as
    leave `segment` chunks to all of them, at least one; an empty one has a segment of no chunk, which hands on its
    state. `has_tails` puts last chunks that are not whole apart."""
    chunks: list[tuple[int, ...]] = []
    segments: list[tuple[int, ...]] = []
    ahead, spans, tails = [], [], []
    for sequence, (row, start, stop) in enumerate(_places(bounds, batch, tokens)):
        rest = (stop - start) % chunk if has_tails else 0
        count = -(-(stop - start - rest) // chunk)
        parts = parts_of(count, segment)
        if parts > 2:
            spans.append((len(segments), parts))
        for part in range(parts):
            begin = part * count // parts
            end = (part + 1) * count // parts
            token, is_last = start + begin * chunk, part == parts - 1
            segments.append((
                len(segments), len(chunks) + begin, end - begin, row, token,
                min(stop - rest, start + end * chunk) - token,
                sequence if part == 0 else -1, sequence if is_last else -1, int(is_last and not rest),
            ))  # fmt: skip
            if not is_last:
                ahead.append(segments[-1])
        if rest:
            tails.append((0, len(chunks) + count, 1, row, stop - rest, rest, sequence, sequence, 1))
        chunks += [(row, first, min(chunk, stop - first)) for first in range(start, stop, chunk)]
    tables = (torch.tensor(rows, dtype=torch.int32).to(device) for rows in (chunks, segments, ahead, spans, tails))
    return Layout(*tables)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the kernels are launched.

    block         value channels of a program of the scan
    warps, stages its warps, and chunks in flight
    ahead_stages  the same of the scan that runs ahead
    system_warps, system_registers
                  warps of the systems, and the most registers of a thread of theirs
    segment       fewest chunks of a segment of a sequence that is split
    bulk          tiles are moved by the copy engine where the call allows it (`is_bulk`), not by threads
    """

    block: int = 64
    warps: int = 4
    stages: int = 3
    ahead_stages: int = 2
    system_warps: int = 4
    system_registers: int | None = None
    segment: int = 1 << 30
    bulk: bool = True


#: Microseconds that a program of the scan takes for a chunk, that of the scan ahead, and each launch between: measured
#: on an H200 with heads of 128 in bfloat16. Only what they are to each other decides, and by far.
SCAN, AHEAD, LAUNCH = 1.45, 1.0, 3.0
MOST_PARTS = 16
#: Value channels of a program where there are heads enough.
WIDE_BLOCK = 128


def parts_of(chunks: int, segment: int) -> int:
    """Segments of a sequence of so many chunks."""
    return max(1, chunks // segment)


def chosen(
    dtype: torch.dtype, chunk: int, key_dim: int, value_dim: int, heads: int, counts: tuple[int, ...],
    device: torch.device,
) -> Plan:  # fmt: skip
    """The plan of a call whose sequences have `counts` chunks.

    Tiles of 128 value channels read E, R, k and q once where tiles of 64 read them twice, but leave fewer programs: for
    calls that fill the multiprocessors twice over even so.
    """
    multiprocessors = _properties(device).multi_processor_count if device.type == "cuda" else 1
    if dtype == torch.float32:
        block, warps, most, ahead = 16, 4, 1, 1
    else:
        is_wide = value_dim % WIDE_BLOCK == 0 and chunk <= 64 and heads * len(counts) >= 2 * multiprocessors > 2
        block = WIDE_BLOCK if is_wide else min(64, padded(value_dim))
        warps, most, ahead = 8 if is_wide or key_dim > 128 else 4, 3, 3
    key = padded(key_dim)
    of_stage = dtype.itemsize * chunk * (2 * key + 2 * chunk + block) + 8 * chunk
    of_ahead = dtype.itemsize * chunk * (key + chunk + block) + 8 * chunk
    room = _shared_memory(device)
    return Plan(
        block=block, warps=warps, stages=max(1, min(most, room // of_stage)),
        ahead_stages=max(1, min(ahead, room // of_ahead)),
        segment=_segment(heads * -(-value_dim // block), heads * -(-key_dim // block), counts, multiprocessors),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _segment(blocks: int, key_blocks: int, counts: tuple[int, ...], multiprocessors: int) -> int:
    """Fewest chunks of a segment, by the least time of the scans: `blocks` programs for each segment, and of those that
    run ahead and are not the first of their sequence `key_blocks` more, for their transition."""
    longest, total = max(counts), sum(counts)

    def chunks_in_a_row(length: int, programs: int, work: int) -> float:
        """How many chunks one multiprocessor does after another; the last program begins anywhere."""
        return length if programs <= multiprocessors else work / multiprocessors + length / 2

    def microseconds(segment: int) -> float:
        parts = [parts_of(count, segment) for count in counts]
        length = -(-longest // parts_of(longest, segment))
        main = blocks * sum(parts)
        first, between = sum(n - 1 for n in parts), sum(max(0, n - 2) for n in parts)
        time = SCAN * chunks_in_a_row(length, main, blocks * total)
        if first:
            ahead = blocks * first + key_blocks * between
            time += AHEAD * chunks_in_a_row(length, ahead, ahead * length) + LAUNCH * (1 + (between > 0))
        return time

    return min((-(-longest // n) for n in range(1, MOST_PARTS + 1)), key=microseconds) if longest > 1 else 1


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have for tiles."""
    return (_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 232448) - 8192


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of a call."""

    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    bounds: Bounds

    @classmethod
    def of(cls, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, policy: NumericsPolicy) -> Shapes:
        batch, tokens, key_heads, key_dim = q.shape
        bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
        chunk = CHUNKS[0] if tokens == 1 else min(policy.chunk, padded(tokens))
        return cls(
            batch, tokens, key_heads, v.shape[2], key_dim, v.shape[3], chunk,
            None if bounds is None else tuple(bounds),
        )  # fmt: skip

    @property
    def sequences(self) -> int:
        return self.batch if self.bounds is None else len(self.bounds) - 1

    def plan(self, dtype: torch.dtype, device: torch.device) -> Plan:
        places = _places(self.bounds, self.batch, self.tokens)
        counts = tuple(-(-(stop - start) // self.chunk) for _, start, stop in places)
        return chosen(dtype, self.chunk, self.key_dim, self.value_dim, self.value_heads, counts, device)

    def layout(self, plan: Plan, has_tails: bool, device: torch.device) -> Layout:
        return layout_of(self.bounds, self.batch, self.tokens, self.chunk, plan.segment, has_tails, device)


def path(q: Tensor, k: Tensor, v: Tensor, *, policy: NumericsPolicy, cu_seqlens: Tensor | None = None, **_: Any) -> str:
    """``split into 4 segments of 64 chunks, tiles moved by the copy engine``."""
    shapes = Shapes.of(q, v, cu_seqlens, policy)
    plan = shapes.plan(v.dtype, v.device)
    by_copy_engine = is_bulk(plan, shapes, q, k, v)
    layout = shapes.layout(plan, by_copy_engine and shapes.bounds is not None, v.device)
    segments, chunks = layout.segments.shape[0], layout.chunks.shape[0]
    parts = f"split into {segments} segments of" if segments > shapes.sequences else "not split,"
    average = -(-chunks // segments) if segments > shapes.sequences else chunks
    mover = "the copy engine" if by_copy_engine else "threads"
    tails = layout.tails.shape[0]
    apart = f", {tails} tail{'' if tails == 1 else 's'} by threads" if tails else ""
    return f"{parts} {average} chunk{'' if average == 1 else 's'}, tiles moved by {mover}{apart}"


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec` for shapes. Emits the stages of `torch_chunk` to `tap` (see `triton_chunk_stages`), and raises the
    words of state and output in `flags`."""
    watch = None if tap is None else Watch(tap)
    out, state = launched(
        q, k, v, log_decay=spec.limited_gates(log_decay, policy, spec.phase_of(q.shape[1])), beta=beta,
        initial_state=initial_state, cu_seqlens=cu_seqlens, policy=policy, flags=flags, watch=watch,
    )  # fmt: skip
    if watch is not None:
        bounds = spec.sequence_bounds(*q.shape[:2], cu_seqlens)
        state = watch.show(readable(k, v.dtype), v, beta, bounds, state)
    return library_form.finished(out, state, policy, None, like=v)


def launched(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, policy: NumericsPolicy, plan: Plan | None = None, flags: Tensor | None = None,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`run` with gates as they are, by a given plan or the chosen one; `watch` keeps the stages of a debug build."""
    from workbench.kernels.gated_delta_rule import triton_chunk_kernels as kernels

    dtype, device = v.dtype, v.device
    shapes = Shapes.of(q, v, cu_seqlens, policy)
    plan = plan or shapes.plan(dtype, device)
    chunk, heads, key_dim, value_dim = shapes.chunk, shapes.value_heads, shapes.key_dim, shapes.value_dim
    q, k, v = (readable(x, dtype) for x in (q, k, v))
    by_copy_engine = is_bulk(plan, shapes, q, k, v)
    # The copy engine knows of no end but that of a batch row: the tail of a packed sequence is for threads.
    layout = shapes.layout(plan, by_copy_engine and shapes.bounds is not None, device)
    initial = None if initial_state is None else initial_state.to(torch.float32).contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    count, segments, ahead, spans = (x.shape[0] for x in (layout.chunks, layout.segments, layout.ahead, layout.spans))
    cumsum, factors = empty(count, heads, 2, chunk), empty(count, heads, chunk)
    system = empty(count, heads, 2, chunk, chunk, dtype=dtype)
    out = empty(shapes.batch, shapes.tokens, heads, value_dim, dtype=dtype)
    state = empty(shapes.sequences, heads, key_dim, value_dim)
    ends = empty(segments, heads, key_dim, value_dim) if ahead else state  # not read where nothing runs ahead
    transitions = empty(segments, heads, key_dim, key_dim) if spans else state

    block = min(plan.block, padded(value_dim))
    blocks = -(-value_dim // block)
    at_once = min(32, padded(heads))  # heads of a program of the gates
    leaves, inverse = INVERSE_PRODUCTS.get(dtype, (FP32_PRODUCTS, FP32_PRODUCTS))
    products = FP32_PRODUCTS if dtype == torch.float32 else "tf32"  # no matter for narrower operands
    chained = triton_runs.is_chained(device)
    tiles: tuple[Any, ...] = (q, k, v, system, system, factors, out)
    if by_copy_engine:
        keys, values = (1, chunk, key_dim), (1, chunk, block)
        sizes = (keys, keys, values, (chunk, chunk), (2 * chunk, chunk), (1, chunk), values)
        tiles = tuple(tile_descriptor(x, size) for x, size in zip(tiles, sizes, strict=True))
    q_tiles, k_tiles, v_tiles, square_tiles, pair_tiles, factor_tiles, out_tiles = tiles
    of_all = {"V": heads, "C": chunk, "CHAINED": chained}
    of_products = {
        **of_all, "GROUP": heads // shapes.key_heads, "K": key_dim, "BK": padded(key_dim), "DOT": products,
    }  # fmt: skip

    seen = NOTHING if watch is None else watch.seen
    squares, inverses = (None, None) if watch is None else watch.for_systems(cumsum)
    scanned = None if watch is None else watch.for_scan(key_dim, value_dim, blocks)
    row_chunks = 0 if shapes.bounds is not None else -(-shapes.tokens // chunk)
    kernels.gates[count, -(-heads // at_once)](
        log_decay, layout.chunks, cumsum, factors, row_chunks, shapes.tokens, *log_decay.stride(),
        HEADS=at_once, WIDE_SUM=policy.cumsum == "float64", **of_all, num_warps=8,
    )  # fmt: skip
    kernels.systems[heads, count](
        q, k, beta, layout.chunks, cumsum, square_tiles, squares, inverses, row_chunks, shapes.tokens,
        *q.stride()[:3], *k.stride()[:3], *beta.stride(),
        LEAVES=leaves, PRECISION=inverse, IS_BULK=by_copy_engine, SEEN=seen, **of_products,
        num_warps=plan.system_warps, num_stages=1, maxnreg=plan.system_registers, launch_pdl=chained,
    )  # fmt: skip

    def scan(
        table: Tensor, blocks: int, entering: Tensor | None, *, is_ahead: bool = False, is_tail: bool = False
    ) -> None:
        stages = plan.ahead_stages if is_ahead else 1 if is_tail else plan.stages
        system_tiles = square_tiles if is_ahead else pair_tiles
        read = (q_tiles, k_tiles, v_tiles, system_tiles, factor_tiles)
        written = out_tiles
        if is_tail:
            read, written = (q, k, v, system, factors), out
        kernels.scan[blocks, heads, table.shape[0]](
            *read, factors, table, state if entering is None else entering, ends, transitions, written, state,
            layout.chunks if flags is None else flags, scanned, count * heads,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            W=value_dim, BV=block, STAGES=stages, HAS_INITIAL=entering is not None, IS_AHEAD=is_ahead,
            IS_BULK=by_copy_engine and not is_tail, HAS_FLAGS=flags is not None and not is_ahead,
            SEEN=NOTHING if is_ahead else seen, **of_products,
            num_warps=plan.warps, num_stages=stages, launch_pdl=chained,
        )  # fmt: skip

    if ahead:
        scan(layout.ahead, blocks + (-(-key_dim // block) if spans else 0), initial, is_ahead=True)
    if spans:
        kernels.join_segments[blocks, heads, spans](
            ends, transitions, layout.spans,
            K=key_dim, W=value_dim, BK=padded(key_dim), BV=block, PRECISION="tf32x3", V=heads, CHAINED=chained,
            num_warps=8, num_stages=1, launch_pdl=chained,
        )  # fmt: skip
    scan(layout.segments, blocks, initial)
    if layout.tails.shape[0]:
        scan(layout.tails, blocks, state, is_tail=True)
    return out, state


def is_bulk(plan: Plan, shapes: Shapes, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the copy engine can move the tiles of a call: whole tiles, from addresses and in steps of 16 bytes."""
    return (
        plan.bulk
        and shapes.chunk >= LEAST_BULK_CHUNK
        and triton_runs.has_copy_engine(v.device)
        and shapes.value_dim % min(plan.block, padded(shapes.value_dim)) == 0
        and shapes.key_dim == padded(shapes.key_dim)
        and all(_in_steps(x, v.dtype) for x in (q, k, v))
    )


def _in_steps(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether [B, T, heads, channels] lies in memory as [B, T, heads * channels] in steps of 16 bytes; a copy does."""
    if x.dtype != dtype or x.stride(-1) != 1:
        return True
    step = 16 // x.element_size()
    together = x.shape[2] == 1 or x.stride(2) == x.shape[3]
    apart = x.stride(1) % step == 0 and (x.shape[0] == 1 or x.stride(0) % step == 0)
    return together and apart and x.data_ptr() % 16 == 0


def tile_descriptor(x: Tensor, size: tuple[int, ...]) -> Any:
    """What the copy engine needs to know of x for tiles of `size`: [B, T, heads, channels] is [B, T, heads * channels]
    to it, and anything else rows of a tile's width."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if len(size) == 2:
        rows = x.view(-1, size[-1])
    else:
        batch = x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.stride(1)  # of one row any stride may be told
        rows = x.as_strided((*x.shape[:2], x.shape[2] * x.shape[3]), (batch, x.stride(1), 1))
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), list(size))


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` where it has this dtype and its last axis is adjacent in memory, else a copy in the order of its axes; the
    other strides are passed to the kernels."""
    return x if x.dtype == dtype and x.stride(-1) == 1 else x.to(dtype).contiguous()
