"""Which experts are chosen together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.analysis.routing.record import RoutingRecord
from workbench.errors import InputError

#: Tokens whose pairs are counted at once, A (A - 1) / 2 numbers for each.
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Coactivation:
    """Pairs of experts that served the same tokens, by layer.

    layers  numbers of the L layers
    counts  [L, E, E] int64: tokens that both served; on the diagonal, tokens that the expert served
    tokens  [L] tokens read with finite probabilities
    """

    part: str
    layers: tuple[int, ...]
    counts: np.ndarray
    tokens: np.ndarray

    @property
    def lift(self) -> np.ndarray:
        """[L, E, E] P(i and j) / (P(i) P(j)) = counts_ij tokens / (counts_ii counts_jj).

        1 for experts that are chosen independently of each other. A choice of exactly A among E has an even level
        below 1: (A - 1) E / (A (E - 1)), 0.88 for 8 of 256. NaN on the diagonal and for experts that served nothing.
        """
        alone = np.diagonal(self.counts, axis1=1, axis2=2).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            lift = self.counts * self.tokens[:, None, None] / (alone[:, :, None] * alone[:, None, :])
        diagonal = np.arange(lift.shape[1])
        lift[:, diagonal, diagonal] = np.nan
        return lift

    def frame(self, layer: int) -> pd.DataFrame:
        """Counts of one layer, experts as index and as columns."""
        if layer not in self.layers:
            raise InputError(f"coactivation: layer: expected one of {list(self.layers)}, found {layer!r}")
        experts = pd.RangeIndex(self.counts.shape[1], name="expert")
        return pd.DataFrame(self.counts[self.layers.index(layer)], index=experts, columns=experts.rename("other"))

    def pairs(self, top: int | None = None, least: int = 1) -> pd.DataFrame:
        """A row for each pair (expert < other) that served at least `least` tokens together, highest lift first.

        part, layer, expert, other, tokens (both), lift; `top` keeps so many of each layer.
        """
        first, second = np.triu_indices(self.counts.shape[1], k=1)
        together, lift = self.counts[:, first, second], self.lift[:, first, second]
        frames = []
        for index, layer in enumerate(self.layers):
            found = np.flatnonzero(together[index] >= max(least, 1))
            order = found[np.argsort(-lift[index, found], kind="stable")][:top]
            frames.append(pd.DataFrame({
                "part": self.part, "layer": layer, "expert": first[order], "other": second[order],
                "tokens": together[index, order], "lift": lift[index, order],
            }))  # fmt: skip
        return pd.concat(frames, ignore_index=True)


def coactivation(record: RoutingRecord, part: str = "model") -> Coactivation:
    """Counts of experts chosen together in every layer of a part; tokens without finite probabilities count nowhere."""
    seen = record.part(part)
    number = record.num_experts
    first, second = np.triu_indices(record.top_k, k=1)
    counts = np.zeros((len(seen.layers), number, number), dtype=np.int64)
    for index in range(len(seen.layers)):
        chosen = seen.experts[index][~seen.bad[index]].astype(np.int64)
        pairs = np.zeros(number * number, dtype=np.int64)
        for start in range(0, len(chosen), _BLOCK):
            block = chosen[start : start + _BLOCK]
            pairs += np.bincount((block[:, first] * number + block[:, second]).ravel(), minlength=number * number)
        one_way = pairs.reshape(number, number)  # the stronger expert first
        alone = np.bincount(chosen.ravel(), minlength=number)
        counts[index] = one_way + one_way.T + np.diag(alone)
    return Coactivation(seen.name, seen.layers, counts, (~seen.bad).sum(1))
