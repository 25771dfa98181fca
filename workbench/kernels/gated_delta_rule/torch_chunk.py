"""The gated delta rule in chunks, PyTorch: a state-free phase for all chunks at once, then the sequential scan.

With G the cumulative log decay inside a chunk of C rows, D_ij = exp(G_i - G_j) for j <= i and 0 above:

    kkt   = strictly lower part of beta_i (k_i . k_j) D_ij          inverse = (I + kkt)^-1
    u     = inverse (beta v)                                       w       = inverse (beta e^G k)
    intra = (q k^T) D                                              scan, state S entering the chunk:
    v'    = u - w S,   inter = (q e^G) S,   o = inter + intra v',  S <- e^{G_C} S + (e^{G_C - G} k)^T v'

Inputs of any dtype, fp32 arithmetic (fp64 for fp64 inputs), output in the dtype of v. Where it may overflow depends
on `policy.exponent` alone: `difference_then_mask` takes exp of non-positive numbers only. Chunks of all sequences
are laid out in one list, step by step, sequences in order of falling length, so that step n of the scan is one slice.

Source: arXiv 2406.06484 section 3 (chunk form, WY representation) with the scalar gate of arXiv 2412.06464.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.registry import Call
from workbench.numerics import Clamp, NumericsPolicy
from workbench.taps import Tap


def supports(call: Call) -> str | None:
    """A solver of a library must solve a small system on the device; `auto` needs one of three that does.

    The others are products and sums, which every device has: nothing is run for them here.
    """
    solver = call.policy.solver
    if solver == "auto":
        reasons = [_refused(name, call) for name in AUTOMATIC_SOLVERS]
        return None if None in reasons else "no solver works here: " + "; ".join(filter(None, reasons))
    return _refused(solver, call) if solver == "solve_triangular" else None


def _refused(solver: str, call: Call) -> str | None:
    """Why a solver cannot serve a call: the rehearsed card lacks its primitive, or it fails where the tensors are."""
    if solver == "solve_triangular" and SOLVE_TRIANGULAR in call.machine.primitives:
        lacks = call.machine.primitives[SOLVE_TRIANGULAR]
        return f"solver {solver} needs {SOLVE_TRIANGULAR}, which {call.machine.name} lacks: {lacks}"
    return solver_refusal(solver, call.tensor_device)


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where the chunks of every sequence stand in one list of M chunks.

    `rows` [M, C] is the index of each chunk row in the flattened [B * T] tokens, B * T for a padding row; it is None
    for sequences of equal length, which are reshaped. Step n of the scan works on `active[n]` chunks, one for each
    of the first sequences of `order`.
    """

    batch: int
    tokens: int
    chunk: int
    rows: Tensor | None
    active: tuple[int, ...]
    order: Tensor | None

    def split(self, x: Tensor) -> Tensor:
        """[B, T, heads, ...] -> [M, heads, C, ...], padding rows zero."""
        tail = x.shape[2:]
        if self.rows is None:
            padding = len(self.active) * self.chunk - self.tokens
            if padding:
                x = torch.cat([x, x.new_zeros(self.batch, padding, *tail)], dim=1)
            x = x.view(self.batch, len(self.active), self.chunk, *tail).transpose(0, 1)
            x = x.reshape(-1, self.chunk, *tail)
        else:
            x = torch.cat([x.reshape(-1, *tail), x.new_zeros(1, *tail)])[self.rows]
        return x.transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """[M, C, heads, W] -> [B, T, heads, W], padding rows dropped."""
        tail = x.shape[2:]
        if self.rows is None:
            x = x.reshape(len(self.active), self.batch, self.chunk, *tail).transpose(0, 1)
            return x.reshape(self.batch, -1, *tail)[:, : self.tokens]
        flat = x.new_empty(self.batch * self.tokens + 1, *tail)
        flat = flat.index_copy(0, self.rows.flatten(), x.reshape(-1, *tail))
        return flat[:-1].view(self.batch, self.tokens, *tail)


def chunk_layout(batch: int, tokens: int, chunk: int, bounds: list[int] | None, device: torch.device) -> ChunkLayout:
    """The layout of `batch` sequences of `tokens` tokens, or of the packed sequences between `bounds`."""
    if bounds is None:
        steps = -(-tokens // chunk)
        return ChunkLayout(batch, tokens, chunk, None, (batch,) * steps, None)
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds).diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    steps = (lengths[order] + chunk - 1) // chunk  # falling
    active = tuple(int((steps > n).sum()) for n in range(int(steps[0])))
    within = torch.arange(chunk)
    rows = []
    for n, count in enumerate(active):
        offsets = n * chunk + within  # [C]
        chosen = order[:count]
        row = starts[chosen, None] + offsets
        rows.append(torch.where(offsets < lengths[chosen, None], row, tokens))
    return ChunkLayout(batch, tokens, chunk, torch.cat(rows).to(device), active, order.to(device))


