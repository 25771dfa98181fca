"""Contract of the router: softmax over all experts, the best `top_k`, weights divided by their sum.

``run(logits, *, top_k, normalise, dtype=None) -> (weights, experts)``

logits  [tokens, E]      any float dtype
dtype                    of the softmax: None for fp32 or better; a narrower one ties what differs in its last bits
                         and ranks what is left
weights [tokens, top_k]  dtype of logits, falling; they sum to 1 where `normalise` is set
experts [tokens, top_k]  int64, distinct, by falling logit, which is the order of the probabilities and has none of
                         their ties where they vanish; with `dtype`, by probability in it. Among equals the lowest
                         expert index wins

A row with a NaN or +inf has no softmax: its weights are NaN, so that the fault shows in what the token becomes, and its
experts some legal ones. The public op `workbench.kernels.routing` refuses such a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.kernels.registry import Call

OP = "routing"

#: From this many tokens on a maximum per chosen expert is cheaper than a sort per token.
SEARCH_TOKENS = 256


def softmax(logits: Tensor, dtype: torch.dtype | None, least: torch.dtype) -> Tensor:
    """Softmax over the last axis, computed in `dtype` and given in `least` or better; in `least` itself for None."""
    wide = torch.promote_types(logits.dtype, least)
    if dtype is None:
        return torch.softmax(logits, dim=-1, dtype=wide)
    return torch.softmax(logits.to(dtype), dim=-1).to(torch.promote_types(dtype, least))


def ranked_by(logits: Tensor, probabilities: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What the experts are ranked by: the logits, unless a dtype was asked for, whose ties are part of the answer."""
    return logits if dtype is None else probabilities


def check(logits: Tensor, *, top_k: int) -> None:
    """Raises InputError for a shape, dtype, `top_k` or logit that has no routing; reads the values: a host sync."""
    if not isinstance(logits, Tensor):
        raise InputError(f"routing: logits: expected a tensor [tokens, E], found {type(logits).__name__}")
    if logits.dim() != 2 or not logits.is_floating_point() or logits.dtype.itemsize == 1:
        raise InputError(
            f"routing: logits: expected floats of 16 bits or more [tokens, E], found {logits.dtype} "
            f"{tuple(logits.shape)}"
        )
    if logits.is_meta:
        raise InputError("routing: logits: expected values, found a tensor on meta, which has none")
    if type(top_k) is not int or not 1 <= top_k <= logits.shape[1]:
        raise InputError(f"routing: top_k: expected 1 to {logits.shape[1]}, the number of experts, found {top_k!r}")
    bad = (logits.isnan() | (logits == torch.inf) | (logits == -torch.inf).all(-1, keepdim=True)).nonzero()
    if len(bad):
        token, expert = bad[0].tolist()
        raise InputError(
            f"routing: logits: expected finite numbers (-inf shuts out an expert), found "
            f"{logits[token, expert].item()} at token {token}, expert {expert}, such in {len(bad[:, 0].unique())} of "
            f"{len(logits)} tokens; trace the model to find the op before the router where it comes from"
        )


def automatic_order(call: Call) -> tuple[str, ...]:
    return ("torch_max", "torch_sort") if call.tokens >= SEARCH_TOKENS else ("torch_sort", "torch_max")
