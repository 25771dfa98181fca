"""Times of kernels against what the machine can do: results of the kernel benchmarks as tables and sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd

from workbench.analysis.wording import counted, ranged
from workbench.errors import InputError

#: The benchmark that writes them, which stands in the project's folder `benchmarks`, and the machine it is recorded on.
RECORDED, ACCELERATOR = "gpu_kernels", "nvidia-h200"

#: The ops of a gated delta rule layer, and of a layer of experts, that are shown together.
DELTA_RULE = ("gated_delta_rule", "gdn_decode", "gdn_decode_in_place", "causal_conv", "gated_rms_norm")
EXPERTS = ("moe_layer", "routing", "alignment")

#: Backends that are no code of ours, nor torch's.
PEERS = ("causal_conv1d", "fla", "flash_qla", "flashinfer", "transformers", "vllm")

#: Form of the case names, of the row that is the limit, and of a side whose kernels raise flags.
_CASE = re.compile(r"(?P<op>\w+), (?P<shape>[\w-]+), (?P<sequences>\d+)x(?P<tokens>\d+), (?P<dtype>\w+)")
_LIMIT = "limit, "
FLAGGED = ", flags"

COLUMNS = (
    "op", "shape", "case", "dtype", "backend", "ms", "iqr", "share", "rejected", "limit_ms", "bound", "bytes", "flops",
)  # fmt: skip


def kernel_times(recorded: Mapping[str, object], ops: Sequence[str] = ()) -> pd.DataFrame:
    """A row of COLUMNS for each side of each case of `ops` (none: all), in the order of the result.

    `case` is sequences x tokens; `limit_ms` the least time of the case on that machine and `bound` what it is of;
    `bytes` and `flops` those of the case. Raises InputError where the result has no such case.
    """
    costs = recorded["hardware"].get("costs", {})
    limits, rows = {}, []
    for row in recorded["rows"]:
        if row["unit"] == "ms" and row["backend"].startswith(_LIMIT):
            limits[row["case"]] = (row["median"], row["backend"].removeprefix(_LIMIT))
    for row in recorded["rows"]:
        case = _CASE.fullmatch(row["case"])
        if case is None or row["unit"] != "ms" or row["backend"].startswith(_LIMIT):
            continue
        if ops and case["op"] not in ops:
            continue
        least, bound = limits.get(row["case"], (float("nan"), "unknown"))
        cost = costs.get(row["case"], {})
        rows.append((
            case["op"], case["shape"], f"{case['sequences']}x{case['tokens']}", case["dtype"], row["backend"],
            row["median"], row["iqr"], row["share_of_limit"], row.get("rejected", ""), least, bound,
            cost.get("bytes", float("nan")), cost.get("flops", float("nan")),
        ))  # fmt: skip
    if not rows:
        raise InputError(
            f"{RECORDED}: expected times of {', '.join(ops) or 'ops'} in cases like {_CASE.pattern!r}, found none; "
            "repeat the benchmark"
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def kernel_errors(recorded: Mapping[str, object], ops: Sequence[str] = ()) -> pd.DataFrame:
    """op, shape, case, backend, what (of which output, on drawn inputs or the worst hard one), error, on (its name)."""
    rows = []
    for row in recorded["rows"]:
        case = _CASE.fullmatch(row["case"])
        if case is None or not row["unit"].startswith("relative error of ") or (ops and case["op"] not in ops):
            continue
        rows.append((
            case["op"], case["shape"], f"{case['sequences']}x{case['tokens']}", row["backend"],
            row["unit"].removeprefix("relative error of "), row["median"], ", ".join(row["attested"]),
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=["op", "shape", "case", "backend", "what", "error", "on"])


def flag_costs(times: pd.DataFrame) -> pd.DataFrame:
    """op, shape, case, backend, cost: the share of its time that raising flags adds to a side."""
    key = ["op", "shape", "case", "dtype"]
    flagged = times[times["backend"].str.endswith(FLAGGED)].copy()
    flagged["backend"] = flagged["backend"].str.removesuffix(FLAGGED)
    both = flagged.merge(times, on=[*key, "backend"], suffixes=("", "_plain"))
    return both.assign(cost=both["ms"] / both["ms_plain"] - 1.0)[["op", "shape", "case", "backend", "cost"]]


def is_peer(backend: str) -> bool:
    """Whether a side is a library's: none of its backends is ours or torch's."""
    return backend.partition("+")[0] in PEERS


def reading(recorded: Mapping[str, object], ops: Sequence[str] = ()) -> str:
    """Our fastest side in the largest case of each op, its share of the limit, and how the best library does."""
    times = kernel_times(recorded, ops)
    times = times[(times["rejected"] == "") & ~times["backend"].str.endswith(FLAGGED)]
    parts = []
    for (op, shape), rows in times.groupby(["op", "shape"], sort=False):
        rows = rows[rows["limit_ms"] == rows["limit_ms"].max()]
        ours, theirs = (rows[rows["backend"].map(is_peer) == peer] for peer in (False, True))
        if ours.empty:
            continue
        best = ours.loc[ours["ms"].idxmin()]
        said = (
            f"{op} of {best['case']} tokens ({shape}): {best['backend']} {best['ms']:.3g} ms, "
            f"{100 * best['limit_ms'] / best['ms']:.0f} % of the limit"
        )
        if len(theirs):
            peer = theirs.loc[theirs["ms"].idxmin()]
            said += f", {peer['ms'] / best['ms']:.2g} times as fast as {peer['backend']} ({peer['ms']:.3g} ms)"
        parts.append(said)
    noisy = sum(1 for row in recorded["rows"] if row.get("rejected"))
    left = f" {counted(noisy, 'side')} spread too far and {'is' if noisy == 1 else 'are'} marked." if noisy else ""
    return f"{'; '.join(parts)}.{left} {source(recorded)}"


def source(recorded: Mapping[str, object]) -> str:
    """Where a result is from, as sentences: it was measured beforehand, on which machine, by what."""
    hardware, versions = recorded["hardware"], recorded["versions"]
    names = ("torch", "triton", "fla-core", "flash-qla", "flashinfer-python", "vllm")
    used = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    limits = "; ".join(
        f"copy {1e-12 * found['bandwidth']:.3g} TB/s, "
        + ", ".join(f"{name} products {1e-12 * rate:.3g} TF" for name, rate in found["rates"].items())
        for found in hardware.get("limits", {}).values()
    )
    dirty = ", with changes" if recorded["dirty"] else ""
    when = "here, now" if hardware.get("is_live") else f"beforehand by `{recorded['command']}`"
    at = "" if hardware.get("is_live") else f" at commit {str(recorded['commit'])[:10]}{dirty}"
    return f"Measured on {hardware['model']} ({limits or 'no limits'}), {used}, {when}{at}."


def figures(recorded: Mapping[str, object], ops: Sequence[str] = ()) -> tuple[pd.DataFrame, str]:
    """`kernel_times` without the sides with flags, op by op, and `reading`, as `plots.kernel_times` takes them."""
    times = kernel_times(recorded, ops)
    times = times[~times["backend"].str.endswith(FLAGGED)]
    order = {name: place for place, name in enumerate(dict.fromkeys(times["op"]))}
    times = times.assign(place=times["op"].map(order)).sort_values(["place", "shape", "limit_ms"], kind="stable")
    return times[list(COLUMNS)].reset_index(drop=True), reading(recorded, ops)


def roofline(recorded: Mapping[str, object], ops: Sequence[str] = ()) -> tuple[pd.DataFrame, float, dict[str, float]]:
    """(the cases that have flops, bandwidth, rates by dtype) for `plots.roofline`: `kernel_times` with `intensity`,
    flops for each byte, and `rate`, flops in a second. Raises InputError where the result tells no limits."""
    times, _ = figures(recorded, ops)
    times = times[times["flops"] > 0]
    limits = list(recorded["hardware"].get("limits", {}).values())
    if times.empty or not limits:
        raise InputError(f"{RECORDED}: expected the costs of cases and the limits of the machine, found none of them")
    times = times.assign(intensity=times["flops"] / times["bytes"], rate=times["flops"] / (1e-3 * times["ms"]))
    rates = {name: rate for found in limits for name, rate in found["rates"].items()}
    return times.reset_index(drop=True), limits[0]["bandwidth"], rates


def roofline_reading(times: pd.DataFrame) -> str:
    """What bounds the cases, and who comes closest to it."""
    best = times.loc[(times["limit_ms"] / times["ms"]).idxmax()]
    cases = times.drop_duplicates(["op", "shape", "case"])
    counts = cases["bound"].value_counts()
    bounds = " and ".join(f"{counted(int(count), 'case')} by {bound}" for bound, count in counts.items())
    return (
        f"The machine bounds {bounds}. Closest to its limit is {best['backend']} in {best['op']} of {best['case']} "
        f"tokens, at {100 * best['limit_ms'] / best['ms']:.0f} % of it."
    )


#: The benchmark of the gated delta rule's structures, chunks and solvers in PyTorch, and its result without graphs.
VARIANTS = "gdn_variants"
VARIANT_RESULTS = (VARIANTS, f"{VARIANTS}_eager")

_VARIANT = re.compile(r"(?P<structure>[\w-]+), chunk (?P<chunk>\d+), (?P<solver>\w+)")

#: Headings of `variant_table`.
VARIANT_HEADINGS = {
    "case": "sequences x tokens", "structure": "structure", "chunk": "chunk", "solver": "solver",
    "kernels": "kernels launched", "syncs": "host syncs", "ms": "ms in a graph", "ms_eager": "ms launched singly",
}  # fmt: skip


def variant_table(recorded: Mapping[str, object], eager: Mapping[str, object] | None) -> pd.DataFrame:
    """case, structure, chunk, solver, kernels, syncs, ms in a CUDA graph and ms_eager between events (NaN: none)."""
    singly = {} if eager is None else {
        (row["case"], row["backend"]): row["median"] for row in eager["rows"] if row["unit"] == "ms"
    }  # fmt: skip
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in recorded["rows"]:
        found.setdefault((row["case"], row["backend"]), {})[row["unit"]] = row["median"]
    rows = []
    for (case, side), by_unit in found.items():
        of_case, of_side = _CASE.fullmatch(case), _VARIANT.fullmatch(side)
        if of_case is None or of_side is None or "ms" not in by_unit:
            continue
        rows.append((
            f"{of_case['sequences']}x{of_case['tokens']}", of_side["structure"], int(of_side["chunk"]),
            of_side["solver"], int(by_unit["kernels launched"]), int(by_unit["host syncs"]), by_unit["ms"],
            singly.get((case, side), float("nan")),
        ))  # fmt: skip
    if not rows:
        raise InputError(
            f"{VARIANTS}: expected sides like {_VARIANT.pattern!r} in ms, found none; repeat the benchmark"
        )
    return pd.DataFrame(rows, columns=list(VARIANT_HEADINGS))


def variant_reading(table: pd.DataFrame, recorded: Mapping[str, object]) -> str:
    """What two phases save of the launches, and of the time, at the longest input, and which variant is fastest."""
    rows = table[table["case"] == table["case"].iloc[-1]]
    wide = rows.pivot(index=["chunk", "solver"], columns="structure", values=["kernels", "ms"]).dropna()
    parts = []
    if {"two-phase", "interleaved"} <= set(rows["structure"]) and len(wide):
        launches = wide["kernels"]["interleaved"] / wide["kernels"]["two-phase"]
        times = wide["ms"]["interleaved"] / wide["ms"]["two-phase"]
        parts.append(
            f"At {rows['case'].iloc[0]} tokens, chunk after chunk launches "
            f"{ranged(launches.min(), launches.max(), '.2g')} times the kernels of two phases, and takes "
            f"{ranged(times.min(), times.max(), '.2g')} times as long in a graph"
        )
    best = rows.loc[rows["ms"].idxmin()]
    parts.append(
        f"the fastest is {best['structure']} in chunks of {best['chunk']} by {best['solver']}, {best['ms']:.3g} ms, "
        f"{counted(best['kernels'], 'kernel')}, {counted(best['syncs'], 'host sync')}"
    )
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}. {source(recorded)}"
