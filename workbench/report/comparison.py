"""The page of one comparison: verdict first, then where the sides part, routers, logits, and what ran."""

from __future__ import annotations

import html
import math
from typing import Any

import numpy as np
import pandas as pd

from workbench import __version__, taps
from workbench.analysis.compare import Comparison
from workbench.plots.tracing import stage_map, step_timeline
from workbench.report.attestation import attested
from workbench.report.display import Html, Shown, folded, note, number, stack, table, verdict_card
from workbench.report.page import whole_page

#: Columns of the tables of stages: name in `Comparison.stages` -> heading.
STAGE_HEADINGS = {
    "step": "pass", "tap": "tap point", "error": "error", "max_error": "largest", "worst_row_error": "worst row",
    "roundings": "roundings", "rounding": "of", "own_a": "a beside float64", "own_b": "b beside float64",
}  # fmt: skip
FAULT_HEADINGS = {
    "side": "side", "step": "pass", "tap": "tap point", "op": "op", "error": "error", "limit": "explained",
}  # fmt: skip
FLIP_HEADINGS = {
    "layer": "layer", "position": "position", "token": "token", "margin": "margin in a", "replaced": "experts replaced",
}  # fmt: skip
#: Rows of a table that are shown.
ROWS = 12


def comparison_view(result: Comparison) -> Html:
    """Everything that a comparison found, for a notebook or a page."""
    where = result.verdict.where.tap
    sides = (result.a.label, result.b.label)
    parts: list[Shown] = [verdict_card(result.verdict), stage_map(result.stages, where, sides)]
    steps = result.stages["step"].nunique()
    if steps > 1:
        parts.append(step_timeline(result.stages, _followed(result.stages), "roundings"))
    parts.append(_stages(result))
    if len(result.faults):
        shown = result.faults[list(FAULT_HEADINGS)].head(ROWS)
        shown = shown.assign(error=[value if value == value else math.inf for value in shown["error"]])
        caption = f"Tensors that their own inputs do not explain, in order: {len(shown)} of {len(result.faults)}."
        parts.append(table(_plain(shown), caption, FAULT_HEADINGS))
    parts.append(_flips(result))
    parts.append(_logits(result))
    if len(result.not_compared):
        rows = result.not_compared.assign(name=result.not_compared["tap"].map(lambda tap: taps.split_name(tap)[1]))
        counts = rows.groupby(["name", "reason"], sort=False).size().reset_index(name="tensors")
        missing = table(counts, f"{len(rows)} tensors are not compared.", {"name": "tap point"})
        parts.append(folded("Not compared", missing))
    parts.append(attested({f"a: {sides[0]}": result.a.backends, f"b: {sides[1]}": result.b.backends}))
    return stack(*parts)


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Infinite errors as words: tables of people have no infinity."""
    return frame.astype(object).map(
        lambda value: "not finite" if isinstance(value, float) and math.isinf(value) else value
    )


def _followed(stages: pd.DataFrame) -> list[str]:
    """Tap points to follow over the passes: residuals of three layers, and the logits."""
    names = [tap for tap in dict.fromkeys(stages["tap"]) if taps.split_name(tap)[1] == taps.RESIDUAL]
    chosen = [names[i] for i in sorted({0, len(names) // 2, len(names) - 1})] if names else []
    return [*chosen, *([taps.LOGITS] if (stages["tap"] == taps.LOGITS).any() else [])] or [stages.iloc[-1]["tap"]]


def _stages(result: Comparison) -> Shown:
    different = result.stages[result.stages["error"] > 0]
    if different.empty:
        return note("No tensor differs, so that no table of stages is shown.")
    rows = _plain(different.head(ROWS)[list(STAGE_HEADINGS)])
    first = table(rows, "The first tensors that differ, in order.", STAGE_HEADINGS)
    rank = different["roundings"].replace(np.inf, np.finfo(np.float64).max)
    order = rank.sort_values(ascending=False, kind="stable").index[:ROWS]
    largest = table(_plain(different.loc[order, list(STAGE_HEADINGS)]), "Those that differ most.", STAGE_HEADINGS)
    return stack(first, folded("Those that differ most", largest))


def _flips(result: Comparison) -> Shown:
    routing = result.summary["routing"]
    if routing is None:
        return note("Routers: a side does not show them, or there are none.")
    if not routing["choices"]:
        return note("Routers: no choice can be compared, the logits of one side are not finite.")
    if result.flips.empty:
        return note(f"Routers: the same experts in all {routing['choices']} choices of a token in a layer.")
    far, near = result.flips[~result.flips["is_near_tie"]], result.flips[result.flips["is_near_tie"]]
    parts: list[Shown] = []
    if len(far):
        shown = far.sort_values("margin", ascending=False).head(ROWS)[list(FLIP_HEADINGS)]
        caption = f"Routers: other experts in {len(far)} of {routing['choices']} choices; those of the largest margin."
        parts.append(table(shown, caption, FLIP_HEADINGS))
    if len(near):
        rows = near.head(ROWS)[list(FLIP_HEADINGS)]
        caption = f"Routers: {len(near)} choices changed by a margin below 1e-5, where either is right."
        ties = table(rows, caption, FLIP_HEADINGS)
        parts.append(folded("Near ties", ties) if len(far) else ties)
    return stack(*parts)


def _logits(result: Comparison) -> Shown:
    found = result.summary["logit_summary"]
    if found["kl_mean"] is None:
        return note("Logits: no position is finite on both sides, or a side does not show them.")
    flipped = result.logits[result.logits["top1_flip"].astype(bool)]
    sentence = (
        f"Logits: max |b - a| / max |a| is {found['parity']:.3g}; KL of b from a is {found['kl_mean']:.3g} nats on "
        f"average and {found['kl_max']:.3g} at most; another likeliest token at {found['top1_flips']} of "
        f"{found['positions']} positions"
        + (f"; {found['not_finite']} positions are not finite." if found["not_finite"] else ".")
    )
    if flipped.empty:
        return note(sentence)
    shown = flipped.sort_values("kl", ascending=False).head(ROWS)[["position", "top_a", "top_b", "kl"]]
    return stack(note(sentence), folded("Positions with another likeliest token", table(
        shown, f"{len(shown)} of {len(flipped)}, the largest KL first.",
        {"top_a": "token of a", "top_b": "token of b", "kl": "KL in nats"},
    )))  # fmt: skip


def comparison_page(result: Comparison, checkpoint: str | None, command: str) -> str:
    """One HTML file that holds everything it shows."""
    a, b = result.a, result.b
    title = f"{a.label} beside {b.label}"
    entries = {
        "Command": command, "Checkpoint": checkpoint or "none",
        "Side a": _about(a.about()), "Side b": _about(b.about()),
        "Tokens": " + ".join(str(ids.shape[1]) for ids in a.feeds), "Workbench": __version__,
    }  # fmt: skip
    sentence = f"{result.verdict.verdict[:1].upper()}{result.verdict.verdict[1:]}"
    if result.verdict.where.tap is not None:
        sentence += f": {result.verdict.where.tap}"
    if result.side is not None:
        sentence += f", {'both sides' if result.side == 'both' else f'side {result.side}'}"
    return whole_page(
        title, kicker="Comparison", findings=[f"{html.escape(sentence)}."], boxes=_numbers(result),
        body=comparison_view(result).page, entries=entries,
    )  # fmt: skip


def _numbers(result: Comparison) -> list[tuple[str, str, str]]:
    stages = result.stages
    different = int((~stages["equal"]).sum())
    boxes = [("Tensors that differ", f"{different}", f"of {len(stages)} that both sides show")]
    finite = stages[np.isfinite(stages["roundings"]) & (stages["roundings"] > 0)]
    if len(finite):
        row = finite.loc[finite["roundings"].idxmax()]
        boxes.append(("Largest error", f"{row['roundings']:.3g}", f"roundings of {row['rounding']}, at {row['tap']}"))
    bad = int((stages["finite_a"] != stages["finite_b"]).sum())
    if bad:
        boxes.append(("Not finite on one side", f"{bad}", "tensors"))
    routing, logits = result.summary["routing"], result.summary["logit_summary"]
    if routing is not None and routing["choices"]:
        said = f"of {routing['choices']} choices; {routing['near_ties']} near ties more"
        boxes.append(("Other experts", f"{routing['flips']}", said))
    if logits["kl_mean"] is not None:
        said = f"nats on average, {logits['kl_max']:.2g} at most"
        boxes.append(("KL of the logits", f"{logits['kl_mean']:.2g}", said))
    return boxes


def _about(side: dict[str, Any]) -> str:
    parts = [side["label"], f"dtype {side['dtype'] or 'unknown'}"]
    if side["policy"]:
        settings = {name: value for name, value in side["policy"].items() if value not in ([], None)}
        parts.append("policy " + ", ".join(f"{name} {number(value)}" for name, value in settings.items()))
    backends = list(dict.fromkeys(f"{row.get('op')}: {row.get('backend')}" for row in side["backends"]))
    return "; ".join([*parts, *([", ".join(backends)] if backends else [])])
