"""Two runs of the same tokens: which routers chose otherwise, where first, and how close the choice had been.

>>> flips = compare(record(model, prompts), record(narrowed, prompts))
>>> flips_by_layer(flips), flips_by_token(flips)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.analysis.routing.load import NEAR_TIE
from workbench.analysis.routing.record import RoutingPart, RoutingRecord
from workbench.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class PartFlips:
    """Differences of one part. L layers, T tokens.

    compared    [L, T] True where both runs had finite probabilities; all others are False below
    set_flip    [L, T] other experts were chosen
    order_flip  [L, T] the same experts in another order
    replaced    [L, T] int16: chosen experts of the first run that the second did not choose, 0 to A
    """

    first: RoutingPart
    second: RoutingPart
    compared: np.ndarray
    set_flip: np.ndarray
    order_flip: np.ndarray
    replaced: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class RoutingFlips:
    """`first` is the run that margins are taken from; `parts` in its order."""

    first: RoutingRecord
    second: RoutingRecord
    parts: tuple[PartFlips, ...]

    @property
    def is_one_checkpoint(self) -> bool | None:
        """Whether both runs had the same weights; None where a hash is missing."""
        hashes = self.first.origin.model_hash, self.second.origin.model_hash
        return None if None in hashes else hashes[0] == hashes[1]


def compare(first: RoutingRecord, second: RoutingRecord) -> RoutingFlips:
    """What two runs chose for the same tokens, layer by layer.

    Runs may differ in dtype, policy, backends and weights. Raises InputError for records of other tokens, other
    layers, or another number of experts or experts per token.
    """
    shape = ("num_experts", "top_k")
    for name in shape:
        if getattr(first, name) != getattr(second, name):
            raise InputError(
                f"compare: {name}: expected two records of one, found {getattr(first, name)} and "
                f"{getattr(second, name)}; record both with models of one configuration"
            )
    places = [[(part.name, part.layers) for part in record.parts] for record in (first, second)]
    if places[0] != places[1]:
        raise InputError(f"compare: expected the same parts and layers, found {places[0]} and {places[1]}")
    if len(first.prompts) != len(second.prompts):
        raise InputError(
            f"compare: expected the same prompts, found {len(first.prompts)} and {len(second.prompts)} of them"
        )
    for number, (one, other) in enumerate(zip(first.prompts, second.prompts, strict=True)):
        if one.ids != other.ids:
            place = next(
                (i for i, pair in enumerate(zip(one.ids, other.ids, strict=False)) if pair[0] != pair[1]),
                min(len(one.ids), len(other.ids)),
            )
            raise InputError(
                f"compare: prompt {number}: expected the same tokens, found others from position {place} on; record "
                "both runs with the same prompts"
            )
    return RoutingFlips(first, second, tuple(map(_part_flips, first.parts, second.parts)))


def _part_flips(first: RoutingPart, second: RoutingPart) -> PartFlips:
    for name in ("prompt", "position"):
        if not np.array_equal(getattr(first, name), getattr(second, name)):
            raise InputError(f"compare: part {first.name}: expected the same {name} of every token, found others")
    compared = ~(first.bad | second.bad)
    differs = (first.experts != second.experts).any(-1) & compared
    set_flip, replaced = np.zeros_like(compared), np.zeros(compared.shape, dtype=np.int16)
    # Only rows that differ need a comparison of sets.
    one, other = first.experts[differs], second.experts[differs]
    replaced[differs] = (~(one[:, :, None] == other[:, None, :]).any(-1)).sum(-1)
    set_flip[differs] = replaced[differs] > 0
    return PartFlips(first, second, compared, set_flip, differs & ~set_flip, replaced)


def flips_by_layer(flips: RoutingFlips) -> pd.DataFrame:
    """A row for each layer.

    tokens, uncompared      tokens compared; those without finite probabilities in either run
    set_flips, set_flip_rate       tokens with other experts, and their share of those compared
    order_flips, order_flip_rate   tokens with the same experts in another order
    first_flips             set flips before which, in lower layers of this part, the token had none
    near_ties               set flips whose margin in the first run was below 1e-5
    replaced                mean number of experts replaced in a set flip
    median_margin           of all tokens compared, in the first run
    flip_margin, largest_flip_margin   median and maximum of the first run's margin at set flips; NaN without any
    """
    rows = []
    for part in flips.parts:
        first_flip = _first_layer(part.set_flip)
        for index, layer in enumerate(part.first.layers):
            compared, changed = part.compared[index], part.set_flip[index]
            tokens, count = int(compared.sum()), int(changed.sum())
            order = int(part.order_flip[index].sum())
            margins = part.first.margin[index]
            at_flips = margins[changed].astype(np.float64)
            rows.append((
                part.first.name, layer, tokens, int((~compared).sum()), count, count / tokens if tokens else np.nan,
                order, order / tokens if tokens else np.nan, int((first_flip == index).sum()),
                int((at_flips < NEAR_TIE).sum()), part.replaced[index][changed].mean() if count else np.nan,
                float(np.median(margins[compared])) if tokens else np.nan,
                np.median(at_flips) if count else np.nan, at_flips.max() if count else np.nan,
            ))  # fmt: skip
    return pd.DataFrame(rows, columns=[
        "part", "layer", "tokens", "uncompared", "set_flips", "set_flip_rate", "order_flips", "order_flip_rate",
        "first_flips", "near_ties", "replaced", "median_margin", "flip_margin", "largest_flip_margin",
    ])  # fmt: skip


def flips_by_token(flips: RoutingFlips) -> pd.DataFrame:
    """A row for each token of each part.

    part, prompt, position, token
    layers           layers compared
    set_flips, set_flip_rate       layers with other experts, and their share
    order_flips      layers with the same experts in another order
    first_layer      lowest layer with a set flip (Int64, <NA> without any)
    margin           the first run's margin there; NaN without any
    """
    frames = []
    for part in flips.parts:
        index = _first_layer(part.set_flip)
        has_flip = index < len(part.first.layers)
        at = np.where(has_flip, index, 0)
        compared, changed = part.compared.sum(0), part.set_flip.sum(0)
        layer = pd.array(np.asarray(part.first.layers, dtype=np.int64)[at], dtype="Int64")
        layer[~has_flip] = pd.NA
        margin = np.take_along_axis(part.first.margin, at[None, :], axis=0)[0]
        with np.errstate(invalid="ignore"):
            rate = changed / compared
        frames.append(pd.DataFrame({
            "part": part.first.name, "prompt": part.first.prompt, "position": part.first.position,
            "token": part.first.token, "layers": compared, "set_flips": changed, "set_flip_rate": rate,
            "order_flips": part.order_flip.sum(0), "first_layer": layer,
            "margin": np.where(has_flip, margin, np.nan).astype(np.float64),
        }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def flip_totals(flips: RoutingFlips) -> pd.DataFrame:
    """A row for each part: pairs of layer and token compared, flipped in set and in order, and tokens with any."""
    rows = []
    for part in flips.parts:
        pairs, changed, order = (int(a.sum()) for a in (part.compared, part.set_flip, part.order_flip))
        tokens, touched = int(part.compared.any(0).sum()), int(part.set_flip.any(0).sum())
        rows.append((
            part.first.name, pairs, changed, changed / pairs if pairs else np.nan, order,
            order / pairs if pairs else np.nan, tokens, touched, touched / tokens if tokens else np.nan,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=[
        "part", "pairs", "set_flips", "set_flip_rate", "order_flips", "order_flip_rate", "tokens", "tokens_flipped",
        "tokens_flipped_rate",
    ])  # fmt: skip


def _first_layer(changed: np.ndarray) -> np.ndarray:
    """[T] index of the first layer where `changed` [L, T] is set; L where none is."""
    return np.where(changed.any(0), changed.argmax(0), len(changed))
