"""The gated delta rule in chunks, CUDA C++ (csrc/chunk.cuh): one block of the scan for each sequence and value head.

A first kernel computes for all chunks at once what needs no state; a second one walks through the chunks of each
sequence and head with the state in registers. Operands of products are rounded to the dtype of v, sums are fp32. Blocks
have 128 value columns, so a head is one block; `cuda_chunk_split` is the same with blocks of 32.

Policies: every exponent form, cumsum and clamp of `torch_chunk`, chunks of 16, 32 and 64, solved by substitution.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from workbench import taps
from workbench.errors import BackendError
from workbench.kernels import cuda_build
from workbench.kernels.gated_delta_rule import library_form, spec
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.numerics import Clamp, NumericsPolicy
from workbench.taps import Tap

#: Tensor cores take the state, r and v' in the dtype of v.
ROUNDS_INSIDE = True
REQUIRES = Requires(devices=("cuda",), capability=(7, 5), dtypes=(torch.bfloat16, torch.float16, torch.float32))
FLAGS = (taps.GDN_STATE, taps.GDN_OUT)

#: Warps of a block of the scan side by side, with 16 value columns each.
WARPS, SPLIT_WARPS = 8, 2
#: Rows of a chunk that kernels exist for, and key sizes: a smaller one is filled up with zeros.
CHUNKS, KEY_SIZES = (16, 32, 64), (64, 128)

#: An unused stretch at the end of each row of shared memory, in bytes: rows that are read together begin in different
#: banks.
ROW_PADDING = 16

SOURCE = Path(__file__).parent / "csrc" / "chunk.cu"
ELEMENTS = {torch.float32: "float", torch.float16: "Float16", torch.bfloat16: "Bfloat16"}
#: In the order of ExponentForm and CumsumKind in csrc/chunk.cuh.
EXPONENT_FORMS = ("difference_then_mask", "mask_after", "multiply_mask", "factored", "factored_mask_after", "midpoint")
CUMSUM_KINDS = ("float64", "float32", "segsum", "bfloat16", "float16")
#: Stages that a build with ranges tells of, in the order of RangeStage.
RANGES = (
    taps.GDN_CUMSUM, taps.GDN_DECAY, taps.GDN_KKT, taps.GDN_INVERSE, taps.GDN_U, taps.GDN_W, taps.GDN_INTRA,
    taps.GDN_INTER, taps.GDN_STATE,
)  # fmt: skip
#: What the solve gives, where its rows are limited and where they are not: the other is not computed.
SOLVED = {True: (taps.GDN_U, taps.GDN_W), False: (taps.GDN_INVERSE,)}
SOLVERS = ("auto", "block_substitution", "solve_triangular", "row_loop")


class Limits(ctypes.Structure):
    """`Limits` of csrc/device.cuh."""

    _fields_ = (("low", ctypes.c_double), ("high", ctypes.c_double))

    @classmethod
    def of(cls, clamp: Clamp | None) -> Limits:
        return cls(-math.inf, math.inf) if clamp is None else cls(clamp.lo, clamp.hi)


_POINTERS = (
    "q", "k", "v", "log_decay", "beta", "initial_state", "out", "state", "inverse", "intra", "u", "factors",
    "chunk_table", "sequence_table", "ranges", "out_flag", "state_flag",
)  # fmt: skip
_NUMBERS = (
    "sequences", "tokens", "chunks", "key_heads", "value_heads", "key_dim", "value_dim", "exponent_form",
    "cumsum_kind", "keys_are_aligned", "values_are_aligned", "range_slots", "limits_state",
)  # fmt: skip
#: Clamps by their field of ChunkArguments.
_CLAMPS = {
    "cumsum": "cumsum", "k_decay": "k_decay", "inter_attention": "inter_attention", "state_update": "state_update",
    "solve_rows": "solve_rows", "state_limits": "state",
}  # fmt: skip


class ChunkArguments(ctypes.Structure):
    """`ChunkArguments` of csrc/chunk.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int) for name in _NUMBERS),
        *((name, Limits) for name in _CLAMPS),
    )  # fmt: skip


