"""Figures of the benchmark of one GatedDeltaNet layer, read from its result file."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

from workbench.errors import InputError

#: The benchmark that writes them, which stands in the project's folder `benchmarks`.
RECORDED = "gdn_layer_vs_transformers"

#: Forms of the case names there.
_LAYER = re.compile(r"(?P<setting>.+), (?P<part>whole layer|all but projections), (?P<phase>.+)")
_ALONE = re.compile(
    r"(?P<dtype>\w+), gated delta rule alone, (?P<tokens>\d+) tokens, chunk (?P<chunk>\d+)(?P<by>, by solver)?"
)


def against_transformers(recorded: Mapping[str, object]) -> pd.DataFrame:
    """One row for each setting (a dtype, and a chunk where it is not the usual), part of the layer and phase.

    Columns: setting, part, phase, workbench and transformers (median, in `unit`), ratio (median over rounds of
    transformers / workbench), ratio_iqr, unit.
    """
    rows = []
    for case, group in _cases(recorded, _LAYER):
        by = group.set_index("backend")
        ratio = by.loc["transformers / workbench"]
        rows.append(
            case | {
                "workbench": by.loc["workbench", "median"], "transformers": by.loc["transformers", "median"],
                "ratio": ratio["median"], "ratio_iqr": ratio["iqr"], "unit": by.loc["workbench", "unit"],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def structures(recorded: Mapping[str, object]) -> pd.DataFrame:
    """One row for each length, chunk and structure of the gated delta rule alone, then for each solver if timed.

    Columns: kind ("structure" or "solver"), name, tokens, chunk, ms (median), kernels (launched), syncs (of the host).
    """
    rows = []
    for case, group in _cases(recorded, _ALONE):
        timed = group[group["unit"].isin(("ms", "kernels launched", "host syncs"))]
        for name, found in timed.groupby("backend", sort=False):
            value = found.set_index("unit")["median"]
            rows.append((
                "structure" if case["by"] is None else "solver", name, int(case["tokens"]), int(case["chunk"]),
                value["ms"], int(value["kernels launched"]), int(value["host syncs"]),
            ))  # fmt: skip
    return pd.DataFrame(rows, columns=["kind", "name", "tokens", "chunk", "ms", "kernels", "syncs"])


def source(recorded: Mapping[str, object]) -> str:
    """Hardware, versions and command of a result, as a sentence."""
    hardware, versions = recorded["hardware"], recorded["versions"]
    threads = hardware["threads"]
    named = [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    dirty = ", with changes" if recorded["dirty"] else ""
    return (
        f"Measured on {hardware['model']} ({hardware['instructions']}), {threads} thread{'' if threads == 1 else 's'}, "
        f"{', '.join(named)}, by `{recorded['command']}` at commit {str(recorded['commit'])[:10]}{dirty}."
    )


def structure_reading(alone: pd.DataFrame) -> str:
    """What the structures differ in, read from the kernels that each launches over the longest input timed."""
    rows = alone[alone["kind"] == "structure"]
    rows = rows[rows["tokens"] == rows["tokens"].max()]
    kernels, ms = (rows.pivot(index="chunk", columns="name", values=value) for value in ("kernels", "ms"))
    if not {"two-phase", "interleaved"} <= set(kernels):
        return ""
    same = kernels.index[kernels["two-phase"] == kernels["interleaved"]]
    if not len(same):
        return "Two-phase and interleaved launch different numbers of kernels at every chunk size."
    chunks = "every chunk size" if len(same) == len(kernels) else f"chunks of {', '.join(map(str, same))}"
    said = (
        f"Two-phase and interleaved launch the same kernels at {chunks}: the byte budget of the measured device is one "
        "chunk a block, so both are one computation, and a difference in time is noise."
    )
    wide = "two-phase, GPU's budget"
    if wide not in kernels:
        return said
    ratio = (ms[wide] / ms["two-phase"]).loc[same]
    most, before = kernels[wide].loc[same].max(), kernels["two-phase"].loc[same].max()
    verdict = "slower" if ratio.min() > 1 else "faster" if ratio.max() < 1 else "no faster throughout"
    return (
        f"{said} Two phases over many chunks at once, as with a GPU's budget, launch {most} kernels at "
        f"most in the place of up to {before}, and are {verdict} here: {ratio.min():.2f} to {ratio.max():.2f} times "
        "the time."
    )


def figures(recorded: Mapping[str, object]) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """`against_transformers`, `structures`, and `structure_reading` with `source`, for `plots.layer_times`."""
    alone = structures(recorded)
    return against_transformers(recorded), alone, " ".join(filter(None, (structure_reading(alone), source(recorded))))


def _cases(recorded: Mapping[str, object], form: re.Pattern) -> list[tuple[dict[str, str], pd.DataFrame]]:
    """(fields of the case's name, its rows) of each case of that form, in the order of the file."""
    groups = pd.DataFrame(recorded["rows"]).groupby("case", sort=False)
    found = [(match.groupdict(), rows) for case, rows in groups if (match := form.fullmatch(case))]
    if not found:
        raise InputError(f"{RECORDED}: expected cases such as {form.pattern!r}, found none; repeat the benchmark")
    return found
