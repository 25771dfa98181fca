"""What the libraries' fused routers lack of the contract: a row that has no softmax."""

from __future__ import annotations

from torch import Tensor


def with_faults(weights: Tensor, logits: Tensor) -> Tensor:
    """`weights` [tokens, A], NaN in the rows whose `logits` [tokens, E] have a NaN, +inf, or -inf alone.

    vLLM's kernel puts 0 in the place of a NaN, which would make a faulty token look like one that no expert serves. The
    largest logit of a row less itself is NaN there and 0 elsewhere: three small launches, one more pass over the
    logits, no host sync.
    """
    largest = logits.amax(-1, keepdim=True)
    return weights + (largest - largest)