#: Cumulative sums that are held in half precision, and the format.
NARROW_CUMSUMS = {"bfloat16": torch.bfloat16, "float16": torch.float16}

#: exp(x) = exp2(LOG2_E x).
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Exponents:
    """G [M, V, C] and the differences G_i - G_j [M, V, C, C] before any mask, in the form that `exp` takes.

    Under cumsum `float64` both are float64 and in base 2: the factor costs nothing there, is applied before rounding,
    and torch's exp2 takes a quarter of the time of its exp on a CPU, a twelfth where arguments are -inf. Otherwise
    they are natural and in the dtype of the gates; under `segsum` an entry above the diagonal is zero, an empty window.
    Under `bfloat16` and `float16` both are held, and exp is taken, in that format.
    """

    cumsum: Tensor
    differences: Tensor
    is_base_2: bool
    is_narrow: bool = False

    @classmethod
    def of(cls, log_decay: Tensor, cumsum: Tensor, kind: str) -> Exponents:
        """`cumsum` is the cumulative `log_decay`, both [M, V, C]; `kind` as in `numerics.CUMSUM_KINDS`."""
        is_base_2 = kind == "float64"
        if kind == "segsum":
            rows = log_decay.shape[-1]
            differences = log_decay[..., :, None].expand(*log_decay.shape, rows).tril(-1).cumsum(-2)
        else:
            if kind in NARROW_CUMSUMS:
                cumsum = cumsum.to(NARROW_CUMSUMS[kind])
            cumsum = cumsum * LOG2_E if is_base_2 else cumsum
            differences = cumsum[..., :, None] - cumsum[..., None, :]
        return cls(cumsum, differences, is_base_2, kind in NARROW_CUMSUMS)

    def limited(self, exponent: Tensor, clamp: Clamp | None) -> Tensor:
        """`exponent`, one of these or made of them, clamped to limits in nats."""
        return spec.limited(exponent, clamp, LOG2_E if self.is_base_2 else 1.0)

    def exp(self, exponent: Tensor, dtype: torch.dtype, mask: Tensor | None = None) -> Tensor:
        """exp of `cumsum`, `differences` or a part of them: rounded to `dtype`, `mask` added, then the exponential."""
        if self.is_narrow:
            return (exponent if mask is None else exponent + mask.to(exponent.dtype)).exp().to(dtype)
        rounded = exponent.to(dtype)
        if rounded is exponent:
            rounded = rounded.clone() if mask is None else rounded + mask
        elif mask is not None:
            rounded += mask
        return rounded.exp2_() if self.is_base_2 else rounded.exp_()


#: Forms in which the decay of a pair is a product of a factor for each of the two.
FACTORED_FORMS = ("factored", "factored_mask_after", "midpoint")


def anchor(cumsum: Tensor, form: str) -> Tensor | float:
    """What a factored form subtracts from G [M, V, C] before exp: nothing, or half-way between its ends [M, V, 1]."""
    return 0.5 * (cumsum[..., :1] + cumsum[..., -1:]) if form == "midpoint" else 0.0


def pairwise_decay(exponents: Exponents, form: str, dtype: torch.dtype) -> Tensor:
    """D [M, V, C, C] in `dtype`, in the exponent form named by the policy."""
    rows, device = exponents.cumsum.shape[-1], exponents.cumsum.device
    if form == "difference_then_mask":
        # Adding -inf above the diagonal is the mask: a masked fill takes seven times as long on a CPU.
        mask = torch.full((rows, rows), -torch.inf, dtype=dtype, device=device).triu_(1)
        return exponents.exp(exponents.differences, dtype, mask)
    upper = torch.ones(rows, rows, dtype=torch.bool, device=device).triu_(1)
    if form in FACTORED_FORMS:
        centred = exponents.cumsum - anchor(exponents.cumsum, form)
        rising, falling = exponents.exp(centred, dtype), exponents.exp(-centred, dtype)
        decay = rising[..., :, None] * falling[..., None, :]
    else:
        decay = exponents.exp(exponents.differences, dtype)
    if form in ("factored_mask_after", "midpoint", "mask_after"):
        return decay.masked_fill(upper, 0.0)
    return decay * ~upper  # inf * 0 is NaN: the fault that these forms are kept to show


