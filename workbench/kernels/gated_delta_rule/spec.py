"""Contract of the gated delta rule, shared by every backend, the tests and the timings.

Per sequence and value head, with state S [K, W] and value head h reading key head h // (V / H):

    S <- exp(log_decay_t) S;   u = beta_t (v_t - S^T k_t);   S <- S + k_t u^T;   o_t = S^T q_t

``run(q, k, v, *, log_decay, beta, initial_state, cu_seqlens, policy, tap) -> (out, state)``

q, k          [B, T, H, K]  l2-normalised by the caller, q also times K**-0.5
v             [B, T, V, W]  V a multiple of H
log_decay     [B, T, V]     log space, finite and <= 0, fp32
beta          [B, T, V]     in [0, 1]
initial_state [S, V, K, W]  fp32, S sequences; None is zero
cu_seqlens    [S + 1]       int, on the CPU; then B is 1 and sequence s is rows cu_seqlens[s]:cu_seqlens[s + 1]
out           [B, T, V, W]  dtype of v
state         [S, V, K, W]  fp32 (fp64 when q or the state of the policy is), a new tensor

No axis is empty; every dtype is float64, float32, bfloat16 or float16. A backend refuses a policy that it cannot
honour (`supports`); a call of one token has nothing for exponent form, cumsum, solver and chunk to bind.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464; chunk form after arXiv 2406.06484.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.kernels.registry import Call
from workbench.numerics import ACCURATE_SOLVERS, LARGEST, Clamp, NumericsPolicy

OP = "gated_delta_rule"

#: Names of the dtypes that the op takes.
DTYPES = tuple(LARGEST)


def automatic_order(call: Call) -> tuple[str, ...]:
    """One token: the recurrence itself. More: chunks."""
    return ("torch_recurrent", "torch_chunk") if call.tokens == 1 else ("torch_chunk", "torch_recurrent")


def phase_of(tokens: int) -> str:
    """`decode` for a call of one token, `prefill` for any other: what the phase of a clamp refers to."""
    return "decode" if tokens == 1 else "prefill"


def limited(x: Tensor, clamp: Clamp | None, scale: float = 1.0) -> Tensor:
    """`x` within `scale` times the limits of `clamp`; NaN stays NaN. None changes nothing.

    A limit past what the dtype of `x` holds is its largest value: it cannot be written there, nor bind on what is
    finite.
    """
    if clamp is None:
        return x
    largest = torch.finfo(x.dtype).max
    lo, hi = (min(max(limit * scale, -largest), largest) for limit in (clamp.lo, clamp.hi))
    return x.clamp(lo, hi)


def form_refusal(policy: NumericsPolicy, tokens: int) -> str | None:
    """Why a form without chunks cannot honour the fields of a policy that describe chunks; None where it can.

    Differences that are masked before exp, a sum without rounding of its own and an accurate solver all give what the
    recurrence gives. Any other choice is one that shows in the result, of chunks alone. One token has none of them.
    """
    if tokens == 1:
        return None
    for field, honoured in (
        ("exponent", ("difference_then_mask",)), ("cumsum", ("float64", "segsum")), ("solver", ACCURATE_SOLVERS),
    ):  # fmt: skip
        found = getattr(policy, field)
        if found not in honoured:
            return f"the policy asks for {field} {found}, which only the chunked form has; use torch_chunk"
    return None


def limited_gates(log_decay: Tensor, policy: NumericsPolicy, phase: str) -> Tensor:
    """The gates of a call after the clamps that every form of the rule has: raw_gate and, in decode, decode_gate."""
    return limited(limited(log_decay, policy.clamp("raw_gate", phase)), policy.clamp("decode_gate", phase))


def without_nan(policy: NumericsPolicy, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The results of a call; where the policy asks for it, zero for each NaN and, as torch's function does by default,
    the largest or smallest number of the dtype for each infinity: what was done in the field."""
    return tuple(x.nan_to_num(nan=0.0) for x in tensors) if policy.nan_to_num else tensors


