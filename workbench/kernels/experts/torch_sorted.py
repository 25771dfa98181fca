"""Token-expert pairs sorted by expert, one matrix product per expert that is hit.

One host sync: length, first and last token of each segment in one copy. Where the tokens of a segment are consecutive
(all tokens on one expert, a batch of equal prompts) it is a view. The activation is taken once over all pairs, and the
sum over the experts of a token is a weighted gather in rank order: no atomics, the same result every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.alignment.spec import Alignment
from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def weighted_sum(rows: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    """out_t = sum_a weights[t, a] rows[position[t, a]] for rows [R, D] -> [tokens, D]."""
    return F.embedding_bag(position, rows, mode="sum", per_sample_weights=weights.to(rows.dtype))


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows [start, end) of an expert; `first` is their first token where the tokens are consecutive, else None."""

    expert: int
    start: int
    end: int
    first: int | None


def segments(plan: Alignment, token: Tensor) -> list[Segment]:
    """Every expert that is hit, with `token` [R] the token of each row. The one host sync.

    The tokens of a segment rise, so its ends tell whether it leaves any out; filling rows (token 0) never look so.
    """
    starts, ends = plan.offsets[:-1], plan.offsets[1:]
    most = token.shape[0] - 1
    bounds = torch.stack([starts, ends, token[starts.clamp(max=most)], token[(ends - 1).clamp(0, most)]])
    return [
        Segment(expert, start, end, first if last - first + 1 == end - start else None)
        for expert, (start, end, first, last) in enumerate(zip(*bounds.tolist(), strict=True))
        if end > start
    ]


def rows_of(x: Tensor, token: Tensor, part: Segment, surplus: int = 0) -> Tensor:
    """The inputs of a segment, [rows, D]: a view where its tokens are consecutive and no `surplus` rows follow them."""
    if part.first is not None and not surplus:
        return x[part.first : part.first + part.end - part.start]
    return x.index_select(0, token[part.start : part.end + surplus])


@contextmanager
def stacked(parts: list[Tensor], chain: Chain, name: str) -> Iterator[Tensor]:
    """The parts one after another, in the chain's scratch memory if it has some: gone when the context ends."""
    if chain.workspace is None:
        yield torch.cat(parts)
        return
    shape = (sum(len(part) for part in parts), parts[0].shape[1])
    with chain.workspace.take(f"experts.{name}", shape, parts[0].dtype) as buffer:
        yield torch.cat(parts, out=buffer)


def by_segments(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    chain: Chain,
    product: Callable[[Tensor, Tensor], Tensor],
    rounded: Callable[[int], int] = int,
) -> Tensor:
    """The op of `spec` with product(rows, weight) = rows weight^T for each segment.

    `rounded(rows)` is the number of rows that `product` gets for a segment: where it is more, the segment reads on into
    the next ones (or into token 0 at the end), and what comes of these rows is dropped.
    """
    if not x.shape[0]:
        return torch.zeros_like(x)
    plan = chain.align(experts, gate_up.shape[0], 1)
    token = plan.tokens_of_rows()
    parts = segments(plan, token)
    surplus = [rounded(part.end - part.start) - (part.end - part.start) for part in parts]
    beyond = max(0, *(part.end + more - len(token) for part, more in zip(parts, surplus, strict=True)))
    token = F.pad(token, (0, beyond))

    def results(rows: Callable[[Segment, int], Tensor], weight: Tensor) -> list[Tensor]:
        return [
            product(rows(part, more), weight[part.expert])[: part.end - part.start]
            for part, more in zip(parts, surplus, strict=True)
        ]

    with stacked(results(lambda part, more: rows_of(x, token, part, more), gate_up), chain, "gate_up") as both:
        hidden = swiglu(both)
    hidden = F.pad(hidden, (0, 0, 0, beyond)) if beyond else hidden
    with stacked(results(lambda part, more: hidden[part.start : part.end + more], down), chain, "down") as out:
        return weighted_sum(out, plan.position, weights).to(x.dtype)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    return by_segments(x, weights, experts, gate_up, down, chain=chain, product=F.linear)
