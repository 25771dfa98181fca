"""Inputs of the gated delta rule that keep its contract and kill wrong forms of it, where random inputs let them pass.

Unit keys, log decay <= 0, beta in [0, 1]: a correct form is within LIMIT of the arbiter on each of them, in output and
final state. Each says which fault it provokes, and which policies it breaks and spares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.gated_delta_rule import spec
from workbench.numerics import PRESETS

#: Keyword arguments of the op.
Inputs = dict[str, Tensor]

#: Largest relative error, of output and of final state, of a form that survives (fp32 inputs).
LIMIT = 3e-6


def draw(seed: int) -> torch.Generator:
    """A generator apart from those of `spec.example`, for what an input adds to one."""
    return torch.Generator().manual_seed(1000 + seed)


def random_gates(tokens: int, seed: int = 0) -> Inputs:
    """No extreme: gates from -U(0, 2). The only case that a random test would have."""
    return spec.example(tokens=tokens, seed=seed)


def repeated_keys(tokens: int, seed: int = 0) -> Inputs:
    """One key for all tokens, beta close to 1, hardly any decay: powers of the kkt matrix reach 1e15."""
    inputs = spec.example(tokens=tokens, log_decay=-1e-3, seed=seed)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = 0.99 + 0.0099 * inputs["beta"]
    return inputs


def repeated_keys_at_one_beta(tokens: int, seed: int = 0) -> Inputs:
    """One key, beta 0.835 and -1e-3 for every token: where a half-precision inverse was met in the field."""
    inputs = repeated_keys(tokens, seed)
    inputs["beta"] = torch.full_like(inputs["beta"], 0.835)
    return inputs


def correlated_keys(tokens: int, seed: int = 0) -> Inputs:
    """Keys with correlation 0.5, beta 0.9, no decay: a series for the inverse cancels, substitution does not."""
    inputs = spec.example(tokens=tokens, log_decay=0.0, seed=seed)
    common = inputs["k"][:, :1]
    inputs["k"] = torch.nn.functional.normalize(inputs["k"] + common, dim=-1)
    inputs["beta"] = torch.full_like(inputs["beta"], 0.9)
    return inputs


def beta_at_its_ends(tokens: int, seed: int = 0) -> Inputs:
    """beta 0 or 1, what a saturated sigmoid rounds to: a token that writes nothing, or overwrites all of its key."""
    inputs = spec.example(tokens=tokens, log_decay=-0.05, seed=seed)
    inputs["beta"] = inputs["beta"].round()
    return inputs


def zero_keys(tokens: int, seed: int = 0) -> Inputs:
    """Queries and keys of zero on a third of the tokens, what l2norm leaves of a padding row: nothing to divide by."""
    inputs = spec.example(tokens=tokens, log_decay=-0.05, seed=seed)
    for name in ("q", "k"):
        inputs[name][:, ::3] = 0.0
    return inputs


def strong_decay(tokens: int, seed: int = 0) -> Inputs:
    """-20 nats for each token, what A = 16 with a softplus of 1.25 gives: -1280 in a chunk of 64."""
    return spec.example(tokens=tokens, log_decay=-20.0, seed=seed)


def decay_at_the_limit(tokens: int, seed: int = 0) -> Inputs:
    """-1.39 for each token: 88.96 nats in a chunk of 64, a quarter of a nat past what exp can return in fp32."""
    return spec.example(tokens=tokens, log_decay=-1.39, seed=seed)


def no_decay(tokens: int, seed: int = 0) -> Inputs:
    """Nothing is ever forgotten."""
    return spec.example(tokens=tokens, log_decay=0.0, seed=seed)


def mixed_decay(tokens: int, seed: int = 0) -> Inputs:
    """-20 and -1e-6 at random in one chunk: differences of an fp32 cumulative sum lose the small ones."""
    strong = torch.rand(1, tokens, 1, generator=draw(seed)) < 0.5
    return spec.example(tokens=tokens, log_decay=torch.where(strong, -20.0, -1e-6), seed=seed)


def sparse_resets(tokens: int, seed: int = 0) -> Inputs:
    """-72 on a tenth of the tokens, -1e-3 on the others."""
    strong = torch.rand(1, tokens, 1, generator=draw(seed)) < 0.1
    return spec.example(tokens=tokens, log_decay=torch.where(strong, -72.0, -1e-3), seed=seed)


def spikes(tokens: int, seed: int = 0) -> Inputs:
    """-90 every 100th token from the 7th, -0.01 on the others: one spike passes the exponent limit of fp32."""
    gates = torch.full((1, tokens, 1), -0.01)
    gates[:, 7 % tokens :: 100] = -90.0
    return spec.example(tokens=tokens, log_decay=gates, seed=seed)


def heads_apart(tokens: int, seed: int = 0) -> Inputs:
    """One gate per head: never, hardly, at once and far beyond exp's range. A limit taken over all heads fails one."""
    return spec.example(tokens=tokens, log_decay=torch.tensor([0.0, -1e-6, -16.0, -300.0]), seed=seed)


