"""Findings of notebook 02: how the load is spread, what a narrow router changes, and what the ways to compute cost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch

from workbench.analysis import expert_paths
from workbench.analysis.routing.load import HOT, dead_experts, load_table
from workbench.analysis.routing.record import RoutingRecord
from workbench.analysis.routing.synthetic import Planted
from workbench.analysis.routing.views import (
    ALL,
    PART,
    depth_table,
    hottest_expert,
    kind_distances,
    load_grid,
    main_load,
    main_part,
    pair_view,
)
from workbench.analysis.wording import counted, ranged


def planted_check(planted: Planted) -> dict[str, int]:
    """Whether the views find what was put into a synthetic router, main part.

    dead_found of dead_planted experts serve no token; in bonds_found of `layers` layers the pair that is chosen
    together most is of one group.
    """
    gone = dead_experts(main_part(load_table(planted.record)))
    found = set(zip(gone["layer"], gone["expert"], strict=True))
    part = planted.record.part(PART)
    dead = [(layer, int(expert)) for layer, row in zip(part.layers, planted.dead, strict=True) for expert in row]
    strongest = pair_view(planted.record).strongest()
    bonds = [
        group[row.expert] == group[row.other]
        for group, row in zip(planted.group, strongest.itertuples(), strict=True)
    ]
    return {
        "layers": len(part.layers), "experts": planted.record.num_experts, "top_k": planted.record.top_k,
        "dead_planted": len(dead), "dead_found": len(found.intersection(dead)), "dead_all": len(found),
        "bonds_found": int(sum(bonds)),
    }  # fmt: skip


def planted_reading(planted: Planted) -> str:
    """`planted_check` as a sentence."""
    found = planted_check(planted)
    return (
        f"{found['layers']} layers of {found['experts']} experts, top-{found['top_k']}, with known content: "
        f"{found['dead_found']} of {found['dead_planted']} planted dead experts are shown dead, besides "
        f"{found['dead_all'] - found['dead_found']} that no token happened to choose; in {found['bonds_found']} of "
        f"{found['layers']} layers the strongest pair is of one planted group."
    )


def routing_findings(
    *, seen: RoutingRecord, flips: pd.DataFrame, counts: pd.DataFrame, recorded: Mapping[str, object] | None,
    wide: Planted,
) -> dict[str, object]:  # fmt: skip
    """The findings as plain JSON values: a verdict of three lines, four numbers, and what they were taken from.

    seen      a record of the checkpoint over prompts of all kinds
    flips     `narrowing.flip_summary`;  counts  `expert_paths.count_paths`
    recorded  the result of the benchmark of the expert paths, None where none is installed
    """
    load = main_load(seen)
    grid, depth = load_grid(load).to_numpy(), depth_table(seen)
    whole = depth[depth["kind"] == ALL]
    hottest = hottest_expert(load)
    spread = {
        "layers": len(grid), "experts": seen.num_experts, "top_k": seen.top_k,
        "tokens": len(seen.part(PART).token), "bad_tokens": int(seen.part(PART).bad.sum()),
        "dead": int((grid == 0).sum()), "hot": int((grid >= HOT).sum()),
        "hottest_layer": int(hottest["layer"]), "hottest_expert": int(hottest["expert"]),
        "hottest_times_even": float(hottest["times_even"]),
        "effective_least": float(whole["effective"].min()), "effective_most": float(whole["effective"].max()),
    }  # fmt: skip
    kinds = kind_distances(load)
    mean = kinds.groupby(["kind", "other"], sort=False)["distance"].mean()
    of_kinds = {f"{kind} and {other}": float(value) for (kind, other), value in mean.items()}
    narrow = {
        row.setting: {"set_flips": row.set_flips, "set_flip_rate": row.set_flip_rate, "flip_margin": row.flip_margin}
        for row in flips.itertuples()
    }
    return {
        "title": "Expert routing",
        "verdict": [
            _load_line(spread, of_kinds),
            _narrow_line(narrow, float(flips["median_margin"].iloc[0])),
            _path_line(recorded, counts),
        ],
        "numbers": _four_numbers(spread, whole, narrow),
        "conditions": conditions(seen),
        "load": spread,
        "depth": {
            name: [float(value) for value in whole[name]] for name in ("effective", "entropy", "mass", "margin")
        },
        "kind_distances": of_kinds,
        "flips": narrow,
        "host_syncs": {row.path: int(row.syncs) for row in counts.itertuples()},
        "has_recorded_times": recorded is not None,
        "wide": planted_check(wide),
    }


def conditions(seen: RoutingRecord) -> dict[str, object]:
    """Under what a record was made: dtypes, threads, seed, policy, and the backend of each op."""
    return {
        "dtype": seen.dtype,
        "router": "logits in the model's dtype, softmax in fp32" if seen.router_dtype is None else seen.router_dtype,
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "policy": dict(seen.origin.policy or {}),
        "backends": {
            f"{row['op']} ({row['dtype']}, {row['tokens']} token{'' if row['tokens'] == '1' else 's'})": row["backend"]
            for row in seen.origin.backends
        },
    }  # fmt: skip


def _load_line(spread: Mapping[str, object], kinds: Mapping[str, float]) -> str:
    total = spread["layers"] * spread["experts"]
    apart = ""
    if kinds:
        far = max(kinds, key=kinds.get)
        apart = f"; {far} send {100 * kinds[far]:.0f} % of their work to different experts, the most of all kinds"
    bad = f"; {counted(spread['bad_tokens'], 'choice')} had no finite probabilities" if spread["bad_tokens"] else ""
    return (
        f"Load: {spread['dead']} of {counted(total, 'expert')} are dead and {spread['hot']} hot over "
        f"{counted(spread['tokens'], 'token')}; "
        f"expert {spread['hottest_expert']} of layer {spread['hottest_layer']} does "
        f"{spread['hottest_times_even']:.2f} times its even share{apart}{bad}."
    )


def _narrow_line(narrow: Mapping[str, Mapping[str, float]], margin: float) -> str:
    parts = [
        f"{dtype} changes {100 * narrow[f'whole router, {dtype}']['set_flip_rate']:.2g} % of the choices "
        f"({100 * narrow[f'softmax alone, {dtype}']['set_flip_rate']:.2g} % by its softmax alone)"
        for dtype in ("bfloat16", "float16")
    ]
    return f"Router dtype: against fp32, {' and '.join(parts)}; the median margin is {margin:.2g}."


def _path_line(recorded: Mapping[str, object] | None, counts: pd.DataFrame) -> str:
    free = ", ".join(counts[counts["syncs"] == 0]["path"]) or "none"
    if recorded is None:
        return f"Expert paths: no recorded times are installed here; these need no host sync: {free}."
    times = expert_paths.path_times(recorded)
    even = expert_paths.fastest(times[times["load"] == expert_paths.EVEN])
    parts = []
    for dtype, rows in even.groupby("dtype", sort=False):
        few, many = rows.loc[rows["tokens"].idxmin()], rows.loc[rows["tokens"].idxmax()]
        one, most = (counted(row["tokens"], "token") for row in (few, many))
        parts.append(
            f"{dtype} {few['path']} for {one} ({100 * few['share']:.0f} % of the memory limit), {many['path']} for "
            f"{most} ({100 * many['share']:.0f} %)"
        )
    return f"Expert paths, fastest at the real shape: {'; '.join(parts)}."


def _four_numbers(spread: Mapping, whole: pd.DataFrame, narrow: Mapping) -> list[dict[str, str]]:
    flip = narrow["whole router, bfloat16"]
    margin = "no flip" if np.isnan(flip["flip_margin"]) else f"median margin there {flip['flip_margin']:.1g}"
    last = whole.iloc[-1]
    return [
        {
            "label": "Experts in use per layer",
            "value": ranged(spread["effective_least"], spread["effective_most"]),
            "note": f"of {spread['experts']}, as exp of the entropy of the load",
        },
        {
            "label": "Hottest expert",
            "value": f"{spread['hottest_times_even']:.2f} ×",
            "note": f"its even share, layer {spread['hottest_layer']}; {counted(spread['dead'], 'expert')} dead",
        },
        {
            "label": f"Mass of the chosen {spread['top_k']}, last layer",
            "value": f"{100 * last['mass']:.0f} %",
            "note": f"{100 * spread['top_k'] / spread['experts']:.0f} % were no choice at all",
        },
        {
            "label": "Choices changed by a bfloat16 router",
            "value": f"{100 * flip['set_flip_rate']:.2g} %",
            "note": margin,
        },
    ]
