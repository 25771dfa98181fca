"""The whole region of `spec` in one launch: one Triton program for each value head of each sequence.

The limit is the memory of the state, read once and written once. In place the window of a key head's channels is
written by the last of the programs that read it, which they find out by counting; the counts belong to the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule.triton_recurrent import block_of, joined, limits, tile_of
from workbench.kernels.gdn_decode import spec
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.triton_runs import REQUIRES as REQUIRES
from workbench.kernels.triton_runs import refusal
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap

FLAGS = (taps.GDN_STATE, taps.GDN_OUT, taps.GDN_NORM)
#: Elements of a head's state, sides rounded up to powers of two, that a program can hold in registers.
MOST_ELEMENTS = 1 << 15

#: Programs that an H200 holds about at once.
FEW_PROGRAMS = 512

#: By device and address of a pool of windows: graphs hold these addresses, so that none is ever given back.
_arrivals: dict[tuple[torch.device, int], Tensor] = {}


def supports(call: Call) -> str | None:
    policy = call.policy
    if policy.state_dtype != "float32":
        return f"keeps a state of float32; the policy asks for {policy.state_dtype}"
    if policy.nan_to_num:
        return "shows a NaN as it is; the policy replaces it between recurrence and norm; use torch_composed"
    if call.weight_shape:
        rows, columns = block_of(*call.weight_shape[1:])
        if rows * columns > MOST_ELEMENTS:
            return (
                f"holds the state of a head in registers, {MOST_ELEMENTS} elements, found K {call.weight_shape[1]}, "
                f"W {call.weight_shape[2]}"
            )
    return refusal(call)


def launch_options(programs: int, rows: int, columns: int) -> dict[str, object]:
    """Tile and compilation for so many programs of a state of rows x columns each.

    On an H200, heads of 128, new tensors: 64 sequences take 75.5 us with 4 warps of 128 registers of state a thread and
    77.1 with 8 warps of 64; where programs are few, what counts is how soon one is done: 5.7 and 5.4 us for one
    sequence. A state that is read once and written once then gains by leaving the cache first (5.2 and 5.0), and loses
    by it where the cache is full (281 and 292 us for 256 sequences in place).
    """
    if programs > FEW_PROGRAMS:
        return tile_of(rows, columns, 128) | {"EVICTION": ""}
    return tile_of(rows, columns, 64) | {"EVICTION": "evict_first", "maxnreg": 128}


def arrivals_for(window: Tensor, key_heads: int) -> Tensor:
    """[P, H] zeros in int32 that belong to a pool of windows; every call leaves them zero.

    A graph that is captured before any call on this pool has zeros of its own, which each replay sets anew.
    """
    count = window.shape[0] * key_heads
    key = (window.device, window.data_ptr())
    found = _arrivals.get(key)
    if found is not None and found.numel() >= count:
        return found
    with torch.inference_mode(False):
        made = torch.zeros(count, dtype=torch.int32, device=window.device)
    if window.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _arrivals[key] = made
    return made


def first_axis_strided(x: Tensor) -> Tensor:
    """`x` itself where all axes but the first are row-major, else a copy."""
    step = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != step:
            return row_major(x)
        step *= size
    return x


def run(
    qkv: Tensor, z: Tensor, raw_beta: Tensor, raw_gate: Tensor, *, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, window: Tensor, state: Tensor, eps: float, slots: Tensor | None = None,
    in_place: bool = False, policy: NumericsPolicy, tap: Tap | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `spec`; of a policy the clamps on A_log, gates and state."""
    from workbench.kernels.gdn_decode.triton_packed_kernels import packed_decode_kernel

    spec.check_places(window, state, slots, in_place)
    batch, keys, (heads, key_dim, value_dim) = qkv.shape[0], spec.key_heads(qkv, state), state.shape[1:]
    width = conv_weight.shape[1]
    qkv, z, raw_beta, raw_gate = (first_axis_strided(x) for x in (qkv, z, raw_beta, raw_gate))
    conv_weight, A_log, dt_bias, norm_weight = (row_major(x) for x in (conv_weight, A_log, dt_bias, norm_weight))
    out = torch.empty(batch, heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    if in_place:
        new_window, new_state = window, state
    else:
        window, state = row_major(window), row_major(state)
        new_window = torch.empty(window.shape, dtype=window.dtype, device=window.device)
        new_state = torch.empty(state.shape, dtype=torch.float32, device=state.device)
    counts = arrivals_for(window, keys) if in_place and heads > keys else None
    of_rate, of_state = policy.clamp("A_log", "decode"), policy.clamp("state", "decode")
    of_gate = joined(policy.clamp("raw_gate", "decode"), policy.clamp("decode_gate", "decode"))
    rows, columns = block_of(key_dim, value_dim)
    if batch:
        packed_decode_kernel[batch * heads,](
            qkv, z, raw_beta, raw_gate, conv_weight, A_log, dt_bias, norm_weight, window, state, new_window,
            new_state, out, slots, counts, flags, qkv.stride(0), z.stride(0), raw_beta.stride(0), raw_gate.stride(0),
            eps, *limits(of_rate), *limits(of_gate), *limits(of_state), H=keys, V=heads, K=key_dim, W=value_dim,
            WIDTH=width, L2_EPS=spec.L2_NORM_EPS, SCALE=key_dim**-0.5, IN_PLACE=in_place, HAS_SLOTS=slots is not None,
            CLAMPS_RATE=of_rate is not None, CLAMPS_GATE=of_gate is not None, CLAMPS_STATE=of_state is not None,
            RAISES_FLAGS=flags is not None, **launch_options(batch * heads, rows, columns),
        )  # fmt: skip
    return out, new_window, taps.observe(tap, taps.GDN_STATE, new_state)
