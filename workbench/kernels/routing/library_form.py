"""What the libraries' fused routers have in common: the call, and what they lack of the contract."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.errors import BackendError
from workbench.kernels.layout import row_major


def filled(
    route: Callable[..., object], name: str, logits: Tensor, top_k: int, dtype: torch.dtype | None, **settings: object
) -> tuple[Tensor, Tensor]:
    """Weights [tokens, A] in fp32 and experts [tokens, A] in int32, which `route` writes; `settings` are its own.

    Raises BackendError for a softmax in another dtype than fp32, which none of them takes.
    """
    if dtype not in (None, torch.float32):
        raise BackendError(f"{name} takes its softmax in float32, asked for {dtype}; leave the router dtype out")
    shape = (logits.shape[0], top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    route(
        topk_weights=weights, topk_ids=experts, token_expert_indices=torch.empty_like(experts),
        gating_output=row_major(logits), **settings,
    )  # fmt: skip
    return weights, experts


def with_faults(weights: Tensor, logits: Tensor) -> Tensor:
    """`weights` [tokens, A], NaN in the rows whose `logits` [tokens, E] have a NaN, +inf, or -inf alone.

    vLLM's kernel puts 0 in the place of a NaN, which would make a faulty token look like one that no expert serves. The
    largest logit of a row less itself is NaN there and 0 elsewhere: three small launches, one more pass over the
    logits, no host sync.
    """
    largest = logits.amax(-1, keepdim=True)
    return weights + (largest - largest)
