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


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, tap: Tap | None) -> Tensor:
    """q [B, T, heads, head_dim], k, v [B, L, kv heads, head_dim]; `mask` True where a query sees a key."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    tokens, keys = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    if tap is not None:
        # The fused kernel keeps its scores to itself: they are computed once more for the observer only.
        tap(taps.ATTN_SCORES, q @ k.repeat_interleave(group, dim=1).transpose(-1, -2) * scale)
    causal = mask is None and tokens == keys and tokens > 1
    if mask is None and not causal and tokens > 1:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=group > 1
    )
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
    if cu_seqlens is None:
        # Query i of sequence s sees the keys before key_length - T + i + 1: one mask for all sequences.
        tokens = q.shape[1]
        last = torch.tensor(key_lengths, device=q.device)[:, None] - tokens + torch.arange(tokens, device=q.device)
        mask = torch.arange(k.shape[1], device=q.device) <= last[..., None]  # [B, T, L]
        return _attend(q, k, v, scale, mask[:, None], tap)
    parts = [_attend(*part, scale, None, tap) for part in spec.sequences(q, k, v, key_lengths, cu_seqlens)]
    return torch.cat(parts, dim=1)