def grown_state(tokens: int, seed: int = 0) -> Inputs:
    """A state a hundred times the values enters and lasts: small beta, slow decay, so that its readout dominates."""
    return _entered(tokens, seed, 100.0)


def state_beyond_fp16(tokens: int, seed: int = 0) -> Inputs:
    """The same with a state of 1e6: a readout or a state in fp16 is infinite, one that is limited is wrong."""
    return _entered(tokens, seed, 1e6)


def _entered(tokens: int, seed: int, size: float) -> Inputs:
    inputs = spec.example(tokens=tokens, log_decay=-0.01, seed=seed)
    inputs["beta"] = 0.1 * inputs["beta"]
    key_dim, (value_heads, value_dim) = inputs["k"].shape[-1], inputs["v"].shape[2:]
    inputs["initial_state"] = size * torch.randn(1, value_heads, key_dim, value_dim, generator=draw(seed))
    return inputs


#: Lengths of the sequences of `ragged_tails`, in turn: a row short of a chunk of 64, a row more, one token, no tail.
RAGGED_LENGTHS = (63, 65, 1, 64)


def ragged_tails(tokens: int, seed: int = 0) -> Inputs:
    """Packed sequences of 63, 65, 1 and 64 tokens, resets among weak gates, a state each: padding must stay inert."""
    inputs = sparse_resets(tokens, seed)
    bounds = [0]
    for length in itertools.cycle(RAGGED_LENGTHS):
        if bounds[-1] == tokens:
            break
        bounds.append(min(tokens, bounds[-1] + length))
    key_dim, (value_heads, value_dim) = inputs["k"].shape[-1], inputs["v"].shape[2:]
    state = torch.randn(len(bounds) - 1, value_heads, key_dim, value_dim, generator=draw(seed))
    return inputs | {"cu_seqlens": torch.tensor(bounds), "initial_state": state}


