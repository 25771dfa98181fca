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

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.registry import Call
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap


def supports(call: Call) -> str | None:
    return None


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
        """[M, heads, C, W] -> [B, T, heads, W], padding rows dropped."""
        x = x.transpose(1, 2)  # [M, C, heads, W]
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


def cumulative_log_decay(log_decay: Tensor, policy: NumericsPolicy) -> tuple[Tensor, Tensor]:
    """G and the pairwise differences G_i - G_j, before any mask.

    log_decay [M, V, C] -> (G [M, V, C], differences [M, V, C, C]); both float64 under cumsum `float64`, else in the
    dtype of `log_decay`. Under `segsum` an entry above the diagonal is zero, an empty window.
    """
    if policy.cumsum == "float64":
        log_decay = log_decay.double()
    cumsum = log_decay.cumsum(-1)
    if policy.cumsum == "segsum":
        rows = log_decay.shape[-1]
        windows = log_decay[..., :, None].expand(*log_decay.shape, rows)
        return cumsum, windows.tril(-1).cumsum(-2)
    return cumsum, cumsum[..., :, None] - cumsum[..., None, :]


def pairwise_decay(cumsum: Tensor, differences: Tensor, exponent: str, dtype: torch.dtype) -> Tensor:
    """D [M, V, C, C] in `dtype` from G [M, V, C] and its differences, in the exponent form named by the policy."""
    rows = cumsum.shape[-1]
    upper = torch.ones(rows, rows, dtype=torch.bool, device=cumsum.device).triu_(1)
    if exponent == "difference_then_mask":
        return differences.to(dtype).masked_fill(upper, -torch.inf).exp()
    if exponent in ("factored", "factored_mask_after"):
        narrowed = cumsum.to(dtype)
        decay = narrowed.exp()[..., :, None] * (-narrowed).exp()[..., None, :]
    else:
        decay = differences.to(dtype).exp()
    if exponent in ("factored_mask_after", "mask_after"):
        return decay.masked_fill(upper, 0.0)
    return decay * ~upper  # inf * 0 is NaN: the fault that these forms are kept to show


def unit_lower_solve(kkt: Tensor, right: Tensor, solver: str) -> Tensor:
    """(I + kkt)^-1 right for a strictly lower kkt [M, V, C, C] and right [M, V, C, R]."""
    if solver == "solve_triangular":
        return torch.linalg.solve_triangular(kkt, right, upper=False, unitriangular=True)
    rows: list[Tensor] = []
    for i in range(kkt.shape[-1]):
        row = right[..., i, :]
        if rows:
            row = row - (kkt[..., i : i + 1, :i] @ torch.stack(rows, dim=-2)).squeeze(-2)
        rows.append(row)
    return torch.stack(rows, dim=-2)


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
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // key_heads
    dtype = torch.promote_types(q.dtype, torch.promote_types(torch.float32, getattr(torch, policy.state_dtype)))
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    chunk = min(policy.chunk, tokens)
    layout = chunk_layout(batch, tokens, chunk, bounds, q.device)

    q_MHCK, k_MHCK, v_MVCW = (layout.split(x).to(dtype) for x in (q, k, v))
    beta_MVC1 = layout.split(beta).to(dtype)[..., None]
    log_decay_MVC = layout.split(log_decay).to(torch.promote_types(log_decay.dtype, torch.float32))

    # State-free phase: everything that no chunk needs another one for.
    cumsum, differences = cumulative_log_decay(log_decay_MVC, policy)
    cumsum = taps.observe(tap, taps.GDN_CUMSUM, cumsum)
    decay = taps.observe(tap, taps.GDN_DECAY, pairwise_decay(cumsum, differences, policy.exponent, dtype))
    since_start = cumsum.to(dtype).exp()[..., None]  # [M, V, C, 1]
    until_end = differences[..., -1, :].to(dtype).exp()[..., None]
    if policy.exponent.startswith("factored"):
        until_end = since_start[..., -1:, :] * (-cumsum).to(dtype).exp()[..., None]

    def per_value_head(x: Tensor) -> Tensor:
        """[M, H, ...] -> [M, V, ...]: value head h reads key head h // group."""
        return x if group == 1 else x.repeat_interleave(group, dim=1)

    k_transposed = k_MHCK.transpose(-1, -2)
    k_MVCK = per_value_head(k_MHCK)
    kkt = (per_value_head(k_MHCK @ k_transposed) * decay * beta_MVC1).tril(-1)
    kkt = taps.observe(tap, taps.GDN_KKT, kkt)
    right = torch.cat([beta_MVC1 * v_MVCW, beta_MVC1 * since_start * k_MVCK], dim=-1)
    solved = None
    if tap is not None:
        # No step needs the inverse itself; it is formed for the observer, and used only where the observer changes it.
        inverse = unit_lower_solve(kkt, torch.eye(chunk, dtype=dtype, device=q.device).expand_as(kkt), policy.solver)
        seen = tap(taps.GDN_INVERSE, inverse)
        solved = seen @ right if seen is not inverse else None
    if solved is None:
        solved = unit_lower_solve(kkt, right, policy.solver)
    u = taps.observe(tap, taps.GDN_U, solved[..., :value_dim])
    w = taps.observe(tap, taps.GDN_W, solved[..., value_dim:])
    intra = taps.observe(tap, taps.GDN_INTRA, per_value_head(q_MHCK @ k_transposed) * decay)

    # One product with the state serves both v' = u - w S and the readout (q e^G) S.
    readers = torch.cat([w, per_value_head(q_MHCK) * since_start], dim=-2)  # [M, V, 2C, K]
    writers = (k_MVCK * until_end).transpose(-1, -2)  # [M, V, K, C]
    chunk_decay = since_start[..., -1:, :]  # [M, V, 1, 1]

    if initial_state is None:
        sequences = batch if bounds is None else len(bounds) - 1
        state = torch.zeros(sequences, value_heads, key_dim, value_dim, dtype=dtype, device=q.device)
    else:
        state = initial_state.to(dtype)
        state = state if layout.order is None else state[layout.order]
    readouts, corrections, states, finished = [], [], [], []
    first = 0
    for count in layout.active:
        if count < state.shape[0]:
            finished.append(state[count:])
            state = state[:count]
        here = slice(first, first + count)
        first += count
        read = readers[here] @ state  # [count, V, 2C, W]
        correction = u[here] - read[..., :chunk, :]
        state = torch.addcmul(writers[here] @ correction, chunk_decay[here], state)
        readouts.append(read[..., chunk:, :])
        corrections.append(correction)
        if tap is not None:
            states.append(state)
    inter = taps.observe(tap, taps.GDN_INTER, torch.cat(readouts))
    if tap is not None:
        tap(taps.GDN_STATE, torch.cat(states))
    out = layout.join(inter + intra @ torch.cat(corrections)).to(v.dtype)

    state = torch.cat([state, *reversed(finished)])
    if layout.order is not None:
        state = state[torch.argsort(layout.order)]
    return out, state
