"""The recurrence of `spec` in Triton, one launch: the decode step, and a slow prefill of any length.

Bound by the memory of the state, which is read once and written once. Arithmetic is fp32 whatever the dtype of the
inputs, which need no copy where their last axis lies in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule import spec, torch_recurrent
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.triton_runs import REQUIRES as REQUIRES
from workbench.kernels.triton_runs import padded, refusal
from workbench.numerics import Clamp, NumericsPolicy
from workbench.taps import Tap

FLAGS = (taps.GDN_STATE, taps.GDN_OUT)
#: Elements of the state that a program holds in registers at most: 128 of each of 128 threads.
MOST_ELEMENTS = 1 << 14
#: Columns of a head that a program takes at most. The H200 writes more of a state in a second by four programs of two
#: warps on a multiprocessor than by two of four: 128 columns cost 17.0 us for 8 sequences of 32 heads of 128, 64 cost
#: 11.4, 32 cost 10.8.
MOST_COLUMNS = 64
#: Programs below which the columns are halved, down to MIN_COLUMNS, and warps are doubled, to occupy a large GPU.
ENOUGH_PROGRAMS, MIN_COLUMNS = 1024, 16


def supports(call: Call) -> str | None:
    if call.policy.state_dtype != "float32":
        return f"keeps a state of float32; the policy asks for {call.policy.state_dtype}"
    if call.weight_shape and call.weight_shape[1] > MOST_ELEMENTS:
        return f"holds whole columns of the state, up to {MOST_ELEMENTS} key channels, found {call.weight_shape[1]}"
    return refusal(call) or torch_recurrent.supports(call)


def joined(*clamps: Clamp | None) -> Clamp | None:
    """One clamp that does what these do one after another; None where there is none."""
    found = None
    for clamp in clamps:
        if clamp is None:
            continue
        if found is None:
            found = clamp
            continue
        lo, hi = (min(max(limit, clamp.lo), clamp.hi) for limit in (found.lo, found.hi))
        found = Clamp(site=clamp.site, phase=clamp.phase, lo=lo, hi=hi)
    return found


def limits(clamp: Clamp | None) -> tuple[float, float]:
    """The limits of a clamp as fp32 holds them; two that a kernel compiled without a clamp does not read."""
    largest = torch.finfo(torch.float32).max
    return (0.5, 0.5) if clamp is None else tuple(min(max(x, -largest), largest) for x in (clamp.lo, clamp.hi))


def block_of(key_dim: int, value_dim: int, most_columns: int | None = None) -> tuple[int, int]:
    """(BK, BW): powers of two that hold a state [K, W], or `most_columns` of its columns."""
    rows, columns = padded(key_dim), padded(value_dim)
    return rows, columns if most_columns is None else min(columns, most_columns)


def tile_of(rows: int, columns: int, elements: int) -> dict[str, int]:
    """Axes R, C, N, D of a block (see the kernels) and warps, for so many elements of it in a thread."""
    warps = max(1, min(16, rows * columns // (32 * elements), columns // 4))
    width = columns // warps
    lanes = min(rows, max(1, 128 // width))  # along the rows: a lane reads four columns at once
    return {"R": lanes, "C": warps, "N": rows // lanes, "D": width, "num_warps": warps}


def split_of(heads: int, key_dim: int, value_dim: int) -> tuple[int, dict[str, int]]:
    """(blocks of columns of a head, `tile_of` each) for so many heads of all sequences."""
    rows, columns = block_of(key_dim, value_dim, MOST_COLUMNS)
    while columns > 1 and rows * columns > MOST_ELEMENTS:
        columns //= 2
    while columns > MIN_COLUMNS and heads * -(-value_dim // columns) < ENOUGH_PROGRAMS:
        columns //= 2
    blocks = -(-value_dim // columns)
    return blocks, tile_of(rows, columns, 128 if heads * blocks >= ENOUGH_PROGRAMS else 64)


def with_rows(x: Tensor) -> Tensor:
    """`x` itself where its last axis lies in one piece, else a copy."""
    return x if x.stride(-1) == 1 else row_major(x)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`; of a policy the clamps on gates and state, and zero for NaN. The flags are of what the kernel wrote,
    before a NaN is replaced."""
    from workbench.kernels.gated_delta_rule.triton_recurrent_kernels import recurrent_kernel

    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    phase = spec.phase_of(tokens)
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    sequences = batch if bounds is None else len(bounds) - 1
    places = None if bounds is None else torch.tensor(bounds, dtype=torch.int32).to(q.device, non_blocking=True)
    q, k, v = with_rows(q), with_rows(k), with_rows(v)
    first = None if initial_state is None else row_major(initial_state)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    state = torch.empty(sequences, value_heads, key_dim, value_dim, dtype=torch.float32, device=q.device)
    of_gate = joined(policy.clamp("raw_gate", phase), policy.clamp("decode_gate", phase))
    of_state = policy.clamp("state", phase)
    blocks, tile = split_of(sequences * value_heads, key_dim, value_dim)
    recurrent_kernel[sequences * value_heads * blocks,](
        q, k, v, log_decay, beta, first, places, out, state, flags, *limits(of_gate), *limits(of_state), tokens,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_decay.stride(), *beta.stride(),
        V=value_heads, GROUP=value_heads // key_heads, K=key_dim, W=value_dim,
        ONE_TOKEN=tokens == 1 and bounds is None, IS_PACKED=bounds is not None, HAS_STATE=first is not None,
        CLAMPS_GATE=of_gate is not None, CLAMPS_STATE=of_state is not None, RAISES_FLAGS=flags is not None, **tile,
    )  # fmt: skip
    return spec.without_nan(policy, out, taps.observe(tap, taps.GDN_STATE, state))