def one_token_tail(tokens: int, seed: int = 0) -> Inputs:
    """Whole chunks of 64 and one token more, the next such length: 63 padding rows behind a reset of -20."""
    return spec.example(tokens=64 * max(1, -(-(tokens - 1) // 64)) + 1, log_decay=-20.0, seed=seed)


# What the presets have in common, for the table below.
_EXACT = ("safe", "segsum")
_FP32_SUMS = ("fp32_cumsum", "transformers", "fla", "vllm", "flashinfer")
_MASKED_LATE = ("mask_after", "multiply_mask")
_FACTORED = ("factored", "factored_mask_after")
_TIGHT_CLAMPS = ("clamp_cumsum_20", "clamp_cumsum_20_prefill", "five_clamps")
_CLAMPS = (*_TIGHT_CLAMPS, "clamp_all_exponents_80", "clamp_gate_5_2")
_GENTLE = (*_EXACT, *_FP32_SUMS, *_MASKED_LATE, *_FACTORED, "midpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidExtreme:
    """`make(tokens, seed)` gives the keyword arguments of the op. `provokes` is the fault that shows on them.

    `survivors` and `victims` are presets: the first must be within LIMIT, the second far from it or not finite,
    from 130 tokens on. A preset in neither loses digits or depends on the draw.
    """

    make: Callable[[int, int], Inputs]
    provokes: str
    survivors: tuple[str, ...]
    victims: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.make.__name__


VALID_EXTREMES: dict[str, ValidExtreme] = {
    extreme.name: extreme
    for extreme in (
        ValidExtreme(
            make=random_gates, provokes="nothing but limits that bind on ordinary gates",
            survivors=(*_GENTLE, "doubling", "clamp_gate_5_2"),
            victims=(*_TIGHT_CLAMPS, "bf16_cumsum", "fp16_factored"),
        ),
        ValidExtreme(
            make=repeated_keys, provokes="an inverse by a series, whose terms cancel",
            survivors=(*_GENTLE, *_CLAMPS), victims=("doubling", "fp16_factored"),
        ),
        ValidExtreme(
            make=repeated_keys_at_one_beta, provokes="an inverse by a series, whose terms cancel",
            survivors=(*_GENTLE, *_CLAMPS), victims=("doubling", "bf16_cumsum", "fp16_factored"),
        ),
        ValidExtreme(
            make=correlated_keys, provokes="an inverse by a series, and nothing else: there is no decay",
            survivors=(*_GENTLE, *_CLAMPS, "bf16_cumsum", "fp16_factored"), victims=("doubling",),
        ),
        ValidExtreme(
            make=beta_at_its_ends, provokes="a division by beta, or a logarithm of it or of 1 - beta",
            survivors=(*_GENTLE, *_CLAMPS, "doubling"), victims=("bf16_cumsum", "fp16_factored"),
        ),
        ValidExtreme(
            make=zero_keys, provokes="a normalisation inside the op without an epsilon",
            survivors=(*_GENTLE, *_CLAMPS, "doubling"), victims=("bf16_cumsum", "fp16_factored"),
        ),
        ValidExtreme(
            make=strong_decay, provokes="exp of a positive difference or of -G, in every chunk of 6 tokens or more",
            survivors=(*_EXACT, *_FP32_SUMS, "mask_after", "doubling"),
            victims=(*_FACTORED, *_CLAMPS, "midpoint", "multiply_mask", "fp16_factored", "nan_to_num"),
        ),
        ValidExtreme(
            make=decay_at_the_limit, provokes="exp(-G) at chunk 64, and at no smaller chunk",
            survivors=(*_EXACT, *_FP32_SUMS, *_MASKED_LATE, "midpoint", "doubling", "clamp_gate_5_2"),
            victims=(
                *_FACTORED, *_TIGHT_CLAMPS, "clamp_all_exponents_80", "bf16_cumsum", "fp16_factored", "nan_to_num",
            ),
        ),
        ValidExtreme(
            make=no_decay, provokes="a division by the decay, and drift of a state that only grows",
            survivors=tuple(PRESETS),
        ),
        ValidExtreme(
            make=mixed_decay, provokes="cancellation in differences of an fp32 cumulative sum; exp past its limit",
            survivors=(*_EXACT, "doubling"),
            victims=(*_FACTORED, *_CLAMPS, "midpoint", "multiply_mask", "fp16_factored", "nan_to_num"),
        ),
        ValidExtreme(
            make=sparse_resets, provokes="cancellation in differences of an fp32 cumulative sum; exp past its limit",
            survivors=(*_EXACT, "doubling"),
            victims=(
                *_FACTORED, *_CLAMPS, "midpoint", "multiply_mask", "bf16_cumsum", "fp16_factored", "nan_to_num",
            ),
        ),
        ValidExtreme(
            make=spikes, provokes="exp past its limit in the rows before one strong gate, or in its whole chunk",
            survivors=(*_EXACT, "doubling"),
            victims=(*_FACTORED, *_CLAMPS, "multiply_mask", "bf16_cumsum", "fp16_factored", "nan_to_num"),
        ),
        ValidExtreme(
            make=heads_apart, provokes="a limit, a maximum or an anchor that is taken over all heads at once",
            survivors=(*_EXACT, *_FP32_SUMS, "mask_after", "doubling"),
            victims=(*_FACTORED, *_CLAMPS, "midpoint", "multiply_mask", "fp16_factored", "nan_to_num"),
        ),
        ValidExtreme(
            make=grown_state, provokes="a readout of the state with fewer digits than the state has",
            survivors=(*_GENTLE, *_CLAMPS, "doubling"), victims=("bf16_cumsum", "fp16_factored"),
        ),
        ValidExtreme(
            make=state_beyond_fp16, provokes="a state that is kept, read or limited within what fp16 holds",
            survivors=(*_GENTLE, "doubling"),
            victims=("clamp_gate_5_2", "five_clamps", "bf16_cumsum", "fp16_factored"),
        ),
        ValidExtreme(
            make=ragged_tails, provokes="padding rows that decay, write or are read; a state handed to a neighbour",
            survivors=(*_EXACT, "doubling"),
            victims=(*_FACTORED, *_CLAMPS, "midpoint", "multiply_mask", "fp16_factored", "nan_to_num"),
        ),
        ValidExtreme(
            make=one_token_tail, provokes="padding gates read as zero behind a strong one: a positive difference",
            survivors=(*_EXACT, *_FP32_SUMS, "mask_after", "doubling"),
            victims=(*_FACTORED, *_CLAMPS, "midpoint", "multiply_mask", "fp16_factored", "nan_to_num"),
        ),
    )
}  # fmt: skip