#: Dtypes of `cu_seqlens`.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def sequence_bounds(batch: int, tokens: int, cu_seqlens: Tensor | None) -> list[int] | None:
    """Boundaries of packed sequences as host integers, checked against the packed row; None when not packed."""
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor):
        raise InputError(
            f"cu_seqlens: expected a tensor of integers, found {type(cu_seqlens).__name__}; pass torch.tensor of it"
        )
    if cu_seqlens.dtype not in INTEGERS or cu_seqlens.dim() != 1 or cu_seqlens.is_meta:
        raise InputError(
            f"cu_seqlens: expected one axis of integers, found shape {tuple(cu_seqlens.shape)} of "
            f"{cu_seqlens.dtype} on {cu_seqlens.device}"
        )
    bounds = cu_seqlens.tolist()
    if batch != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or sorted(bounds) != bounds:
        raise InputError(
            f"cu_seqlens: expected boundaries that do not fall, from 0 to {tokens}, over one batch row, "
            f"found {bounds} over {batch} rows"
        )
    return bounds


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise InputError, naming the tensor, where types, shapes, dtypes or devices do not fit the contract."""
    given = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    if initial_state is not None:
        given["initial_state"] = initial_state
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"gated_delta_rule: {name}: expected a tensor, found {type(tensor).__name__}; torch.as_tensor makes one"
            )
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.layout != torch.strided:
            raise InputError(
                f"gated_delta_rule: expected floating point numbers, dense and of {', '.join(DTYPES)}, found {name} "
                f"{tensor.dtype} {tensor.layout}; convert them"
            )
    if q.dim() != 4 or v.dim() != 4:
        raise InputError(
            f"gated_delta_rule: expected q [B, T, H, K] and v [B, T, V, W], found {tuple(q.shape)} and {tuple(v.shape)}"
        )
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    for name, count in (
        ("sequence", batch), ("token", tokens), ("key head", key_heads), ("value head", value_heads),
        ("key channel", key_dim), ("value channel", value_dim),
    ):  # fmt: skip
        if count == 0:
            raise InputError(f"gated_delta_rule: expected at least one {name}, found 0")
    bounds = sequence_bounds(batch, tokens, cu_seqlens)
    sequences = batch if bounds is None else len(bounds) - 1
    expected = {
        "k": (k, (batch, tokens, key_heads, key_dim)),
        "v": (v, (batch, tokens, value_heads, value_dim)),
        "log_decay": (log_decay, (batch, tokens, value_heads)),
        "beta": (beta, (batch, tokens, value_heads)),
    }
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (sequences, value_heads, key_dim, value_dim))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise InputError(f"gated_delta_rule: {name}: expected shape {shape}, found {tuple(tensor.shape)}")
        if tensor.device != q.device:
            raise InputError(f"gated_delta_rule: {name}: expected device {q.device} as q, found {tensor.device}")
    if value_heads % key_heads:
        raise InputError(
            f"gated_delta_rule: value heads: expected a multiple of the {key_heads} key heads, found {value_heads}"
        )


def check_gates(log_decay: Tensor) -> None:
    """Raise InputError where a log decay is above 0 or -inf: the first place, how many, and the likely cause.

    -inf is a decay of exactly 0. The recurrence takes it, but chunks form differences of cumulative log decays, and
    -inf - -inf is NaN. Reads the values, so on a GPU the host waits for them: for calls from outside, not for those of
    a model, whose gates are -exp(A_log) softplus(a + dt_bias). NaN passes, as every other input's does. Tensors
    without data are not read.
    """
    if log_decay.is_meta:
        return
    gates = log_decay.detach()
    above, zero = gates > 0, gates == -torch.inf
    if not bool((above | zero).any()):
        return
    if not bool(above.any()):
        row, token, head = zero.nonzero()[0].tolist()
        raise InputError(
            f"gated_delta_rule: log_decay: expected finite values, found -inf at batch row {row}, token {token}, head "
            f"{head}, {int(zero.sum())} of {gates.numel()}; the logarithm of a decay of 0, whose differences in a "
            "chunk are NaN; pass a large finite number such as -1e4"
        )
    known = gates[~gates.isnan()]
    causes = {"alpha": "alpha passed for log alpha", "raw": "raw `a` passed as g", "sign": "sign lost"}
    likely = "raw" if bool((known < 0).any()) else "alpha" if bool((known <= 1).all()) else "sign"
    others = ", ".join(text for name, text in causes.items() if name != likely)
    row, token, head = above.nonzero()[0].tolist()
    raise InputError(
        f"gated_delta_rule: log_decay: expected <= 0 everywhere, found {gates[row, token, head].item():g} at batch row "
        f"{row}, token {token}, head {head}, {int(above.sum())} of {gates.numel()} above 0; likely {causes[likely]}, "
        f"else {others}; pass -exp(A_log) softplus(a + dt_bias)"
    )


def example(
    *,
    batch: int = 1,
    tokens: int = 128,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 24,
    log_decay: float | Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Valid inputs for tests and timings: unit keys, scaled queries, gates as given or drawn from -U(0, 2)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q = torch.nn.functional.normalize(normal(batch, tokens, key_heads, key_dim), dim=-1) * key_dim**-0.5
    k = torch.nn.functional.normalize(normal(batch, tokens, key_heads, key_dim), dim=-1)
    v = normal(batch, tokens, value_heads, value_dim)
    beta = torch.rand(batch, tokens, value_heads, generator=generator)
    if log_decay is None:
        gates = -2.0 * torch.rand(batch, tokens, value_heads, generator=generator)
    elif isinstance(log_decay, Tensor):
        gates = log_decay.expand(batch, tokens, value_heads).clone()
    else:
        gates = torch.full((batch, tokens, value_heads), float(log_decay))
    inputs = {"q": q, "k": k, "v": v, "beta": beta}
    moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in inputs.items()}
    return moved | {"log_decay": gates.to(device=device, dtype=torch.float32)}
