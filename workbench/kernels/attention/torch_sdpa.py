"""Attention with torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench import taps
from workbench.kernels.attention import spec
from workbench.kernels.registry import Call
from workbench.taps import Tap


def supports(call: Call) -> str | None:
    return None


def shown_scores(q: Tensor, k: Tensor, scale: float, tap: Tap) -> Tensor | None:
    """Show the scores of q [B, T, heads, head_dim] and k to an observer; what it put in their place, or None.

    The fused kernels keep their scores to themselves: they are computed once more for the observer only.
    """
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, keys) * scale
    seen = tap(taps.ATTN_SCORES, scores)
    return None if seen is scores else seen


def visible_keys(tokens: int, keys: int, key_lengths: Sequence[int] | None, device: torch.device) -> Tensor:
    """[T, L], or [B, 1, T, L] with `key_lengths`: True where query i sees a key, those before length - T + i + 1."""
    if key_lengths is None:
        return torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)
    last = torch.tensor(key_lengths, device=device)[:, None] - tokens + torch.arange(tokens, device=device)
    return (torch.arange(keys, device=device) <= last[..., None])[:, None]


def attend_by(scores: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax of `scores` [B, heads, T, L] where `mask`, times v [B, L, kv heads, W] -> [B, T, heads, W]."""
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(scores.shape[1] // v.shape[2], dim=2))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, tap: Tap | None) -> Tensor:
    """q [B, T, heads, head_dim], k, v [B, L, kv heads, head_dim]; `mask` True where a query sees a key."""
    tokens, keys = q.shape[1], k.shape[1]
    causal = mask is None and tokens == keys and tokens > 1
    seen = None if tap is None else shown_scores(q, k, scale, tap)
    if seen is not None:
        return attend_by(seen, v, visible_keys(tokens, keys, None, q.device) if mask is None else mask)
    if mask is None and not causal and tokens > 1:
        mask = visible_keys(tokens, keys, None, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=causal, scale=scale,
        enable_gqa=q.shape[2] > k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


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
    if cu_seqlens is None and (key_lengths is None or min(key_lengths) == k.shape[1]):
        return _attend(q, k, v, scale, None, tap)
    if cu_seqlens is None:  # one mask for all sequences
        mask = visible_keys(q.shape[1], k.shape[1], key_lengths, q.device)
        return _attend(q, k, v, scale, mask, tap)
    parts = [_attend(*part, scale, None, tap) for part in spec.sequences(q, k, v, key_lengths, cu_seqlens)]
    return torch.cat(parts, dim=1)
