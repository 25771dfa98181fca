"""Contract of causal grouped-query attention over a per-sequence key store.

``run(q, k, v, *, scale, key_lengths, cu_seqlens, tap) -> out``

q           [B, T, heads, head_dim]      normalised and rotated
k, v        [S, L, kv heads, head_dim]   heads a multiple of kv heads; head h reads kv head h // (heads / kv heads)
key_lengths S host integers              rows of k, v that hold keys of each sequence; None means all L
cu_seqlens  [S + 1]                      int, on the CPU; then B is 1 and q is packed, else S = B
out         [B, T, heads, head_dim]      dtype of q

The queries of a sequence are its last tokens: query i of T_s sees keys 0 ... key_length - T_s + i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from workbench.kernels.registry import Call

OP = "attention"


#: From this many queries on oneDNN saves more than its calls and the compilation of new shapes cost.
ONEDNN_QUERIES = 512


def automatic_order(call: Call) -> tuple[str, ...]:
    if call.tokens >= ONEDNN_QUERIES:
        return ("torch_onednn", "torch_sdpa", "reference")
    return ("torch_sdpa", "torch_onednn", "reference")


def sequences(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Sequence[int] | None, cu_seqlens: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each sequence by itself: q [1, T_s, heads, head_dim], k, v [1, L_s, kv heads, head_dim]."""
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    for s in range(k.shape[0]):
        length = k.shape[1] if key_lengths is None else key_lengths[s]
        query = q[s : s + 1] if bounds is None else q[:, bounds[s] : bounds[s + 1]]
        yield query, k[s : s + 1, :length], v[s : s + 1, :length]
