"""How a router's work is shared: load of every expert, its entropy and Gini, dead and hot experts, top-k mass.

>>> seen = record(model, prompts)
>>> load = load_table(seen, by="kind")
>>> summarise(seen)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from workbench.analysis.routing.record import RoutingPart, RoutingRecord
from workbench.analysis.routing.recorder import record
from workbench.errors import InputError, NonFiniteError
from workbench.model import CausalLM

#: Columns of a load table.
LOAD_COLUMNS = ("part", "layer", "expert", "tokens", "share", "token_share")

#: An expert is hot from this multiple of the even share 1 / E on.
HOT = 2.0

#: A margin below this is a near tie: rounding of the logits alone can decide it.
NEAR_TIE = 1e-5


def load_table(record: RoutingRecord, by: str | None = None) -> pd.DataFrame:
    """How many tokens each expert of each layer served: a row for every expert, also for one that served none.

    by            `kind` or `prompt`: a table for each of them, one below the other, with it as first column
    part, layer, expert
    tokens        tokens that the expert served
    share         tokens / (tokens read by the layer * A): the shares of a layer sum to 1, and none exceeds 1 / A
    token_share   tokens / tokens read by the layer: 1 for an expert that serves every token

    Tokens without finite probabilities count nowhere (see `bad_table`); shares of a layer that has no others are NaN.
    """
    if by not in (None, "kind", "prompt"):
        raise InputError(f"load_table: by: expected None, kind or prompt, found {by!r}")
    kinds = list(dict.fromkeys(prompt.kind for prompt in record.prompts))
    of_prompt = {
        None: np.zeros(len(record.prompts), dtype=np.int64),
        "kind": np.array([kinds.index(prompt.kind) for prompt in record.prompts]),
        "prompt": np.arange(len(record.prompts)),
    }[by]
    names = {None: [None], "kind": kinds, "prompt": list(range(len(record.prompts)))}[by]
    counts = [_counts(part, of_prompt[part.prompt], len(names), record.num_experts) for part in record.parts]
    frames = [
        _load_frame(part, served[group], read[group], record).assign(**({} if by is None else {by: name}))
        for group, name in enumerate(names)
        for part, (served, read) in zip(record.parts, counts, strict=True)
    ]
    columns = [*LOAD_COLUMNS] if by is None else [by, *LOAD_COLUMNS]
    return pd.concat(frames, ignore_index=True)[columns]


def _counts(part: RoutingPart, group: np.ndarray, groups: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs served [groups, L, E] and tokens read [groups, L] of one part; `group` [T] is each token's."""
    depth = len(part.layers)
    cell = group[None, :] * depth + np.arange(depth)[:, None]  # [L, T]
    good = ~part.bad
    pairs = (cell[..., None] * experts + part.experts)[good]
    served = np.bincount(pairs.ravel(), minlength=groups * depth * experts).reshape(groups, depth, experts)
    read = np.bincount(cell[good], minlength=groups * depth).reshape(groups, depth)
    return served, read


def _load_frame(part: RoutingPart, served: np.ndarray, read: np.ndarray, record: RoutingRecord) -> pd.DataFrame:
    depth, experts = served.shape
    with np.errstate(invalid="ignore"):  # 0 / 0 where a layer read nothing
        token_share = served / read[:, None]
    columns = {
        "part": part.name,
        "layer": np.repeat(np.asarray(part.layers, dtype=np.int64), experts),
        "expert": np.tile(np.arange(experts), depth),
        "tokens": served.ravel(),
        "share": (token_share / record.top_k).ravel(),
        "token_share": token_share.ravel(),
    }
    return pd.DataFrame(columns)


def expert_load(model: CausalLM, rows: Iterable[Sequence[int]]) -> pd.DataFrame:
    """`load_table` of a model over texts; each of `rows` is a text's token ids, at least two, and read by itself.

    Raises InputError for a model without experts and for a row too short or too long, NonFiniteError where a router's
    logits are not finite.
    """
    texts = [tuple(row) for row in rows]
    limit = model.config.max_position_embeddings
    for number, row in enumerate(texts):
        if not 2 <= len(row) <= limit:
            raise InputError(f"expert_load: row {number}: expected 2 to {limit} tokens, found {len(row)}")
    seen = record(model, texts)
    if seen.bad_tokens:
        first = bad_table(seen).iloc[0]
        raise NonFiniteError(
            f"expert_load: part {first['part']}, layer {first['layer']}: expected finite router logits, found others "
            f"at position {first['position']} of row {first['prompt']}; record() marks such tokens and goes on"
        )
    return load_table(seen)


def load_by_kind(model: CausalLM, rows_by_kind: Mapping[str, Iterable[Sequence[int]]]) -> pd.DataFrame:
    """`expert_load` of the texts of each kind, one below the other, with the kind as first column."""
    if not rows_by_kind:
        raise InputError("load_by_kind: expected at least one kind of text, found none")
    return pd.concat(
        [expert_load(model, rows).assign(kind=kind) for kind, rows in rows_by_kind.items()], ignore_index=True
    )[["kind", *LOAD_COLUMNS]]


def dead_experts(load: pd.DataFrame) -> pd.DataFrame:
    """The rows of experts that served no token."""
    return load[load["tokens"] == 0].reset_index(drop=True)


