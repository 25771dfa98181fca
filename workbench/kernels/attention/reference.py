"""The arbiter: scores, mask, softmax and weighted sum of `spec` in float64, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.attention import spec
from workbench.kernels.registry import Call
from workbench.taps import Tap


def supports(call: Call) -> str | None:
    return None


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
    group = q.shape[2] // k.shape[2]
    outs = []
    for query, key, value in spec.sequences(q, k, v, key_lengths, cu_seqlens):
        keys = key.double().repeat_interleave(group, dim=2)
        scores = torch.einsum("bthd,bshd->bhts", query.double(), keys) * scale
        scores = taps.observe(tap, taps.ATTN_SCORES, scores)
        rows, columns = scores.shape[-2:]
        future = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        outs.append(torch.einsum("bhts,bshd->bthd", weights, value.double().repeat_interleave(group, dim=2)))
    return torch.cat(outs, dim=0 if cu_seqlens is None else 1).to(q.dtype)
