"""What a checkpoint's parameters are spent on: counts and bytes by the part of the model they belong to."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from torch import Tensor

#: Part of the model -> what a canonical tensor name of that part contains; the first that fits is taken.
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("multi-token prediction", ("mtp.",)),
    ("embedding", ("embed_tokens.",)),
    ("output head", ("lm_head.",)),
    ("gated delta net", ("linear_attn.",)),
    ("attention", ("self_attn.",)),
    ("router", ("mlp.gate.",)),
    ("routed experts", ("mlp.experts.",)),
    ("shared expert", ("mlp.shared_expert",)),
    ("dense MLP", ("mlp.",)),
    ("norms", ("norm.",)),
)


def group_of(name: str) -> str:
    """The part that a canonical tensor name belongs to."""
    return next(group for group, marks in GROUPS if any(mark in name for mark in marks))


def parameter_groups(tensors: Mapping[str, Tensor]) -> pd.DataFrame:
    """One row per part and dtype: group, dtype, tensors, parameters, bytes; parts in the order of GROUPS."""
    totals: dict[tuple[str, str], list[int]] = {}
    for name, tensor in tensors.items():
        key = group_of(name), str(tensor.dtype).removeprefix("torch.")
        entry = totals.setdefault(key, [0, 0, 0])
        for i, amount in enumerate((1, tensor.numel(), tensor.nbytes)):
            entry[i] += amount
    order = [group for group, _ in GROUPS]
    rows = [(*key, *totals[key]) for key in sorted(totals, key=lambda key: (order.index(key[0]), key[1]))]
    return pd.DataFrame(rows, columns=["group", "dtype", "tensors", "parameters", "bytes"])
