"""Segments dispatched by their size: equal ones in one batch, tiny ones in batches, the others one by one.

One host sync, as in `torch_sorted`, whose launches for segments of a few rows are what this saves. Where every expert
that is hit has as many rows (equal prompts, a balanced load) all of them are one batched product; where those are all
experts, or a run of them, not even a weight is copied. Segments of at most TINY_ROWS rows are filled up and multiplied
in batches with copies of their experts' weights, few at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.experts.torch_batched import BYTES_AT_ONCE
from workbench.kernels.experts.torch_sorted import Segment, rows_of, segments, weighted_sum
from workbench.kernels.registry import Call

#: A segment of no more rows than this is tiny.
TINY_ROWS = 4


def supports(call: Call) -> str | None:
    return None


def equal_weights(weight: Tensor, parts: list[Segment]) -> Tensor:
    """The matrices of the experts of `parts`: a view where their numbers follow each other."""
    first, last = parts[0].expert, parts[-1].expert
    if last - first + 1 == len(parts):
        return weight[first : last + 1]
    return weight[torch.tensor([part.expert for part in parts], device=weight.device)]


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    if not x.shape[0]:
        return torch.zeros_like(x)
    plan = chain.align(experts, gate_up.shape[0], 1)
    token = plan.tokens_of_rows()
    parts = segments(plan, token)
    lengths = {part.end - part.start for part in parts}
    if len(lengths) == 1:
        rows = x.index_select(0, token).unflatten(0, (len(parts), -1))
        hidden = swiglu(torch.bmm(rows, equal_weights(gate_up, parts).transpose(1, 2)))
        out = torch.bmm(hidden, equal_weights(down, parts).transpose(1, 2)).flatten(0, 1)
        return weighted_sum(out, plan.position, weights).to(x.dtype)

    outs: list[Tensor | None] = [None] * len(parts)
    tiny = [i for i, part in enumerate(parts) if part.end - part.start <= TINY_ROWS]
    at_once = max(1, BYTES_AT_ONCE // (gate_up[0].numel() * gate_up.element_size()))
    for begin in range(0, len(tiny), at_once):
        chosen = tiny[begin : begin + at_once]
        expert = torch.tensor([parts[i].expert for i in chosen], device=x.device)
        starts = torch.tensor([parts[i].start for i in chosen], device=x.device)
        # A tiny segment reads on into the next ones: rows that nobody uses.
        rows = (starts[:, None] + torch.arange(TINY_ROWS, device=x.device)).clamp_(max=token.shape[0] - 1)
        hidden = swiglu(torch.bmm(x[token[rows]], gate_up[expert].transpose(1, 2)))
        batch = torch.bmm(hidden, down[expert].transpose(1, 2))
        for i, out in zip(chosen, batch, strict=True):
            outs[i] = out[: parts[i].end - parts[i].start]
    for i, part in enumerate(parts):
        if outs[i] is None:
            hidden = swiglu(F.linear(rows_of(x, token, part), gate_up[part.expert]))
            outs[i] = F.linear(hidden, down[part.expert])
    return weighted_sum(torch.cat(outs), plan.position, weights).to(x.dtype)
