"""Valid inputs on which wrong forms of the gated delta rule fail, and random inputs do not show it.

Each entry of `EXTREMES` is a function of (tokens, seed) that returns the keyword arguments of the op, fp32, unit keys,
log decays <= 0 and beta in (0, 1): a correct backend is close to the arbiter on all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.kernels.gated_delta_rule import spec

Inputs = dict[str, Tensor]


def _draw(seed: int) -> torch.Generator:
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


def correlated_keys(tokens: int, seed: int = 0) -> Inputs:
    """Keys with correlation 0.5, beta 0.9, no decay: a series for the inverse cancels, substitution does not."""
    inputs = spec.example(tokens=tokens, log_decay=0.0, seed=seed)
    common = inputs["k"][:, :1]
    inputs["k"] = torch.nn.functional.normalize(inputs["k"] + common, dim=-1)
    inputs["beta"] = torch.full_like(inputs["beta"], 0.9)
    return inputs


def strong_decay(tokens: int, seed: int = 0) -> Inputs:
    """-20 nats for each token, what A = 16 with a softplus of 1.25 gives: -1280 in a chunk of 64."""
    return spec.example(tokens=tokens, log_decay=-20.0, seed=seed)


def no_decay(tokens: int, seed: int = 0) -> Inputs:
    """Nothing is ever forgotten."""
    return spec.example(tokens=tokens, log_decay=0.0, seed=seed)


def mixed_decay(tokens: int, seed: int = 0) -> Inputs:
    """-20 and -1e-6 at random in one chunk: differences of an fp32 cumulative sum lose the small ones."""
    strong = torch.rand(1, tokens, 1, generator=_draw(seed)) < 0.5
    return spec.example(tokens=tokens, log_decay=torch.where(strong, -20.0, -1e-6), seed=seed)


def sparse_resets(tokens: int, seed: int = 0) -> Inputs:
    """-72 on a tenth of the tokens, -1e-3 on the others."""
    strong = torch.rand(1, tokens, 1, generator=_draw(seed)) < 0.1
    return spec.example(tokens=tokens, log_decay=torch.where(strong, -72.0, -1e-3), seed=seed)


def spikes(tokens: int, seed: int = 0) -> Inputs:
    """-90 every 100th token from the 7th, -0.01 on the others: one spike passes the exponent limit of fp32."""
    gates = torch.full((1, tokens, 1), -0.01)
    gates[:, 7 % tokens :: 100] = -90.0
    return spec.example(tokens=tokens, log_decay=gates, seed=seed)


def grown_state(tokens: int, seed: int = 0) -> Inputs:
    """A state a hundred times the values enters and lasts: small beta, slow decay, so that its readout dominates."""
    inputs = spec.example(tokens=tokens, log_decay=-0.01, seed=seed)
    inputs["beta"] = 0.1 * inputs["beta"]
    key_dim, (value_heads, value_dim) = inputs["k"].shape[-1], inputs["v"].shape[2:]
    inputs["initial_state"] = 100.0 * torch.randn(1, value_heads, key_dim, value_dim, generator=_draw(seed))
    return inputs


EXTREMES: dict[str, Callable[[int, int], Inputs]] = {
    function.__name__: function
    for function in (
        random_gates, repeated_keys, correlated_keys, strong_decay, no_decay, mixed_decay, sparse_resets, spikes,
        grown_state,
    )
}  # fmt: skip
