"""Token-expert pairs sorted by expert, one matrix product per expert that is hit.

One host synchronisation: the segment lengths. The sum over the experts of a token is a weighted gather in rank order,
so it has no atomics and the same result every time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.experts.spec import swiglu
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def by_segments(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    product: Callable[[Tensor, Tensor], Tensor],
    multiple: int,
) -> Tensor:
    """The op of `spec` with product(rows, weight) = rows weight^T over segments of whole `multiple` rows.

    Segments are filled up with token 0, whose surplus results nobody reads.
    """
    tokens, top_k = experts.shape
    # A counting sort: the place of a token among those of its expert is how many came before.
    hits = torch.zeros(gate_up.shape[0], tokens, dtype=torch.int32, device=x.device).scatter_(0, experts.T, 1)
    places = hits.cumsum(1, dtype=torch.int32)  # [E, tokens], counted from 1
    padded = (places[:, -1].long() + multiple - 1) // multiple * multiple
    start = padded.cumsum(0) - padded
    position = places.gather(0, experts.T).T + (start - 1)[experts]  # [tokens, A], the row of each pair
    lengths = padded.tolist()
    token = torch.arange(tokens, device=x.device)[:, None].expand(-1, top_k)
    source = position.new_zeros(sum(lengths)).scatter_(0, position.flatten(), token.flatten())

    outs = []
    for expert, index in enumerate(source.split(lengths)):
        if len(index):
            hidden = swiglu(product(x.index_select(0, index), gate_up[expert]))
            outs.append(product(hidden, down[expert]))
    rows = torch.cat(outs)
    return F.embedding_bag(position, rows, mode="sum", per_sample_weights=weights).to(x.dtype)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return by_segments(x, weights, experts, gate_up, down, product=F.linear, multiple=1)
