"""Attention in blocks of queries with oneDNN's products: for long fp32 prefills on a CPU, no backward pass.

torch's fused attention sends its fp32 products to MKL; see `linear.torch_onednn` for what that costs. A block of
queries meets only the keys that it can see, and its scores stay in the second-level cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.kernels.attention import spec
from workbench.kernels.attention.torch_sdpa import attend_by, shown_scores, visible_keys
from workbench.kernels.linear.torch_onednn import product, refusal
from workbench.kernels.registry import Call
from workbench.taps import Tap

#: Rows of a block of scores are queries times the heads that share a key head: as many as keep it in the cache.
BLOCK_ELEMENTS = 2**19
MOST_ROWS, ROW_STEP = 256, 64


def supports(call: Call) -> str | None:
    if call.packed:
        return "written for sequences of one length"
    return refusal(call)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One sequence and key head: q [T, group, head_dim], k, v [L, head_dim], T <= L -> [T, group, head_dim]."""
    tokens, group, head_dim = q.shape
    past = k.shape[0] - tokens
    # The softmax is taken in place and in base 2, and divides the narrow output instead of the scores.
    q, k, v = q.transpose(0, 1) * (scale * math.log2(math.e)), k.contiguous(), v.contiguous()
    most = min(max(MOST_ROWS // group, 1), tokens)
    future = torch.full((most, most), -torch.inf).triu_(1)  # of a block: its last columns
    out = q.new_empty(group, tokens, head_dim)
    start = 0
    while start < tokens:
        rows = min(BLOCK_ELEMENTS // (past + start + 1), MOST_ROWS) // ROW_STEP * ROW_STEP
        stop = min(start + max(max(rows, ROW_STEP) // group, 1), tokens)
        count, visible = stop - start, past + stop
        scores = product(q[:, start:stop].reshape(-1, head_dim), k[:visible])
        scores.view(group, count, visible)[..., past + start :].add_(future[:count, :count])
        scores.sub_(scores.amax(-1, keepdim=True)).exp2_()
        weighted = product(scores, v[:visible].T).div_(scores.sum(-1, keepdim=True))
        out[:, start:stop] = weighted.view(group, count, head_dim)
        start = stop
    return out.transpose(0, 1)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    key_lengths: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    tap: Tap | None = None,
) -> Tensor:
    kv_heads = k.shape[2]
    group = q.shape[2] // kv_heads
    if tap is not None:
        seen = shown_scores(q, k, scale, tap)
        if seen is not None:
            return attend_by(seen, v, visible_keys(q.shape[1], k.shape[1], key_lengths, q.device))
    out = torch.empty_like(q)
    for s, (query, key, value) in enumerate(spec.sequences(q, k, v, key_lengths, cu_seqlens)):
        for h in range(kv_heads):
            heads = slice(h * group, (h + 1) * group)
            out[s, :, heads] = attend(query[0, :, heads], key[0, :, h], value[0, :, h], scale)
    return out