def hot_experts(load: pd.DataFrame, factor: float = HOT) -> pd.DataFrame:
    """The rows of experts whose share is at least `factor` times the even share 1 / E, hottest first in a layer.

    `times_even` is share * E: 1 for an even load, at most E / A.
    """
    layers = _layers(load)
    count = load.groupby(layers, sort=False)["expert"].transform("size")
    found = load.assign(times_even=load["share"] * count)
    order = found[found["times_even"] >= factor].sort_values("times_even", ascending=False, kind="stable")
    place = load.groupby(layers, sort=False).ngroup()
    return order.loc[place[order.index].sort_values(kind="stable").index].reset_index(drop=True)


def largest_share(load: pd.DataFrame) -> pd.DataFrame:
    """The row of the strongest expert of every layer; of equals the lowest number."""
    return load.loc[load.groupby(_layers(load), sort=False)["tokens"].idxmax()].reset_index(drop=True)


def _layers(load: pd.DataFrame) -> list[str]:
    """The columns that tell the layers of a load table apart."""
    return [name for name in ("kind", "prompt", "part", "layer") if name in load.columns]


def load_summary(load: pd.DataFrame, hot: float = HOT) -> pd.DataFrame:
    """A row for each layer (of each kind or prompt, where there are any): how evenly its experts share the work.

    entropy            of the shares, in nats: log E for an even load, 0 where one expert did all
    effective_experts  exp(entropy)
    gini               of the shares: 0 for an even load, 1 - 1 / E where one expert did all
    dead               experts that served no token
    hot                experts with at least `hot` times the even share
    hottest            the strongest expert; of equals the lowest number
    largest_share, largest_token_share   of the hottest

    All are missing for a layer that read no token with finite probabilities.
    """
    layers = _layers(load)
    places = load[layers].drop_duplicates()
    counts = load["tokens"].to_numpy().reshape(len(places), -1).astype(float)
    shares = load["share"].to_numpy().reshape(counts.shape)
    entropy = -np.where(shares == 0, 0.0, shares * np.log(np.where(shares == 0, 1.0, shares))).sum(1)
    number = counts.shape[1]
    ascending = np.sort(shares, axis=1)
    gini = 2 * (ascending * np.arange(1, number + 1)).sum(1) / number - (number + 1) / number
    hottest = counts.argmax(1)
    columns = {
        "entropy": entropy,
        "effective_experts": np.exp(entropy),
        "gini": gini + np.where(np.isnan(shares[:, 0]), np.nan, 0.0),
        "dead": (counts == 0).sum(1),
        "hot": (shares * number >= hot).sum(1),
        "hottest": load["expert"].to_numpy().reshape(counts.shape)[np.arange(len(counts)), hottest],
        "largest_share": shares[np.arange(len(counts)), hottest],
        "largest_token_share": load["token_share"].to_numpy().reshape(counts.shape)[np.arange(len(counts)), hottest],
    }
    summary = places.reset_index(drop=True).assign(**columns)
    return without_counts(summary, ["dead", "hot", "hottest"], np.isnan(shares).any(1))


def without_counts(table: pd.DataFrame, names: Sequence[str], is_unread: np.ndarray) -> pd.DataFrame:
    """The counts `names` missing in the rows of layers that read no token with finite probabilities.

    There an expert without tokens is not dead, and none is the hottest.
    """
    return table.assign(**{name: table[name].astype("Float64" if table[name].dtype.kind == "f" else "Int64")
                           .mask(is_unread) for name in names})  # fmt: skip


def confidence_table(record: RoutingRecord) -> pd.DataFrame:
    """A row for each layer: how clearly its router chose.

    tokens, bad        tokens read with finite probabilities, and the others
    mean_margin, median_margin   logit A minus logit A + 1
    near_ties          tokens with a margin below 1e-5
    topk_mass          mean probability mass of the chosen experts before renormalising
    router_entropy     mean entropy of a token's probabilities over all experts, in nats
    """
    rows = []
    for part in record.parts:
        good = ~part.bad
        for index, layer in enumerate(part.layers):
            kept = good[index]
            margin = part.margin[index][kept].astype(np.float64)
            has_any = bool(kept.any())
            rows.append((
                part.name, layer, int(kept.sum()), int((~kept).sum()),
                margin.mean() if has_any else np.nan, np.median(margin) if has_any else np.nan,
                int((margin < NEAR_TIE).sum()),
                part.mass[index][kept].mean(dtype=np.float64) if has_any else np.nan,
                part.entropy[index][kept].mean(dtype=np.float64) if has_any else np.nan,
            ))  # fmt: skip
    return pd.DataFrame(rows, columns=[
        "part", "layer", "tokens", "bad", "mean_margin", "median_margin", "near_ties", "topk_mass", "router_entropy",
    ])  # fmt: skip


def summarise(record: RoutingRecord, hot: float = HOT) -> pd.DataFrame:
    """`load_summary` and `confidence_table` side by side, a row for each layer.

    `dead_expected` is the number of experts that would serve none of so few tokens under an even choice of A among E:
    E (1 - A / E)^tokens. Dead experts below it say nothing.
    """
    joined = confidence_table(record).merge(load_summary(load_table(record), hot), on=["part", "layer"])
    number = record.num_experts
    joined = joined.assign(dead_expected=number * (1 - record.top_k / number) ** joined["tokens"])
    return joined.assign(dead_expected=joined["dead_expected"].where(joined["tokens"] > 0))


def bad_table(record: RoutingRecord) -> pd.DataFrame:
    """A row for each layer and token whose logits gave no finite probabilities, in the order of computation."""
    frames = []
    for part in record.parts:
        layer, token = np.nonzero(part.bad)
        frames.append(pd.DataFrame({
            "part": part.name, "layer": np.asarray(part.layers, dtype=np.int64)[layer], "prompt": part.prompt[token],
            "position": part.position[token], "token": part.token[token],
        }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)
