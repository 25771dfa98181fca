"""What the figures of notebook 02 draw of a routing record, and the sentences that state it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.analysis.routing.coactivation import coactivation
from workbench.analysis.routing.load import HOT, load_table, without_counts
from workbench.analysis.routing.prompts import read_prompts, text_prompt
from workbench.analysis.routing.record import RoutingPrompt, RoutingRecord
from workbench.analysis.routing.recorder import record
from workbench.analysis.wording import counted, ranged
from workbench.errors import InputError, NonFiniteError
from workbench.model import CausalLM
from workbench.tokenizer import Tokenizer

#: The row of a table that holds all kinds together.
ALL = "all"

#: Part that the views show; the multi-token-prediction head has one layer of its own.
PART = "model"


def texts(model: CausalLM, tokenizer: Tokenizer, path: str | Path, max_tokens: int) -> list[RoutingPrompt]:
    """The prompts of a file, the first `max_tokens` tokens of each, so that no long text outweighs the others.

    Raises InputError for a model without experts, and as `read_prompts` does.
    """
    if not model.config.is_moe:
        raise InputError(
            "expert routing: expected a checkpoint with experts, found a dense one (num_experts is 0); give a "
            "mixture-of-experts checkpoint of the family"
        )
    if max_tokens < 2:
        raise InputError(f"max_tokens: expected at least 2, found {max_tokens}")
    found = read_prompts(path, lambda: tokenizer, vocabulary=model.config.vocab_size)
    return [replace(prompt, ids=prompt.ids[:max_tokens]) for prompt in found]


def record_texts(model: CausalLM, prompts: Sequence[RoutingPrompt]) -> RoutingRecord:
    """A record over `prompts`. Raises NonFiniteError where a layer's router has finite probabilities for no token."""
    seen = record(model, prompts)
    part = seen.part(PART)
    gone = [layer for layer, bad in zip(part.layers, part.bad, strict=True) if bad.all()]
    if gone:
        raise NonFiniteError(
            f"expert routing: expected finite router logits, found none for any of {len(part.token)} tokens in layer "
            f"{gone[0]}; `workbench trace` finds the op where they come from"
        )
    return seen


def some_of_each_kind(prompts: Sequence[RoutingPrompt], count: int) -> list[RoutingPrompt]:
    """The first `count` prompts of every kind, in their order. Raises InputError for a count below 1."""
    if count < 1:
        raise InputError(f"flip_texts: expected at least 1, found {count}; so many texts of each kind are compared")
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        if seen[prompt.kind] <= count:
            kept.append(prompt)
    return kept


