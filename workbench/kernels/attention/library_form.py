"""Sequences as the libraries' attention kernels take them: rows of all sequences one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.attention import spec
from workbench.kernels.attention.torch_sdpa import attend_by, shown_scores, visible_keys
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.taps import Tap


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed queries and keys of the sequences that have a query.

    q             [queries, heads, head_dim]
    k, v          [keys, kv heads, head_dim]
    queries, keys [S + 1] host integers, the boundaries of each
    """

    q: Tensor
    k: Tensor
    v: Tensor
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The boundaries on the device, int32."""
        return tuple(torch.tensor(b, dtype=torch.int32, device=self.q.device) for b in (self.queries, self.keys))

    def longest(self) -> tuple[int, int]:
        """The largest number of queries and of keys of a sequence."""
        return tuple(max(b - a for a, b in itertools.pairwise(bounds)) for bounds in (self.queries, self.keys))


def rows_of(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Sequence[int] | None, cu_seqlens: Tensor | None
) -> Rows:
    """The call's sequences; those without a query are left out, and keys past a sequence's length."""
    parts = [part for part in spec.sequences(q, k, v, key_lengths, cu_seqlens) if part[0].shape[1]]
    queries = (0, *itertools.accumulate(query.shape[1] for query, _, _ in parts))
    keys = (0, *itertools.accumulate(key.shape[1] for _, key, _ in parts))
    if keys[-1] == k.shape[0] * k.shape[1]:  # every row of the store holds a key: no copy
        flat_k, flat_v = (row_major(x.reshape(-1, *x.shape[2:])) for x in (k, v))
    else:
        flat_k, flat_v = (row_major(torch.cat([part[i][0] for part in parts])) for i in (1, 2))
    return Rows(row_major(q.reshape(-1, *q.shape[2:])), flat_k, flat_v, queries, keys)


def common_refusal(call: Call, most: int, step: int = 1) -> str | None:
    """Why a fused kernel may not serve the call: a backward pass, or a head_dim above `most` or off its step."""
    if call.needs_grad:
        return "its backward pass is not held to the contract; name torch_sdpa for training"
    if call.weight_shape and (call.weight_shape[-1] > most or call.weight_shape[-1] % step):
        return f"has kernels for head_dim up to {most} in steps of {step}, found {call.weight_shape[-1]}"
    return None


def observed(
    run: Callable[[], Tensor], q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_lengths: Sequence[int] | None,
    cu_seqlens: Tensor | None, tap: Tap | None,
) -> Tensor:  # fmt: skip
    """`run()`, with the scores shown to an observer, for which they are computed once more; scores that it put in the
    place of ours are attended to instead, sequence by sequence, since a fused kernel takes none from outside."""
    if tap is None:
        return run()
    parts = list(spec.sequences(q, k, v, key_lengths, cu_seqlens))
    changed = [shown_scores(query, key, scale, tap) for query, key, _ in parts]
    if all(scores is None for scores in changed):
        return run()
    plain = run()
    outs, start = [], 0
    for (query, key, value), scores in zip(parts, changed, strict=True):
        stop = start + query.shape[0] * query.shape[1]
        if scores is None:
            outs.append(plain.reshape(-1, *plain.shape[2:])[start:stop].view(query.shape))
        else:
            outs.append(attend_by(scores, value, visible_keys(query.shape[1], key.shape[1], None, q.device)))
        start = stop
    return torch.cat(outs, dim=0 if cu_seqlens is None else 1).to(q.dtype)


def packed(
    flash: Callable[[Rows, tuple[Tensor, Tensor], tuple[int, int]], Tensor], q: Tensor, k: Tensor, v: Tensor, *,
    scale: float, key_lengths: Sequence[int] | None, cu_seqlens: Tensor | None, tap: Tap | None,
) -> Tensor:  # fmt: skip
    """The op by a kernel over packed rows: `flash` gets them, their boundaries and the longest of queries and keys."""

    def attend() -> Tensor:
        rows = rows_of(q, k, v, key_lengths, cu_seqlens)
        return flash(rows, rows.bounds(), rows.longest()).reshape(q.shape)

    return observed(attend, q, k, v, scale=scale, key_lengths=key_lengths, cu_seqlens=cu_seqlens, tap=tap)
