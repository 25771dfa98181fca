"""What the libraries' gated delta rules have in common: the policies they honour, and how packed rows are handed over.

All of them compute by one fixed policy, a preset. Of a policy the adapters add what lies outside the kernel: the clamps
of single gates before the call, and zero for NaN after it. Everything else must be what the library does.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.numerics import PRESETS, NumericsPolicy
from workbench.taps import Tap

#: Clamps that act before the op: on A_log by the model, on each gate by the adapter.
GATE_SITES = ("A_log", "raw_gate", "decode_gate")


def policy_refusal(call: Call, preset: str) -> str | None:
    """Why a library that computes by `preset` cannot honour the call's policy; None where it can.

    One token has no chunk: there only a clamp on the state and a wider state are out of reach.
    """
    policy = call.policy
    for clamp in policy.clamps:
        if clamp.site not in GATE_SITES and (call.tokens > 1 or clamp.site == "state"):
            return f"computes by policy {preset}, which clamps nothing inside; the policy clamps {clamp.site}"
    if policy.state_dtype != "float32":
        return f"computes by policy {preset} with a state of float32; the policy asks for {policy.state_dtype}"
    if call.tokens == 1:
        return None
    theirs = PRESETS[preset]
    for field in ("exponent", "cumsum", "solver", "chunk"):
        asked, done = getattr(policy, field), getattr(theirs, field)
        if asked != done:
            return f"computes by policy {preset}: {field} {done}; the policy asks for {asked}"
    return None


def common_refusal(call: Call, preset: str) -> str | None:
    """Why none of the libraries' kernels may serve the call: a backward pass, or the policy."""
    if call.needs_grad:
        return "its backward pass is not held to the contract; name a torch backend for training"
    return policy_refusal(call, preset)


def size_refusal(call: Call, only: int | None = None, most: int | None = None) -> str | None:
    """Why the library's kernels cannot take the head sizes: `only` K = W of one size, or each up to `most`."""
    if not call.weight_shape:
        return None
    key_dim, value_dim = call.weight_shape[1:]
    if only is not None and (key_dim, value_dim) != (only, only):
        return f"has kernels for K = W = {only} alone, found K {key_dim}, W {value_dim}"
    if most is not None and max(key_dim, value_dim) > most:
        return f"has kernels for head sizes up to {most}, found K {key_dim}, W {value_dim}"
    return None


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a call without the empty ones, for which no kernel promises anything.

    bounds  [S' + 1] host integers over the flattened rows [B T, ...]
    kept    the places of these sequences among all
    total   S, the number of all
    """

    bounds: tuple[int, ...]
    kept: tuple[int, ...]
    total: int

    def cu_seqlens(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[S' + 1] boundaries on the device; the same tensor for the same boundaries, which nobody may write to."""
        return _on_device(self.bounds, device, dtype)

    def initial(self, state: Tensor | None) -> Tensor | None:
        """The states of the sequences that are not empty, fp32, a copy that a kernel may write over."""
        if state is None:
            return None
        chosen = state[list(self.kept)] if len(self.kept) < self.total else state.clone()
        return row_major(chosen.to(torch.float32))

    def final(self, states: Tensor, initial: Tensor | None) -> Tensor:
        """[S, ...] states after the call: an empty sequence keeps the one that it came with."""
        if len(self.kept) == self.total:
            return states
        out = states.new_zeros(self.total, *states.shape[1:]) if initial is None else initial.to(states.dtype).clone()
        out[list(self.kept)] = states
        return out


@functools.lru_cache(maxsize=64)
def _on_device(bounds: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    # Kept, since a copy to the device makes the host wait: a call of a shape seen before can be captured in a graph.
    with torch.inference_mode(False):
        return torch.tensor(bounds, dtype=dtype, device=device)


def sequences_of(batch: int, tokens: int, cu_seqlens: Tensor | None) -> Sequences:
    """The sequences of a call: the packed ones, or one for each batch row."""
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    bounds = [row * tokens for row in range(batch + 1)] if bounds is None else bounds
    kept = tuple(i for i, (start, stop) in enumerate(itertools.pairwise(bounds)) if stop > start)
    return Sequences((*(bounds[i] for i in kept), bounds[-1]), kept, len(bounds) - 1)


def flat(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B T, ...], row-major: packed rows as the libraries take them."""
    return row_major(x.reshape(-1, *x.shape[2:]))


def finished(
    out: Tensor, state: Tensor, policy: NumericsPolicy, tap: Tap | None, *, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Output in shape and dtype of v (`like`), state in fp32 and shown to `tap`, NaN replaced where the policy asks."""
    state = taps.observe(tap, taps.GDN_STATE, state.to(torch.float32))
    return spec.without_nan(policy, out.reshape(like.shape).to(like.dtype), state)


def gates(log_decay: Tensor, policy: NumericsPolicy, tokens: int) -> Tensor:
    """Log decays in fp32, row-major, after the policy's clamps of single gates."""
    return row_major(spec.limited_gates(log_decay, policy, spec.phase_of(tokens)).to(torch.float32))

