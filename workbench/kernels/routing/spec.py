"""Contract of the router: softmax over all experts, the best `top_k`, weights divided by their sum.

``run(logits, *, top_k, normalise) -> (weights, experts)``

logits  [tokens, E]      any float dtype; the softmax is taken in fp32 or better
weights [tokens, top_k]  dtype of logits, falling; they sum to 1 where `normalise` is set
experts [tokens, top_k]  int64; among equal probabilities the lowest expert index wins
"""

from __future__ import annotations

from workbench.kernels.registry import Call

OP = "routing"

#: From this many tokens on a maximum per chosen expert is cheaper than a sort per token.
SEARCH_TOKENS = 256


def automatic_order(call: Call) -> tuple[str, ...]:
    return ("torch_max", "torch_sort") if call.tokens >= SEARCH_TOKENS else ("torch_sort", "torch_max")
