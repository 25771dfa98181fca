"""Where in a tensor values lie: which tokens and heads are not finite, and how large the rest is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.nans import axes_of
from workbench.errors import InputError

#: Axes that count heads, and those that count tokens.
HEAD_AXES, TOKEN_AXES = ("V", "heads", "kv heads", "H"), ("T", "tokens")


def by_token_and_head(tap: str, tensor: Tensor) -> Tensor:
    """The tensor of one sequence as [tokens, heads, values]; one head where it has no such axis.

    Chunks are put one after another. Raises InputError for a tap point without tokens (the state) and for a batch.
    """
    axes = axes_of(tap)
    if "B" in axes and tensor.shape[axes.index("B")] != 1:
        batch = tensor.shape[axes.index("B")]
        raise InputError(f"spread: {tap}: expected one sequence, found {batch}; give one of them")
    head = next((axes.index(name) for name in HEAD_AXES if name in axes), None)
    if "C" in axes:  # [N, V, C, ...]
        rows = tensor.transpose(1, 2).flatten(0, 1)  # [N C, V, ...]
        return rows.reshape(rows.shape[0], rows.shape[1], -1)
    token = next((axes.index(name) for name in TOKEN_AXES if name in axes), None)
    if token is None:
        raise InputError(f"spread: {tap}: expected a tap point with tokens, found axes {', '.join(axes)}")
    rows = tensor.movedim(token, 0)
    if head is None:
        return rows.reshape(rows.shape[0], 1, -1)
    rows = rows.movedim(head if head > token else head + 1, 1)
    return rows.reshape(rows.shape[0], rows.shape[1], -1)


def bad_spread(tensors: Mapping[str, Tensor]) -> pd.DataFrame:
    """Share of values that are not finite: tap, token, head, share; tap points in the order given.

    Of chunks the rows after the last token are left out where another tap point of `tensors` has the tokens alone.
    """
    frames = []
    lengths = [by_token_and_head(tap, x).shape[0] for tap, x in tensors.items() if "C" not in axes_of(tap)]
    length = min(lengths, default=None)
    for tap, tensor in tensors.items():
        share = (~torch.isfinite(by_token_and_head(tap, tensor)[:length])).double().mean(-1)
        tokens, heads = share.shape
        frames.append(pd.DataFrame({
            "tap": tap, "token": [t for t in range(tokens) for _ in range(heads)],
            "head": list(range(heads)) * tokens, "share": share.flatten().tolist(),
        }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def exponent_table(tensors: Mapping[str, Tensor]) -> pd.DataFrame:
    """How many values have each binary exponent floor(log2 |x|): tap, dtype, exponent, share of all values.

    Zeros and values that are not finite are in no row.
    """
    frames = []
    for tap, tensor in tensors.items():
        values = tensor.detach().flatten().double()
        kept = values[torch.isfinite(values) & (values != 0)]
        exponents, counts = torch.unique(torch.frexp(kept)[1] - 1, return_counts=True)
        frames.append(pd.DataFrame({
            "tap": tap, "dtype": str(tensor.dtype).removeprefix("torch."), "exponent": exponents.tolist(),
            "share": (counts.double() / max(values.numel(), 1)).tolist(),
        }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def layer_exponents(tensors: Mapping[str, Tensor], layer: int | None = None) -> pd.DataFrame:
    """`exponent_table` of what `tensors` hold of one layer; None is the first that they hold anything of."""
    layers = sorted({found for found, _ in map(taps.split_name, tensors) if found is not None})
    if not layers or (layer is not None and layer not in layers):
        raise InputError(f"spread: expected tensors of layer {layer}, found those of {layers or 'none'}")
    chosen = layers[0] if layer is None else layer
    return exponent_table({name: x for name, x in tensors.items() if taps.split_name(name)[0] == chosen})


def exponents_of(table: pd.DataFrame, names: Sequence[str], step: int = 0) -> pd.DataFrame:
    """`exponent_table` of one pass from the table of ``trace(model, histogram=True)``; `names` are full names.

    Subnormal values count under one exponent. Raises InputError for a table without histograms or without a name.
    """
    if "exponents" not in table:
        raise InputError("spread: expected a trace with histograms, found none; open it with histogram=True")
    frames = []
    for name in names:
        rows = table[(table["tap"] == name) & (table["step"] == step)]
        if rows.empty:
            raise InputError(f"spread: expected {name} in pass {step} of the trace, found none")
        row = rows.iloc[-1]
        counts = dict(row["exponents"])
        frames.append(pd.DataFrame({
            "tap": name, "dtype": row["dtype"], "exponent": list(counts),
            "share": [count / max(math.prod(row["shape"]), 1) for count in counts.values()],
        }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)