#: Rows up to which inverses of diagonal blocks are built: by substitution, then by merging pairs.
LEAF_ROWS, BLOCK_ROWS = 8, 32


def diagonal_blocks(x: Tensor, rows: int) -> Tensor:
    """[P, C, C] -> the C / rows square blocks on the diagonal, [P, rows, rows, C / rows]."""
    count = x.shape[-1] // rows
    return x.reshape(-1, count, rows, count, rows).diagonal(dim1=1, dim2=3)


def block_inverses(lower: Tensor) -> Tensor:
    """Inverses of the unit lower triangular diagonal blocks of I + lower.

    lower [P, C, C] strictly lower, C a multiple of LEAF_ROWS times a power of two up to BLOCK_ROWS
    -> [P, C / rows, rows, rows] with rows = min(C, BLOCK_ROWS). The entries of these inverses are tame (|T_ij| <= 1
    for unit keys and beta in [0, 1]), so that products of them lose nothing; a series in powers of `lower` would.
    """
    pairs, size = lower.shape[:2]
    leaves = diagonal_blocks(lower, LEAF_ROWS).permute(1, 2, 0, 3).reshape(LEAF_ROWS, LEAF_ROWS, -1)  # [i, j, leaf]
    unit = torch.eye(LEAF_ROWS, dtype=lower.dtype, device=lower.device)[..., None].expand_as(leaves).unbind()
    entries = leaves.flatten(0, 1).unbind()
    rows: list[Tensor] = []
    for i in range(LEAF_ROWS):
        row = unit[i]
        for j in range(i):
            row = torch.addcmul(row, entries[i * LEAF_ROWS + j], rows[j], value=-1.0)
        rows.append(row)
    inverse = torch.stack(rows).permute(2, 0, 1).contiguous()  # [leaf, i, j]
    while (half := inverse.shape[-1]) < min(size, BLOCK_ROWS):
        # (I + [[A, 0], [B, D]])^-1 = [[A', 0], [-D' B A', D']] with A', D' known.
        below = diagonal_blocks(lower, 2 * half)[:, half:, :half].permute(0, 3, 1, 2).reshape(-1, half, half)
        first, second = inverse.view(-1, 2, half, half).unbind(1)
        corner = torch.bmm(second, torch.bmm(below, first)).neg_()
        inverse = torch.cat([F.pad(first, (0, half)), torch.cat([corner, second], dim=-1)], dim=-2)
    return inverse.view(pairs, -1, *inverse.shape[-2:])


def block_substitution(lower: Tensor, right: Tensor) -> Tensor:
    """(I + lower)^-1 right for [P, C, C] and [P, C, R], block row by block row."""
    size = lower.shape[-1]
    step = LEAF_ROWS
    while step < min(size, BLOCK_ROWS):
        step *= 2
    padding = -size % step
    if padding:  # rows of zeros: the identity
        lower = F.pad(lower, (0, padding, 0, padding))
        right = F.pad(right, (0, 0, 0, padding))
    inverses = block_inverses(lower)
    solved: list[Tensor] = []
    for block, start in enumerate(range(0, size, step)):
        rest = right[:, start : start + step]
        if solved:
            known = solved[0] if len(solved) == 1 else torch.cat(solved, dim=1)
            rest = torch.baddbmm(rest, lower[:, start : start + step, :start], known, alpha=-1.0)
        solved.append(torch.bmm(inverses[:, block], rest))
    return torch.cat(solved, dim=1)[:, :size]


