"""How strongly heads forget: log decay per token and its sum G over a chunk, against the limits of exp.

A chunk evaluated in factored form needs exp(-G_j) for every row j, which is infinite once -G_j passes ln of
the largest number of the format: 88.72 nats in float32 and bfloat16, 11.09 in float16
(`numerics.EXP_OVERFLOW`). The safe form takes exp of differences that are never positive, so for it the
same table has no limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.errors import InputError
from workbench.numerics import EXP_OVERFLOW

#: Columns of `gate_table`. Log decays are <= 0; spans are positive nats.
GATE_COLUMNS = (
    "layer", "head", "log_decay_min", "log_decay_median", "log_decay_max", "half_life", "span_median",
    "span_max", "worst_chunk", "chunks", "over_float16", "over_float32",
)  # fmt: skip

#: Headings of these columns where people read them.
GATE_HEADINGS = {
    "log_decay_min": "log decay, min",
    "log_decay_median": "median",
    "log_decay_max": "max",
    "half_life": "half-life, tokens",
    "span_median": "|G| of a chunk, median",
    "span_max": "|G|, max",
    "worst_chunk": "in chunk",
    "over_float16": "chunks beyond float16",
    "over_float32": "chunks beyond float32",
}


def chunk_cumsum(log_decay: Tensor, chunk: int) -> Tensor:
    """G inside each chunk: [B, T, V] -> [B, N, C, V], float64; rows past T repeat the last value."""
    if log_decay.dim() != 3 or log_decay.shape[1] == 0:
        raise InputError(
            f"log_decay: expected shape [B, T, V] with T at least 1, found {tuple(log_decay.shape)}"
        )
    if chunk < 1:
        raise InputError(f"chunk: expected at least 1, found {chunk}")
    batch, tokens, heads = log_decay.shape
    padding = -tokens % chunk
    padded = torch.nn.functional.pad(log_decay.double(), (0, 0, 0, padding))
    return padded.view(batch, -1, chunk, heads).cumsum(2)


def log_decays(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Layer -> log decay [B, T, V], from what a trace kept. Raises InputError where there is none."""
    found = {}
    for name, tensor in tensors.items():
        layer, relative = taps.split_name(name)
        if relative == taps.GDN_LOG_DECAY and layer is not None:
            found[layer] = tensor
    if not found:
        raise InputError(
            "gates: expected kept tensors named '*.gdn.log_decay', found none; trace a model that has linear "
            "layers with keep=['*.gdn.log_decay']"
        )
    return dict(sorted(found.items()))


def gate_table(tensors: Mapping[str, Tensor], chunk: int = 64) -> pd.DataFrame:
    """One row per linear layer and value head, from the `*.gdn.log_decay` tensors of a trace.

    log_decay_*        smallest, median and largest log decay of one token
    half_life          tokens after which the mean log decay halves the state: ln 2 / mean(-log_decay)
    span_median/_max   median and largest over chunks of max |G|
    worst_chunk        number of the chunk with the largest span (its first tokens is `worst_chunk` * chunk)
    chunks             chunks seen, over all sequences
    over_float16/32    chunks whose span exceeds the exponent limit of that format
    """
    rows = []
    for layer, log_decay in log_decays(tensors).items():
        spans = chunk_cumsum(log_decay, chunk).abs().amax(2)  # [B, N, V]
        per_sequence = spans.shape[1]
        spans = spans.flatten(0, 1)
        gates = log_decay.double().flatten(0, 1)  # [B T, V]
        for head in range(gates.shape[1]):
            gate, span = gates[:, head], spans[:, head]
            strength = -gate.mean().item()
            rows.append(
                (
                    layer, head, gate.min().item(), gate.median().item(), gate.max().item(),
                    math.log(2.0) / strength if strength > 0.0 else math.inf,
                    span.median().item(), span.max().item(), int(span.argmax()) % per_sequence, len(span),
                    int((span > EXP_OVERFLOW["float16"]).sum()), int((span > EXP_OVERFLOW["float32"]).sum()),
                )
            )  # fmt: skip
    return pd.DataFrame(rows, columns=list(GATE_COLUMNS))


def strongest(table: pd.DataFrame, count: int = 8) -> pd.DataFrame:
    """The heads of largest span, strongest first; equal spans in the order of layer and head."""
    return table.sort_values("span_max", ascending=False, kind="stable").head(count)


def strongest_reading(table: pd.DataFrame) -> str:
    """What the strongest heads of a gate table have in common, as a caption."""
    top = strongest(table, 1).iloc[0]
    mildest = table["half_life"].max()
    return (
        f"The heads of largest |G|, strongest first. The first of them halves its state every "
        f"{top['half_life']:.2g} tokens; the mildest head of the model every {mildest:.3g}."
    )


def chunk_paths(tensors: Mapping[str, Tensor], table: pd.DataFrame, chunk: int = 64) -> pd.DataFrame:
    """G over the rows of the worst chunk of three heads: the one of largest, median and smallest span.

    Columns: role (`strongest`, `median`, `weakest`), layer, head, chunk, row, cumsum. Sequence 0 of the
    batch is read; rows past the end of the sequence are left out. A model of one head yields one role.
    """
    ordered = table.sort_values("span_max", kind="stable").reset_index(drop=True)
    places = {"strongest": len(ordered) - 1, "median": len(ordered) // 2, "weakest": 0}
    if len(ordered) < 3:
        places = {"strongest": len(ordered) - 1}
    decays = log_decays(tensors)
    frames = []
    for role, place in places.items():
        layer, head, number = (int(ordered.loc[place, name]) for name in ("layer", "head", "worst_chunk"))
        log_decay = decays[layer]
        path = chunk_cumsum(log_decay[:1], chunk)[0, number, :, head]
        path = path[: log_decay.shape[1] - number * chunk].tolist()
        frame = pd.DataFrame({"row": range(len(path)), "cumsum": path})
        frames.append(frame.assign(role=role, layer=layer, head=head, chunk=number))
    return pd.concat(frames, ignore_index=True)[["role", "layer", "head", "chunk", "row", "cumsum"]]