def main_part(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table of the recorder that are the model's own layers."""
    return table[table["part"] == PART]


def kinds(seen: RoutingRecord) -> list[str]:
    """The kinds of the prompts, in their order."""
    return list(dict.fromkeys(prompt.kind for prompt in seen.prompts))


def main_load(seen: RoutingRecord) -> pd.DataFrame:
    """`load_table` of the main part by kind, `ALL` first: kind, layer, expert, tokens, share, times_even = share E."""
    whole = load_table(seen).assign(kind=ALL)
    table = pd.concat([whole, load_table(seen, by="kind")], ignore_index=True)
    table = main_part(table).drop(columns="part").reset_index(drop=True)
    return table.assign(times_even=table["share"] * seen.num_experts)[
        ["kind", "layer", "expert", "tokens", "share", "times_even"]
    ]


def load_grid(load: pd.DataFrame, kind: str = ALL) -> pd.DataFrame:
    """`times_even` of one kind of `main_load`, layers down, experts across."""
    return load[load["kind"] == kind].pivot(index="layer", columns="expert", values="times_even")


def hottest_expert(load: pd.DataFrame) -> pd.Series:
    """The row of `main_load` that does most over all kinds; of equals the lowest layer's lowest number."""
    whole = load[load["kind"] == ALL].sort_values(["layer", "expert"])
    return whole.loc[whole["times_even"].idxmax()]


def load_reading(load: pd.DataFrame) -> str:
    """How evenly the experts of `main_load` are used, as a caption."""
    hottest = hottest_expert(load)
    alike = load[(load["kind"] == ALL) & (load["times_even"] == hottest["times_even"])]
    most = "the most of all" if len(alike) == 1 else f"like {counted(len(alike) - 1, 'other')}, the most of all"
    grid = load_grid(load).to_numpy()
    dead, hot = int((grid == 0).sum()), int((grid >= HOT).sum())
    effective = _effective(grid / grid.shape[1])
    return (
        f"Expert {hottest['expert']:.0f} of layer {hottest['layer']:.0f} does {hottest['times_even']:.2f} times its "
        f"even share, {most}; {hot} of {grid.size} experts do {HOT:g} times or more, {dead} serve no token. "
        f"Shared out evenly the same work would keep {ranged(effective.min(), effective.max())} of {grid.shape[1]} "
        "experts of a layer busy."
    )


def _sentence_case(name: str) -> str:
    return name[:1].upper() + name[1:]


def _effective(shares: np.ndarray) -> np.ndarray:
    """exp of the entropy of each row of shares."""
    logs = np.log(np.where(shares > 0, shares, 1.0))
    return np.exp(-(shares * logs).sum(-1))


def layer_table(seen: RoutingRecord, rows: int = 16) -> tuple[pd.DataFrame, str]:
    """(a row for each layer, or for the `rows` most uneven ones, caption): how even, hottest, hot and dead experts."""
    load = main_part(load_table(seen))
    grid = load.pivot(index="layer", columns="expert", values="share")
    shares = grid.to_numpy()
    read = load.groupby("layer")["tokens"].sum().to_numpy() / seen.top_k
    expected = np.where(read > 0, seen.num_experts * (1 - seen.top_k / seen.num_experts) ** read, 0.0)
    table = pd.DataFrame({
        "layer": grid.index, "effective": _effective(shares), "hottest": shares.argmax(1),
        "times": shares.max(1) * seen.num_experts, "tokens": shares.max(1) * seen.top_k,
        "hot": (shares * seen.num_experts >= HOT).sum(1), "dead": (shares == 0).sum(1), "chance": expected.round(2),
    })  # fmt: skip
    table = without_counts(table, ["hottest", "hot", "dead", "chance"], np.isnan(shares).any(1))
    hot, dead = int(table["hot"].sum()), int(table["dead"].sum())
    chance = expected.sum()
    caption = f"{hot} hot and {dead} dead experts in {counted(len(table), 'layer')}; " + (
        "an even choice would leave none dead." if chance < 0.05 else f"an even choice would leave {chance:.2g} dead."
    )
    if len(table) > rows:
        table = table.sort_values("effective", kind="stable").head(rows).sort_values("layer")
        caption += f" The {rows} most uneven layers."
    return table, caption


#: Headings of `layer_table`.
LAYER_HEADINGS = {
    "effective": "busy experts, if evenly", "hottest": "hottest expert", "times": "× its even share",
    "tokens": "of all tokens", "hot": f"hot (≥ {HOT:g} ×)", "dead": "dead", "chance": "dead if even",
}  # fmt: skip


def depth_table(seen: RoutingRecord) -> pd.DataFrame:
    """Kind (ALL first), layer, effective (experts, of the load), entropy (of a token's probabilities, mean, nats), mass
    (of the chosen, mean), margin (median, logits). Tokens without finite probabilities are left out.
    """
    part = seen.part(PART)
    of_token = np.array([prompt.kind for prompt in seen.prompts])[part.prompt]
    load = main_load(seen)
    rows = []
    for kind in [ALL, *kinds(seen)]:
        effective = _effective(load_grid(load, kind).to_numpy() / seen.num_experts)
        for index, layer in enumerate(part.layers):
            kept = ~part.bad[index] & ((of_token == kind) | (kind == ALL))
            has_any = bool(kept.any())
            rows.append((
                kind, layer, effective[index] if has_any else np.nan,
                part.entropy[index][kept].mean(dtype=np.float64) if has_any else np.nan,
                part.mass[index][kept].mean(dtype=np.float64) if has_any else np.nan,
                float(np.median(part.margin[index][kept])) if has_any else np.nan,
            ))  # fmt: skip
    return pd.DataFrame(rows, columns=["kind", "layer", "effective", "entropy", "mass", "margin"])


def depth_reading(depth: pd.DataFrame, top_k: int, experts: int) -> str:
    whole = depth[depth["kind"] == ALL].sort_values("layer")
    first, last = whole.iloc[0], whole.iloc[-1]
    used = depth[depth["kind"] != ALL].groupby("kind", sort=False)["effective"].mean()
    few, many = f"{used.min():.3g}", f"{used.max():.3g}"
    if len(used) < 2:
        narrow = ""
    elif few == many:
        narrow = f" Each kind of text uses {few} of {experts} experts on average."
    else:
        narrow = (
            f" {_sentence_case(used.idxmin())} text uses the fewest experts, {few} of {experts} on average, "
            f"{used.idxmax()} the most, {many}."
        )
    entropy = f"{first['entropy']:.2f}", f"{last['entropy']:.2f}"
    mass = f"{100 * first['mass']:.0f} %", f"{100 * last['mass']:.0f} %"
    chosen = f"chosen expert{' holds' if top_k == 1 else 's hold'}"
    if len(whole) == 1:
        goes, hold = f"In layer {first['layer']:.0f} a token's entropy is {entropy[0]}", mass[0]
    else:
        goes = (
            f"From layer {first['layer']:.0f} to {last['layer']:.0f} a token's entropy goes from {entropy[0]} to "
            f"{entropy[1]}"
        )
        hold = mass[0] if mass[0] == mass[1] else f"{mass[0]} and {mass[1]}"
    return (
        f"{goes} nats ({np.log(experts):.2f} were no choice at all), and the {top_k} {chosen} {hold} of the "
        f"probability before it is renormalised.{narrow}"
    )


def kind_distances(load: pd.DataFrame) -> pd.DataFrame:
    """layer, kind, other, distance: total variation between the loads of two kinds, 1/2 sum |share - share|, 0 to 1."""
    found = [kind for kind in dict.fromkeys(load["kind"]) if kind != ALL]
    grids = {kind: load_grid(load, kind) for kind in found}
    experts = load["expert"].nunique()
    rows = [
        (layer, kind, other, float(distance))
        for place, kind in enumerate(found)
        for other in found[place + 1 :]
        for layer, distance in ((grids[kind] - grids[other]).abs().sum(axis=1) / 2 / experts).items()
    ]
    return pd.DataFrame(rows, columns=["layer", "kind", "other", "distance"])


#: What is said where all texts are of one kind.
ONE_KIND = "All texts are of one kind: there is nothing to compare."


def kind_reading(load: pd.DataFrame) -> str:
    distances = kind_distances(load)
    if distances.empty:
        return ONE_KIND
    mean = distances.groupby(["kind", "other"], sort=False)["distance"].mean()
    by_layer = distances.groupby("layer")["distance"].mean()
    far, near = mean.idxmax(), mean.idxmin()
    part = f"{_sentence_case(far[0])} and {far[1]} send {100 * mean.max():.0f} % of their work to different experts"
    if mean.max() > mean.min():
        part += f", {near[0]} and {near[1]} only {100 * mean.min():.0f} %"
    if len(by_layer) == 1:
        return f"{part} of layer {by_layer.index[0]}."
    if by_layer.max() == by_layer.min():
        return f"{part}, in every layer."
    return (
        f"{part} (mean over layers). Kinds are furthest apart in layer {by_layer.idxmax()} "
        f"({100 * by_layer.max():.0f} %), closest in layer {by_layer.idxmin()} ({100 * by_layer.min():.0f} %)."
    )


def most_telling_layer(load: pd.DataFrame) -> int:
    """The layer in which kinds are furthest apart; the most uneven one where there is one kind."""
    distances = kind_distances(load)
    if distances.empty:
        grid = load_grid(load)
        return int(grid.index[_effective(grid.to_numpy() / grid.shape[1]).argmin()])
    return int(distances.groupby("layer")["distance"].mean().idxmax())


@dataclass(frozen=True, slots=True, eq=False)
class PairView:
    """Who is chosen with whom.

    ratio   [L, E, E] (tokens together + 1) / (tokens expected + 1): 1 for experts chosen independently. Expected of
            loads n_i and n_j over T tokens is n_i n_j / T times (A - 1) E / (A (E - 1)), since A of E are always
            chosen; the ones keep a pair that few tokens could show near 1. NaN on the diagonal
    counts  [L, E, E] tokens together
    """

    layers: tuple[int, ...]
    ratio: np.ndarray
    counts: np.ndarray

    def order(self, place: int) -> tuple[int, ...]:
        """Experts of the layer at `place`, those often chosen together beside each other."""
        return _beside(self.ratio[place])

    def strongest(self) -> pd.DataFrame:
        """The pair with the largest ratio of each layer: layer, expert, other, tokens, ratio."""
        rows = []
        for index, layer in enumerate(self.layers):
            place = np.unravel_index(np.nanargmax(np.triu(self.ratio[index], 1)), self.ratio[index].shape)
            first, second = (int(i) for i in place)
            rows.append((layer, first, second, int(self.counts[index][place]), float(self.ratio[index][place])))
        return pd.DataFrame(rows, columns=["layer", "expert", "other", "tokens", "ratio"])


#: What is said where a record has no pairs.
NO_PAIRS = "Every token is served by one expert: none is chosen together with another."


def pair_view(seen: RoutingRecord) -> PairView:
    """`PairView` of the main part; without layers for one expert per token, which has no pairs."""
    if seen.top_k < 2:
        return PairView((), np.empty((0, 0, 0)), np.empty((0, 0, 0), dtype=np.int64))
    found = coactivation(seen, PART)
    experts, chosen = seen.num_experts, seen.top_k
    alone = np.diagonal(found.counts, axis1=1, axis2=2).astype(np.float64)
    level = (chosen - 1) * experts / (chosen * max(experts - 1, 1))
    tokens = np.maximum(found.tokens, 1)[:, None, None]
    expected = alone[:, :, None] * alone[:, None, :] / tokens * level
    ratio = (found.counts + 1) / (expected + 1)
    ratio[:, np.arange(experts), np.arange(experts)] = np.nan
    return PairView(found.layers, ratio, found.counts)


def _beside(ratio: np.ndarray) -> tuple[int, ...]:
    """An order in which experts often chosen together stand together: average linkage over log ratios, and of two
    groups that are joined the earlier expert's first.
    """
    bond = np.where(np.isnan(ratio), -np.inf, np.log(ratio))
    groups = {expert: [expert] for expert in range(len(bond))}
    while len(groups) > 1:
        first, second = sorted(int(i) for i in np.unravel_index(bond.argmax(), bond.shape))
        sizes = len(groups[first]), len(groups[second])
        joined = (sizes[0] * bond[first] + sizes[1] * bond[second]) / sum(sizes)
        bond[first], bond[:, first] = joined, joined
        bond[first, first], bond[second], bond[:, second] = -np.inf, -np.inf, -np.inf
        groups[first] += groups.pop(second)
    return tuple(groups[0])


def pair_reading(view: PairView) -> str:
    strongest = view.strongest()
    top = strongest.loc[strongest["ratio"].idxmax()]
    weak = strongest.loc[strongest["ratio"].idxmin()]
    least = "" if top["layer"] == weak["layer"] else (
        f"; in layer {weak['layer']:.0f} no pair exceeds {weak['ratio']:.2f} times"
    )  # fmt: skip
    return (
        f"Experts {top['expert']:.0f} and {top['other']:.0f} of layer {top['layer']:.0f} serve "
        f"{counted(int(top['tokens']), 'token')} together, {top['ratio']:.2f} times as many as two independent ones "
        f"would{least}. Experts are ordered so that those often "
        "chosen together stand beside each other."
    )


@dataclass(frozen=True, slots=True)
class TextView:
    """One prompt in one layer: a piece of text for each token, its experts (strongest first) and their weights."""

    layer: int
    pieces: tuple[str, ...]
    experts: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]