def doubling_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 [..., C, C] as (I - lower)(I + lower^2)(I + lower^4)...: exact in exact arithmetic alone."""
    power = -lower
    inverse = power + torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    for _ in range(1, math.ceil(math.log2(max(2, lower.shape[-1])))):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def unit_lower_solve(kkt: Tensor, right: Tensor, solver: str, row_clamp: Clamp | None = None) -> Tensor:
    """(I + kkt)^-1 right for a strictly lower kkt [M, V, C, C] and right [M, V, C, R].

    `row_clamp` limits each row as soon as it is known (`row_loop` alone). `ungated_inverse` is not one of these
    solvers: it needs the matrix without decay, see `ungated_solve`.
    """
    if solver == "doubling":
        return doubling_inverse(kkt.tril(-1)) @ right
    if solver == "solve_triangular":
        return torch.linalg.solve_triangular(kkt, right, upper=False, unitriangular=True)
    if solver == "block_substitution":
        return block_substitution(kkt.flatten(0, 1), right.flatten(0, 1)).view(right.shape)
    rows: list[Tensor] = []
    for i in range(kkt.shape[-1]):
        row = right[..., i, :]
        if rows:
            row = row - (kkt[..., i : i + 1, :i] @ torch.stack(rows, dim=-2)).squeeze(-2)
        rows.append(spec.limited(row, row_clamp))
    return torch.stack(rows, dim=-2)


#: The operator behind the solver of the same name.
SOLVE_TRIANGULAR = "aten::linalg_solve_triangular"

#: What `auto` tries, in this order.
AUTOMATIC_SOLVERS = ("block_substitution", "solve_triangular", "row_loop")


@lru_cache(maxsize=64)
def solver_refusal(solver: str, device: str) -> str | None:
    """Why a solver cannot serve on a device, None where it can: it solves a small system there, once in a process.

    A library file says little: it may be absent and unneeded, or present and without the routine.
    """
    lower = torch.full((1, 1, 9, 9), 0.5).tril_(-1)
    right = torch.eye(9)[None, None]
    name = "block_substitution" if solver == "ungated_inverse" else solver
    try:
        solved = unit_lower_solve(lower.to(device), right.to(device), name).cpu()
    except (RuntimeError, NotImplementedError, AssertionError) as error:  # the last: torch built without the device
        return f"solver {solver} fails on {device} on a system of 9 rows: {str(error).splitlines()[0]}"
    exact = torch.linalg.inv(torch.eye(9, dtype=torch.float64) + lower[0, 0].double())
    off = (solved[0, 0].double() - exact).abs().max().item()
    return None if off < 1e-5 else f"solver {solver} is off by {off:.1e} on {device} on a system of 9 rows"


def chosen_solver(solver: str, device: str) -> str:
    """`solver` itself, or what `auto` stands for on the device: the first that solves a small system there."""
    if solver != "auto":
        return solver
    return next(name for name in AUTOMATIC_SOLVERS if solver_refusal(name, device) is None)


def ungated_solve(ungated: Tensor, decay: Tensor, right: Tensor) -> Tensor:
    """(I + kkt)^-1 right as (D o (I + ungated)^-1) right, with kkt = D o ungated below the diagonal.

    D_ij = e^(G_i) e^(-G_j) is a diagonal similarity in exact arithmetic; D itself is formed without either factor.
    """
    eye = torch.eye(right.shape[-2], dtype=right.dtype, device=right.device).expand_as(ungated)
    return (unit_lower_solve(ungated, eye, "block_substitution") * decay) @ right


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after another along the first axis; a single one as it is, which `torch.cat` would copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True)
class Scan:
    """The sequential part: state of the sequences still active, [sequences V, K, W], and of those that have ended."""

    state: Tensor
    finished: list[Tensor]


def evaluate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scan: Scan,
    active: Sequence[int],
    policy: NumericsPolicy,
    phase: str,
    tap: Tap | None,
) -> Tensor:
    """Chunks of consecutive steps: `active[n]` of them in step n. Moves `scan` on, returns the output [M, C, V, W].

    q, k [M, H, C, K], v [M, V, C, W] and beta [M, V, C] in the dtype of the arithmetic, log_decay [M, V, C] in fp32
    or better.
    """
    (_, key_heads, chunk, _), (_, value_heads, _, value_dim), dtype = q.shape, v.shape, q.dtype
    beta = beta[..., None]

    def by_key_head(x: Tensor) -> Tensor:
        """[M, V, ...] -> [M, H, V / H, ...]: value head h reads key head h // (V / H)."""
        return x.unflatten(1, (key_heads, value_heads // key_heads))

    # State-free: everything that no chunk needs another one for.
    if policy.cumsum == "float64":
        log_decay = log_decay.double()
    cumsum = taps.observe(tap, taps.GDN_CUMSUM, spec.limited(log_decay.cumsum(-1), policy.clamp("cumsum", phase)))
    exponents = Exponents.of(log_decay, cumsum, policy.cumsum)
    decay = taps.observe(tap, taps.GDN_DECAY, pairwise_decay(exponents, policy.exponent, dtype))
    since_start = exponents.exp(exponents.cumsum, dtype)[..., None]  # [M, V, C, 1]

    of_update = policy.clamp("state_update", phase)
    if policy.exponent in FACTORED_FORMS:
        middle = anchor(exponents.cumsum, policy.exponent)
        rising = exponents.exp(exponents.limited(exponents.cumsum[..., -1:] - middle, of_update), dtype)
        until_end = (rising * exponents.exp(exponents.limited(middle - exponents.cumsum, of_update), dtype))[..., None]
    else:
        until_end = exponents.exp(exponents.limited(exponents.differences[..., -1, :], of_update), dtype)[..., None]
    # The same exponential where nothing is clamped; one of its own for each place where a policy does.
    of_whole, of_keys, of_queries = (
        since_start if clamp is None else exponents.exp(exponents.limited(exponents.cumsum, clamp), dtype)[..., None]
        for clamp in (of_update, policy.clamp("k_decay", phase), policy.clamp("inter_attention", phase))
    )
    of_whole = of_whole[..., -1:, :]  # [M, V, 1, 1]
    del exponents

    k_transposed, k_grouped = k.transpose(-1, -2), k.unsqueeze(2)
    decay_grouped = by_key_head(decay)
    products = (k @ k_transposed).unsqueeze(2)
    kkt = (products * decay_grouped).flatten(1, 2).mul_(beta)
    ungated = (products * by_key_head(beta)).flatten(1, 2) if policy.solver == "ungated_inverse" else None
    if tap is not None:
        kkt = kkt.tril_(-1)  # no solver reads the diagonal or what is above it
        seen = tap(taps.GDN_KKT, kkt)
        # A matrix that an observer has changed has no form without decay any more.
        kkt, ungated = seen, ungated if seen is kkt else None
    scale = by_key_head(beta * of_keys)
    if torch.is_grad_enabled():
        right = torch.cat([beta * v, (scale * k_grouped).flatten(1, 2)], dim=-1)
    else:  # the same without a copy: both products are written where they belong
        right = v.new_empty(*v.shape[:-1], value_dim + k.shape[-1])
        torch.mul(v, beta, out=right[..., :value_dim])
        torch.mul(k_grouped, scale, out=by_key_head(right[..., value_dim:]))

    def solve(right: Tensor) -> Tensor:
        if ungated is not None:
            return ungated_solve(ungated, decay, right)
        solver = "block_substitution" if policy.solver == "ungated_inverse" else policy.solver
        solver = chosen_solver(solver, q.device.type)
        return unit_lower_solve(kkt, right, solver, policy.clamp("solve_rows", phase))

    solved = None
    if tap is not None:
        # No step needs the inverse itself; it is formed for the observer, and used only where the observer changes it.
        inverse = solve(torch.eye(chunk, dtype=dtype, device=q.device).expand_as(kkt))
        seen = tap(taps.GDN_INVERSE, inverse)
        solved = seen @ right if seen is not inverse else None
    if solved is None:
        solved = solve(right)
    u = taps.observe(tap, taps.GDN_U, solved[..., :value_dim])
    w = taps.observe(tap, taps.GDN_W, solved[..., value_dim:])
    intra = ((q @ k_transposed).unsqueeze(2) * decay_grouped).flatten(1, 2)
    intra = taps.observe(tap, taps.GDN_INTRA, intra)
    writers = (by_key_head(until_end) * k_grouped).flatten(1, 2)  # [M, V, C, K]
    readers = (by_key_head(of_queries) * q.unsqueeze(2)).flatten(1, 2)  # [M, V, C, K]

    # The scan, with sequences and value heads in one batch axis.
    counts = [count * value_heads for count in active]
    steps = zip(
        counts,
        u.flatten(0, 1).split(counts),
        w.flatten(0, 1).split(counts),
        writers.flatten(0, 1).transpose(-1, -2).split(counts),
        of_whole.flatten(0, 1).split(counts),
        strict=True,
    )
    entered, corrections, left = [], [], []
    of_state = policy.clamp("state", phase)
    has_empty = counts[0] < scan.state.shape[0]  # packed sequences without a token
    for count, u_now, w_now, writers_now, decay_now in steps:
        if count < scan.state.shape[0]:
            scan.finished.append(scan.state[count:])
            scan.state = scan.state[:count]
        entered.append(scan.state)
        correction = torch.baddbmm(u_now, w_now, scan.state, alpha=-1.0)  # v' = u - w S
        corrections.append(correction)
        scan.state = spec.limited((scan.state * decay_now).baddbmm_(writers_now, correction), of_state)
        if tap is not None:
            left.append(scan.state)
    if tap is not None:
        states = joined(left).unflatten(0, (-1, value_heads))
        seen = tap(taps.GDN_STATE, states)
        if seen is not states:  # chunks have read theirs by now: the last of each sequence is what is handed on
            parts = seen.flatten(0, 1).split(counts)
            ended = [part[count:] for part, count in zip(parts, counts[1:], strict=False) if count < part.shape[0]]
            scan.finished[int(has_empty) :] = ended
            scan.state = parts[-1]
    inter = torch.bmm(readers.flatten(0, 1), joined(entered)).view(v.shape)
    inter = taps.observe(tap, taps.GDN_INTER, inter)
    out = torch.baddbmm(inter.flatten(0, 1), intra.flatten(0, 1), joined(corrections))
    return out.view(v.shape).transpose(1, 2)


#: Byte budget of one matrix of the state-free phase: all value heads of a block of chunks, [C, C] or [C, K + W]
#: whichever is wider, of which about six are held at a time. Few enough for the caches of a CPU, many enough for a GPU,
#: where it bounds the memory (all chunks of 100k tokens at once would be 0.8 GB for [C, C] alone at 32 heads). An
#: observer sees all chunks at once, unless it takes parts.
BYTES_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 29}
#: The same for an observer that takes stages in parts (`taps.takes_parts`); about ten matrices are held for it.
OBSERVED_BYTES_AT_ONCE = 1 << 24


def groups(active: Sequence[int], matrices: int, limit: float) -> list[list[int]]:
    """Consecutive steps, as many as stay within `limit` bytes with `matrices` bytes a chunk, at least one."""
    parts: list[list[int]] = [[]]
    for count in active:
        if parts[-1] and (sum(parts[-1]) + count) * matrices > limit:
            parts.append([])
        parts[-1].append(count)
    return parts


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    policy: NumericsPolicy,
    tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:
    """See `spec` for shapes. Emits cumsum, decay, kkt, inverse, u, w, intra, inter and state to `tap`."""
    return run_in_parts(
        q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, policy=policy,
        tap=tap, limit=BYTES_AT_ONCE.get(q.device.type, BYTES_AT_ONCE["cuda"]),
    )  # fmt: skip


def run_in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    policy: NumericsPolicy,
    tap: Tap | None,
    limit: int,
) -> tuple[Tensor, Tensor]:
    """`run` with at most `limit` bytes a matrix in the state-free phase; 0 evaluates chunk after chunk."""
    batch, tokens, _, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    dtype = torch.promote_types(q.dtype, torch.promote_types(torch.float32, getattr(torch, policy.state_dtype)))
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    layout = chunk_layout(batch, tokens, min(policy.chunk, tokens), bounds, q.device)
    if initial_state is None:
        sequences = batch if bounds is None else len(bounds) - 1
        state = torch.zeros(sequences, value_heads, key_dim, value_dim, dtype=dtype, device=q.device)
    else:
        state = initial_state.to(dtype)
        state = state if layout.order is None else state[layout.order]
    scan = Scan(state.flatten(0, 1), [])
    phase = spec.phase_of(tokens)
    log_decay = spec.limited_gates(log_decay, policy, phase)

    q, k, v_split, log_decay, beta = (layout.split(x) for x in (q, k, v, log_decay, beta))
    log_decay = log_decay.to(torch.promote_types(log_decay.dtype, torch.float32))
    matrices = value_heads * layout.chunk * max(layout.chunk, key_dim + value_dim) * dtype.itemsize
    if tap is not None:
        limit = OBSERVED_BYTES_AT_ONCE if taps.takes_parts(tap) else math.inf
    parts = groups(layout.active, matrices, limit)
    outs, first = [], 0
    for active in parts:
        here = slice(first, first + sum(active))
        first = here.stop
        q_here, k_here = (x[here].to(dtype).contiguous() for x in (q, k))
        v_here, beta_here = (x[here].to(dtype) for x in (v_split, beta))
        outs.append(
            evaluate(
                q_here, k_here, v_here, log_decay[here], beta_here,
                scan=scan, active=active, policy=policy, phase=phase, tap=tap,
            )
        )  # fmt: skip
    out = layout.join(joined(outs)).to(v.dtype)

    state = torch.cat([scan.state, *reversed(scan.finished)]).unflatten(0, (-1, value_heads))
    return spec.without_nan(policy, out, state if layout.order is None else state[torch.argsort(layout.order)])
