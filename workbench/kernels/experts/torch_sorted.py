"""Pairs sorted by expert, one matrix product per expert that is hit.

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
    flat = experts.flatten()  # pair p = token * A + rank
    ordered, order = torch.sort(flat, stable=True)
    counts = torch.bincount(flat, minlength=gate_up.shape[0])
    padded = (counts + multiple - 1) // multiple * multiple
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # [E], how far a segment moves for the padding
    row = torch.arange(len(flat), device=x.device) + shift.index_select(0, ordered)  # of each sorted pair
    lengths = padded.tolist()
    source = order.new_zeros(sum(lengths)).scatter_(0, row, order // top_k)
    position = torch.empty_like(order).scatter_(0, order, row)  # pair -> its row

    outs = []
    for expert, index in enumerate(source.split(lengths)):
        if len(index):
            hidden = swiglu(product(x.index_select(0, index), gate_up[expert]))
            outs.append(product(hidden, down[expert]))
    rows = torch.cat(outs)
    return F.embedding_bag(position.view(tokens, top_k), rows, mode="sum", per_sample_weights=weights).to(x.dtype)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return by_segments(x, weights, experts, gate_up, down, product=F.linear, multiple=1)
