"""Whether the load moves with the position in the text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from workbench.analysis.routing.record import RoutingRecord
from workbench.errors import InputError


def position_edges(record: RoutingRecord, bins: int = 8, part: str = "model") -> list[int]:
    """Boundaries of at most `bins` equally wide ranges of positions, from 0 to the longest prompt's length."""
    if type(bins) is not int or bins < 2:
        raise InputError(f"position_edges: bins: expected a whole number of at least 2, found {bins!r}")
    longest = int(record.part(part).position.max(initial=0)) + 1
    return sorted({round(longest * step / bins) for step in range(bins + 1)})


def position_drift(
    record: RoutingRecord, edges: Sequence[int] | None = None, part: str = "model"
) -> pd.DataFrame:
    """How far the load of each layer moves from one range of positions to the next.

    edges      rising boundaries: range b has the positions edges[b] to edges[b + 1] - 1; default `position_edges`
    part, layer, bin, start, stop, tokens   tokens with finite probabilities in the range
    distance   total variation distance, 1/2 sum over experts |share here - share in the range before|: 0 for equal
               loads, 1 for loads without a common expert; NaN in the first range and where either is empty
    from_first the same against the first range
    noise      what `distance` would be on average if both ranges had one load and only their tokens differed:
               1/2 sum sqrt(2 / pi) sd, with sd of a share from binomial counts. A distance near it is no drift

    Prompts of unequal length give each range another mixture of prompts; compare prompts of one kind to keep it out.
    """
    seen = record.part(part)
    edges = position_edges(record, part=part) if edges is None else list(edges)
    if len(edges) < 2 or any(type(e) is not int for e in edges) or any(a >= b for a, b in itertools.pairwise(edges)):
        raise InputError(f"position_drift: edges: expected at least two rising whole numbers, found {edges!r:.60}")
    depth, number, bins = len(seen.layers), record.num_experts, len(edges) - 1
    place = np.searchsorted(edges, seen.position, side="right") - 1
    inside = (place >= 0) & (place < bins)
    good = ~seen.bad & inside[None, :]
    cell = np.arange(depth)[:, None] * bins + np.where(inside, place, 0)[None, :]
    served = np.bincount(
        (cell[..., None] * number + seen.experts)[good].ravel(), minlength=depth * bins * number
    ).reshape(depth, bins, number)
    read = np.bincount(cell[good], minlength=depth * bins).reshape(depth, bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = served / (read[..., None] * record.top_k)
        before = np.full_like(share, np.nan)
        before[:, 1:] = share[:, :-1]
        first = np.where(np.arange(bins)[None, :, None] > 0, share[:, :1], np.nan)
        pooled = (served[:, 1:] + served[:, :-1]) / (read[:, 1:] + read[:, :-1])[..., None]  # share of tokens
        variance = pooled * (1 - pooled) * (1 / read[:, 1:] + 1 / read[:, :-1])[..., None]
        noise = np.full(read.shape, np.nan)
        noise[:, 1:] = (np.sqrt(2 / np.pi * variance) / record.top_k).sum(-1) / 2
    noise[:, 1:][(read[:, 1:] == 0) | (read[:, :-1] == 0)] = np.nan
    return pd.DataFrame({
        "part": seen.name,
        "layer": np.repeat(np.asarray(seen.layers, dtype=np.int64), bins),
        "bin": np.tile(np.arange(bins), depth),
        "start": np.tile(edges[:-1], depth),
        "stop": np.tile(edges[1:], depth),
        "tokens": read.ravel(),
        "distance": (np.abs(share - before).sum(-1) / 2).ravel(),
        "from_first": (np.abs(share - first).sum(-1) / 2).ravel(),
        "noise": noise.ravel(),
    })  # fmt: skip