def chunk_rows(policy: NumericsPolicy, tokens: int) -> int:
    """Rows of the chunks of a call: those of the policy; the fewest there are for one token, which has no chunk."""
    return CHUNKS[0] if tokens == 1 else policy.chunk


def stage_bytes(
    dtype: torch.dtype, rows: int, key_dim: int, warps: int, limits_rows: bool, row_padding: int = ROW_PADDING
) -> int:
    """Shared memory of one stage of the scan: what csrc/chunk.cuh calls Stage::bytes."""
    size = dtype.itemsize
    padding = row_padding // size
    keys = padded_keys(key_dim) + padding
    tiles = 2 * keys + (16 * warps + padding) + (rows + padding) + (keys if limits_rows else rows + padding)
    return rows * tiles * size + (4 * rows + 4) * 4


def exchange_bytes(rows: int, warps: int, key_parts: int) -> int:
    """Shared memory behind the stages of the scan: what csrc/chunk.cuh calls Stage::exchange_bytes."""
    return 0 if key_parts == 1 else 2 * warps * rows * 16 * 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of the scan: `warps` side by side, each with `key_parts` that share its columns, `stages` chunks held."""

    warps: int
    key_parts: int
    stages: int


def blocks_of(dtype: torch.dtype, rows: int, key_dim: int, warps: int, limits_rows: bool, most: int) -> Blocks:
    """The blocks for what shared memory holds, `most` bytes: two warps for the same columns before two stages.

    Only the two warps of a split block get a second one each. At 16384 tokens on an H200 that took 8 % off its time;
    a second one for each of eight, with half of the registers, took longer: 2.30 ms in the place of 1.76.
    """
    stage = stage_bytes(dtype, rows, key_dim, warps, limits_rows)
    key_parts = 2 if warps == SPLIT_WARPS and stage + exchange_bytes(rows, warps, 2) <= most else 1
    stages = 2 if 2 * stage + exchange_bytes(rows, warps, key_parts) <= most else 1
    return Blocks(warps, key_parts, stages)


def padded_keys(key_dim: int) -> int:
    return next(size for size in KEY_SIZES if key_dim <= size)


def form_refusal(call: Call, warps: int) -> str | None:
    """What every kernel of this form refuses: gradients, policies, sizes, and GPUs with too little shared memory."""
    policy = call.policy
    if call.needs_grad:
        return "has no backward pass; name a torch backend for training"
    if policy.state_dtype != "float32":
        return f"holds the state in float32; the policy asks for {policy.state_dtype}; use torch_chunk"
    if call.tokens > 1 and policy.chunk not in CHUNKS:
        return f"has chunks of {', '.join(map(str, CHUNKS))} rows; the policy asks for {policy.chunk}; use torch_chunk"
    if call.tokens > 1 and policy.solver not in SOLVERS:
        return f"solves by substitution; the policy asks for solver {policy.solver}; use torch_chunk"
    if not call.weight_shape:
        return None
    key_dim = call.weight_shape[1]
    if key_dim > KEY_SIZES[-1]:
        return f"has kernels for key sizes up to {KEY_SIZES[-1]}, found {key_dim}"
    if call.machine.capability is None:
        return None
    rows, limits_rows = chunk_rows(policy, call.tokens), policy.clamp("solve_rows", "prefill") is not None
    needed = stage_bytes(call.dtype, rows, key_dim, warps, limits_rows)
    found = cuda_build.shared_bytes(call.machine.capability)
    if needed > found:
        return (
            f"needs {needed / 1024:.0f} KiB of shared memory for chunks of {rows} in {ELEMENTS[call.dtype]}, "
            f"{call.machine.name} has {found / 1024:.0f}; ask for a policy with a smaller chunk"
        )
    return None


def supports(call: Call) -> str | None:
    return form_refusal(call, WARPS) or (cuda_build.refusal() if call.machine.is_here else None)


@lru_cache(maxsize=256)
def tables(bounds: tuple[int, ...], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First row and rows of each chunk [N, 2], first chunk and chunks of each sequence [S, 2], int32 on the device."""
    chunks, sequences = [], []
    for start, stop in itertools.pairwise(bounds):
        first = len(chunks)
        chunks += [(row, min(rows, stop - row)) for row in range(start, stop, rows)]
        sequences.append((first, len(chunks) - first))
    chunk_table, sequence_table = (torch.tensor(x, dtype=torch.int32).reshape(-1, 2) for x in (chunks, sequences))
    return chunk_table.to(device), sequence_table.to(device)