def text_view(seen: RoutingRecord, tokenizer: Tokenizer, layer: int, prompt: int = 0, most: int = 400) -> TextView:
    """The first `most` tokens of a prompt of `seen`. Raises InputError for a layer or prompt that there is not."""
    part = seen.part(PART)
    if layer not in part.layers or not 0 <= prompt < len(seen.prompts):
        raise InputError(
            f"text view: expected a layer of {list(part.layers)} and a prompt below {len(seen.prompts)}, found layer "
            f"{layer}, prompt {prompt}"
        )
    index = part.layers.index(layer)
    places = np.flatnonzero(part.prompt == prompt)[:most]
    stream = tokenizer.stream_decoder(skip_special=False)
    pieces = [stream.push(int(part.token[place])) for place in places]
    if pieces:
        pieces[-1] += stream.finish()
    return TextView(
        layer, tuple(pieces), tuple(map(tuple, part.experts[index][places].tolist())),
        tuple(map(tuple, part.weights[index][places].tolist())),
    )  # fmt: skip


def prompt_record(model: CausalLM, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> RoutingRecord:
    """A record with logits of the first `max_tokens` tokens of one text."""
    asked = text_prompt(prompt, tokenizer, title="prompt", where="prompt")
    return record(model, [replace(asked, ids=asked.ids[:max_tokens])], keep_logits=True)
