"""What a narrower dtype of the router changes: the same model and tokens, other experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from workbench.analysis.routing.flips import RoutingFlips, compare, flip_totals, flips_by_layer
from workbench.analysis.routing.record import RoutingPrompt, RoutingRecord
from workbench.analysis.routing.recorder import record, rerouted
from workbench.analysis.routing.views import main_part
from workbench.kernels import Kernels
from workbench.model import CausalLM

#: Narrower than the router of a checkpoint, which is fp32.
NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def router_in(model: CausalLM, dtype: torch.dtype | None) -> Iterator[None]:
    """The same model and backends with router logits and softmax in `dtype`; the former kernels come back."""
    before = model.kernels
    model.kernels = before.altered(router_dtype=dtype)
    try:
        yield
    finally:
        model.kernels = before


def softmax_in(seen: RoutingRecord, dtype: torch.dtype) -> RoutingRecord:
    """The main part of `seen` with the softmax of its kept logits taken in `dtype`, each layer by itself.

    Margin, mass and entropy stay those of the logits. Raises InputError for a record without logits.
    """
    base = rerouted(seen)
    part = base.parts[0]
    kernels = Kernels(router_dtype=dtype)
    rows = [
        kernels.routing(torch.from_numpy(logits), top_k=seen.top_k, normalise=seen.normalise) for logits in part.logits
    ]
    experts = np.stack([experts.numpy() for _, experts in rows]).astype(np.int16)
    narrow = replace(
        part,
        experts=np.where(part.bad[..., None], np.int16(-1), experts),
        weights=np.stack([weights.float().numpy() for weights, _ in rows]),
    )
    return replace(base, parts=(narrow,), router_dtype=str(dtype).removeprefix("torch."))


def router_flips(model: CausalLM, prompts: Sequence[RoutingPrompt]) -> dict[str, RoutingFlips]:
    """Choices of a router in fp32 against those of a narrow one, by name of the setting.

    `softmax alone, DTYPE`: the fp32 run's logits, each layer by itself. `whole router, DTYPE`: logits and softmax
    narrow in every layer of a run of its own, so that a layer also inherits what the layers before it changed.
    """
    with router_in(model, torch.float32):
        wide = record(model, prompts, keep_logits=True)
    flips = {f"softmax alone, {_name(dtype)}": compare(rerouted(wide), softmax_in(wide, dtype)) for dtype in NARROW}
    for dtype in NARROW:
        with router_in(model, dtype):
            flips[f"whole router, {_name(dtype)}"] = compare(wide, record(model, prompts))
    return flips


def flip_rates(flips: Mapping[str, RoutingFlips]) -> pd.DataFrame:
    """`flips_by_layer` of the main part for each setting, the setting as first column."""
    tables = [main_part(flips_by_layer(found)).assign(setting=name) for name, found in flips.items()]
    table = pd.concat(tables, ignore_index=True)
    return table[["setting", *table.columns.drop("setting")]]


def flip_summary(flips: Mapping[str, RoutingFlips]) -> pd.DataFrame:
    """A row for each setting, main part: setting, pairs (of layer and token), set_flips, set_flip_rate, order_flips,
    tokens_flipped_rate (in any layer), median_margin (of all pairs in fp32), flip_margin (median at the flips; NaN
    without any).
    """
    rows = []
    for name, found in flips.items():
        total = main_part(flip_totals(found)).iloc[0]
        part = found.parts[0]
        at_flips = part.first.margin[part.set_flip]
        rows.append((
            name, int(total["pairs"]), int(total["set_flips"]), float(total["set_flip_rate"]),
            int(total["order_flips"]), float(total["tokens_flipped_rate"]),
            float(np.median(part.first.margin[part.compared])) if part.compared.any() else np.nan,
            float(np.median(at_flips)) if len(at_flips) else np.nan,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=[
        "setting", "pairs", "set_flips", "set_flip_rate", "order_flips", "tokens_flipped_rate", "median_margin",
        "flip_margin",
    ])  # fmt: skip


def margins(flips: Mapping[str, RoutingFlips]) -> dict[str, np.ndarray]:
    """Sorted fp32 margins (logits): of `all choices`, and at the set flips of each setting, main part."""
    first = next(iter(flips.values())).parts[0]
    found = {"all choices": np.sort(first.first.margin[first.compared])}
    for name, flip in flips.items():
        part = flip.parts[0]
        found[name] = np.sort(part.first.margin[part.set_flip])
    return found


def flip_reading(summary: pd.DataFrame) -> str:
    """What the settings of `flip_summary` do, as a caption."""
    rows = summary.set_index("setting")
    parts = []
    for dtype in map(_name, NARROW):
        whole, alone = rows.loc[f"whole router, {dtype}"], rows.loc[f"softmax alone, {dtype}"]
        at = f", half of them decided by less than {whole['flip_margin']:.1g}" if whole["set_flips"] else ""
        parts.append(
            f"in {dtype} it takes other experts in {100 * whole['set_flip_rate']:.2g} % of {whole['pairs']:.0f} "
            f"choices ({100 * alone['set_flip_rate']:.2g} % if the softmax alone is narrow){at}"
        )
    return (
        f"Against a router in fp32: {'; '.join(parts)}. The median margin of all choices is "
        f"{summary['median_margin'].iloc[0]:.2g}."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