def library(
    dtype: torch.dtype, key_dim: int, rows: int, blocks: Blocks, device: torch.device, row_padding: int = ROW_PADDING,
    with_ranges: bool = False,
) -> ctypes.CDLL:  # fmt: skip
    """The kernels for a dtype, key size, chunk and blocks on the device's architecture, built on first use."""
    macros = {
        "BUILD_ELEMENT": ELEMENTS[dtype], "BUILD_KEYS": str(padded_keys(key_dim)), "BUILD_ROWS": str(rows),
        "BUILD_WARPS": str(blocks.warps), "BUILD_KEY_PARTS": str(blocks.key_parts),
        "ROW_PADDING_BYTES": str(row_padding), "BUILD_RANGES": str(int(with_ranges)),
    }  # fmt: skip
    return cuda_build.built(SOURCE, macros, torch.cuda.get_device_capability(device))


def launch_stream(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def raise_for(code: int, found: ctypes.CDLL, what: str) -> None:
    """Raise BackendError where a launch returned an error of CUDA."""
    if code:
        raise BackendError(f"{what}: the launch failed with CUDA error {code}: {found.error_text(code).decode()}")


def run_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, policy: NumericsPolicy, tap: Tap | None, flags: Tensor | None, warps: int,
    row_padding: int = ROW_PADDING,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`run` with blocks of `warps` warps in the scan, and another padding of shared memory (0 or 16) to measure it."""
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    device, dtype = v.device, v.dtype
    phase, rows = spec.phase_of(tokens), chunk_rows(policy, tokens)
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    q, k, v = (row_major(x.to(dtype)) for x in (q, k, v))
    g, beta = library_form.gates(log_decay, policy, tokens), row_major(beta.to(torch.float32))
    if initial_state is not None:
        initial_state = row_major(initial_state.to(torch.float32))
    if bounds is None:
        sequences, chunks, chunk_table, sequence_table = batch, batch * -(-tokens // rows), None, None
    else:
        chunk_table, sequence_table = tables(tuple(bounds), rows, device)
        sequences, chunks = len(sequence_table), len(chunk_table)
    limits_rows = policy.clamp("solve_rows", phase) is not None

    def scratch(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(chunks, value_heads, *shape, dtype=of, device=device)

    tensors = {
        "q": q, "k": k, "v": v, "log_decay": g, "beta": beta, "initial_state": initial_state,
        "out": torch.empty_like(v),
        "state": torch.empty(sequences, value_heads, key_dim, value_dim, dtype=torch.float32, device=device),
        "inverse": scratch(rows, key_dim if limits_rows else rows), "intra": scratch(rows, rows),
        "u": scratch(rows, value_dim) if limits_rows else None,
        "factors": scratch(4 * rows + 4, of=torch.float32), "chunk_table": chunk_table,
        "sequence_table": sequence_table, "ranges": None,
        "state_flag": None if flags is None else flags[0], "out_flag": None if flags is None else flags[1],
    }  # fmt: skip
    blocks = blocks_of(dtype, rows, key_dim, warps, limits_rows, most_shared_bytes(device))
    with_ranges = tap is not None and taps.inside(tap) is not None and taps.takes_ranges(tap)
    if with_ranges:
        slots = max(rows // 16, blocks.key_parts * warps * -(-value_dim // (16 * warps)))
        nothing = torch.tensor([math.inf, -math.inf, 0.0, 0.0, 0.0], device=device)
        tensors["ranges"] = nothing.repeat(len(RANGES), chunks, value_heads, slots, 1)
    pieces = 16 // dtype.itemsize

    def is_aligned(size: int, *names: str) -> bool:
        return size % pieces == 0 and all(tensors[name].data_ptr() % 16 == 0 for name in names)

    arguments = ChunkArguments(
        **{name: None if x is None else x.data_ptr() for name, x in tensors.items()},
        sequences=sequences, tokens=tokens, chunks=chunks, key_heads=key_heads, value_heads=value_heads,
        key_dim=key_dim, value_dim=value_dim, exponent_form=EXPONENT_FORMS.index(policy.exponent),
        cumsum_kind=CUMSUM_KINDS.index(policy.cumsum), keys_are_aligned=is_aligned(key_dim, "q", "k"),
        values_are_aligned=is_aligned(value_dim, "v", "out"),
        range_slots=slots if with_ranges else 0, limits_state=policy.clamp("state", phase) is not None,
        **{field: Limits.of(policy.clamp(site, phase)) for field, site in _CLAMPS.items()},
    )  # fmt: skip
    found = library(dtype, key_dim, rows, blocks, device, row_padding, with_ranges)
    with torch.cuda.device_of(v):
        code = found.launch_chunks(ctypes.byref(arguments), blocks.stages, launch_stream(device))
    raise_for(code, found, f"gated_delta_rule in chunks of {rows}")
    if with_ranges:
        show_ranges(tap, tensors["ranges"], limits_rows, min(rows, tokens), key_dim, value_dim)
        tap = None  # the state after every chunk has been told, that of the last one among them
    return library_form.finished(tensors["out"], tensors["state"], policy, tap, like=v)


def show_ranges(tap: Tap, ranges: Tensor, limits_rows: bool, rows: int, key_dim: int, value_dim: int) -> None:
    """Show `tap` the ranges of the stages that were computed, [stages, N, V, warps, 5]; chunks sequence by sequence.

    u and w are stages where rows of the solve are limited, the inverse where they are not. `rows` are those of a chunk
    that a sequence can have.
    """
    columns = {
        taps.GDN_CUMSUM: (rows,), taps.GDN_U: (rows, value_dim), taps.GDN_W: (rows, key_dim),
        taps.GDN_INTER: (rows, value_dim), taps.GDN_STATE: (key_dim, value_dim),
    }  # fmt: skip
    for name, slots in zip(RANGES, ranges, strict=True):
        if name in SOLVED[not limits_rows]:
            continue
        shape = (*slots.shape[:2], *columns.get(name, (rows, rows)))
        values = torch.cat([slots[..., :1].amin(-2), slots[..., 1:2].amax(-2), slots[..., 2:].sum(-2)], dim=-1)
        tap.see_ranges(name, taps.Ranges(values, shape, torch.float32))


def most_shared_bytes(device: torch.device) -> int:
    return cuda_build.shared_bytes(torch.cuda.get_device_capability(device))


def path_in_blocks(q: Tensor, v: Tensor, policy: NumericsPolicy, warps: int) -> str:
    """The way that a call takes, for the attestation."""
    tokens, count = q.shape[1], -(-v.shape[3] // (16 * warps))
    rows, limits_rows = chunk_rows(policy, tokens), policy.clamp("solve_rows", spec.phase_of(tokens)) is not None
    blocks = blocks_of(v.dtype, rows, q.shape[3], warps, limits_rows, most_shared_bytes(v.device))
    return (
        f"chunks of {rows}, {count} block{'s' * (count > 1)} of {warps * blocks.key_parts} warps for each head, "
        f"{blocks.stages} chunk{'s' * (blocks.stages > 1)} in shared memory"
    )


def path(q: Tensor, k: Tensor, v: Tensor, *, policy: NumericsPolicy, **_others: object) -> str:
    """Which way through the kernels a call takes."""
    return path_in_blocks(q, v, policy, WARPS)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`. `flags` int32 [2, 2]: the words of FLAGS (see `tracing.flags`), raised in the kernel's epilogue.

    An observer of the stages inside that takes ranges (`taps.takes_ranges`) is shown them by another build of the
    kernels, which writes nothing else of them; any other one sees the state alone.
    """
    return run_in_blocks(
        q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, policy=policy,
        tap=tap, flags=flags, warps=WARPS,
    )  # fmt: skip
