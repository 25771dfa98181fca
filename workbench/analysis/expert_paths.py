"""The ways to compute the routed experts, beside each other: figures of the recorded benchmark, and counts on a layer.

A way is a backend of the op `experts`. What it costs depends on how many tokens there are and on how unevenly they are
spread over the experts.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.launches import count_launches
from workbench.analysis.layer_times import source
from workbench.analysis.wording import counted, ranged
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.experts.torch_sized import TINY_ROWS
from workbench.kernels.registry import OPERATIONS, Call
from workbench.model import CausalLM
from workbench.tracing import trace

#: The benchmark that writes the times, which stands in the project's folder `benchmarks`.
RECORDED = "experts_vs_transformers"

#: The benchmark of what the workbench adds to each call, beside it, and the rows of it that say so.
OVERHEAD, ADDED = "dispatch_overhead", "added by "

#: The machine on which segments of a few rows are told from large ones, beside the CPU.
ACCELERATOR = "nvidia-h200"

#: What the three ways that are told apart elsewhere are called here.
WAYS = (
    "Of the names in use elsewhere, sorted is torch_sorted, or torch_onednn where oneDNN serves the dtype; grouped is "
    "torch_grouped; decode is torch_pairs or torch_gathered."
)

#: Loads in which segments are equal, or have up to the rows that `torch_sized` calls tiny.
EQUAL = "equal"

#: Form of the case names there, and the name of the row that is no way to compute but the limit.
_CASE = re.compile(r"(?P<dtype>\w+), (?P<tokens>\d+) tokens, (?P<load>.+)")
LIMIT = "limit"

#: Load in which experts are chosen evenly at random: the one whose times are drawn over the number of tokens.
EVEN = "even"

#: Tokens are left out until the weights gathered for all their pairs fit into so many bytes: one way copies them.
MOST_BYTES = 1 << 30

#: Loads of `count_paths`: what the layer's own router chose, and the worst skew there is.
OWN, ONE_SET = "its own router", "all tokens on one set"


def path_times(recorded: Mapping[str, object]) -> pd.DataFrame:
    """dtype, tokens, load, path, ms (median), iqr, share (of the memory limit; missing for it) of a benchmark's result.

    The path `LIMIT` is the time in which the weights of the experts that are hit can be read once. Raises InputError
    where the result has no such cases.
    """
    rows = []
    for row in recorded["rows"]:
        case = _CASE.fullmatch(row["case"])
        if case is None or row["unit"] != "ms":
            continue
        path = LIMIT if row["backend"].startswith(LIMIT) else row["backend"]
        rows.append((
            case["dtype"], int(case["tokens"]), case["load"], path, row["median"], row["iqr"], row["share_of_limit"],
        ))  # fmt: skip
    if not rows:
        raise InputError(f"{RECORDED}: expected cases like {_CASE.pattern!r} in ms, found none; repeat the benchmark")
    return pd.DataFrame(rows, columns=["dtype", "tokens", "load", "path", "ms", "iqr", "share"])


def fastest(times: pd.DataFrame) -> pd.DataFrame:
    """The fastest way of the workbench in each case: a row of `path_times` for each dtype, tokens and load."""
    own = times[(times["path"] != LIMIT) & ~times["path"].str.startswith("transformers")]
    return own.loc[own.groupby(["dtype", "tokens", "load"], sort=False)["ms"].idxmin()].reset_index(drop=True)


def time_reading(recorded: Mapping[str, object]) -> str:
    """Where the memory limit rules and which way is fastest, as a caption."""
    times = path_times(recorded)
    even = fastest(times[times["load"] == EVEN])
    parts = []
    for dtype, rows in even.groupby("dtype", sort=False):
        few, many = rows.loc[rows["tokens"].idxmin()], rows.loc[rows["tokens"].idxmax()]
        parts.append(
            f"{dtype}: {few['path']} is fastest for {counted(few['tokens'], 'token')} ({few['ms']:.3g} ms, "
            f"{100 * few['share']:.0f} % of the memory limit), {many['path']} for "
            f"{counted(many['tokens'], 'token')} ({many['ms']:.3g} ms, {100 * many['share']:.0f} %)"
        )
    shape = recorded["hardware"].get("shape", {})
    names = {"hidden": "hidden size", "experts": "experts", "width": "width", "top_k": "experts per token"}
    at = ", ".join(f"{name} {shape[key]}" for key, name in names.items() if key in shape)
    return f"At {at or 'the shape of the benchmark'}. {'; '.join(parts)}."


def skew_reading(recorded: Mapping[str, object]) -> str:
    """What an uneven load does to each way, as a caption; empty where only even loads were measured."""
    times = path_times(recorded)
    skewed = times[(times["load"] != EVEN) & (times["path"] != LIMIT)]
    parts = []
    for dtype, rows in skewed.groupby("dtype", sort=False):
        case = times[(times["dtype"] == dtype) & (times["load"] == EVEN) & (times["tokens"] == rows["tokens"].iloc[0])]
        even = case.set_index("path")["ms"]
        rows = rows[rows["path"].isin(even.index)]
        ratio = rows.assign(ratio=rows["ms"].to_numpy() / even[rows["path"]].to_numpy())
        mean = ratio.groupby("load", sort=False)["ratio"].median()
        parts.append(f"{dtype}: " + ", ".join(f"{load} {value:.2f}" for load, value in mean.items()))
    return f"Time relative to the even load, median over the ways. {'; '.join(parts)}." if parts else ""


def size_reading(accelerated: Mapping[str, object] | None) -> str:
    """Where dispatch by the size of a segment pays on an accelerator, as a sentence; empty without such a result.

    torch_sized against torch_sorted where all segments are equal, where they have TINY_ROWS rows or fewer on average,
    and where they are larger than that, in bfloat16.
    """
    if accelerated is None:
        return ""
    times = path_times(accelerated)
    times = times[times["dtype"] == "bfloat16"]
    ms = times.pivot(index=["load", "tokens"], columns="path", values="ms")
    if not {"torch_sized", "torch_sorted"} <= set(ms.columns):
        return ""
    shape = accelerated["hardware"]["shape"]
    gain = (ms["torch_sorted"] / ms["torch_sized"]).dropna()
    groups: dict[str, dict[int, float]] = {}
    for (load, tokens), ratio in gain.items():
        rows = tokens * shape["top_k"] / shape["experts"]
        if load == EQUAL:
            groups.setdefault("with equal segments", {})[tokens] = ratio
        elif load == EVEN:
            size = f"{TINY_ROWS} rows or fewer" if rows <= TINY_ROWS else f"more than {TINY_ROWS} rows"
            groups.setdefault(f"with segments of {size} on average", {})[tokens] = ratio
    if not groups:
        return ""
    parts = [
        f"{ranged(min(found.values()), max(found.values()), '.2g')} times as fast {name} "
        f"({ranged(min(found), max(found), 'd')} tokens)"
        for name, found in sorted(groups.items(), key=lambda group: -max(group[1].values()))
    ]
    return (
        f"Size classes on {accelerated['hardware']['model']}, bfloat16: against torch_sorted, torch_sized is "
        f"{', '.join(parts)}."
    )


def overhead_reading(recorded: Mapping[str, object]) -> str:
    """What a call through the workbench adds, of each op that was measured, as a sentence."""
    parts = [
        f"{row['median']:.2g} µs to {row['backend'].removeprefix(ADDED)} ({row['case']})"
        for row in recorded["rows"]
        if row["backend"].startswith(ADDED) and row["unit"] == "us"
    ]
    if not parts:
        raise InputError(f"{OVERHEAD}: expected rows that begin with {ADDED!r} in us, found none; repeat the benchmark")
    return f"The workbench adds {', '.join(parts)}, median of many calls. {source(recorded)}"


def figures(
    recorded: Mapping[str, object], accelerated: Mapping[str, object] | None = None
) -> tuple[pd.DataFrame, str]:
    """`path_times` and what they say, as `plots.path_times` takes them; `accelerated` is the result of ACCELERATOR."""
    parts = (time_reading(recorded), skew_reading(recorded), source(recorded), WAYS, size_reading(accelerated))
    return path_times(recorded), " ".join(filter(None, parts))


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """What the routed experts of one layer are given: see `kernels.experts.spec`."""

    layer: int
    x: Tensor
    weights: Tensor
    experts: Tensor
    gate_up: Tensor
    down: Tensor

    def under(self, load: str, tokens: int | None = None) -> tuple[Tensor, ...]:
        """The arguments of the op for the first `tokens` tokens, under one of the loads OWN and ONE_SET."""
        x, weights, experts = (t[:tokens] for t in (self.x, self.weights, self.experts))
        if load == ONE_SET:
            experts = torch.arange(experts.shape[1], device=experts.device).expand(len(x), -1).clone()
        elif load != OWN:
            raise InputError(f"load: expected {OWN!r} or {ONE_SET!r}, found {load!r}")
        return x, weights, experts, self.gate_up, self.down


@torch.inference_mode()
def layer_input(model: CausalLM, ids: Tensor, layer: int) -> LayerInput:
    """The experts of `layer` in a pass over `ids` [1, T]: the rows that reach them and what the router chose.

    Of large experts the first tokens alone, see MOST_BYTES.
    """
    name = taps.full_name(layer, taps.POST_NORM)
    kernels, block = model.kernels, model.layers[layer].mlp
    with trace(model, keep=[name], check="exact") as seen:
        model(ids, use_cache=False, last_only=True)
    rows = seen.tensors[name].flatten(0, -2).to(model.dtype)
    logits = kernels.linear(rows, block.gate.weight)
    weights, experts = kernels.routing(logits, top_k=block.top_k, normalise=block.normalise)
    expert_bytes = sum(w[0].numel() * w.element_size() for w in (block.experts.gate_up_proj, block.experts.down_proj))
    most = max(1, MOST_BYTES // (block.top_k * expert_bytes))
    rows, weights, experts = rows[:most], weights[:most], experts[:most]
    return LayerInput(
        layer, rows, weights.to(rows.dtype), experts, block.experts.gate_up_proj.detach(),
        block.experts.down_proj.detach(),
    )  # fmt: skip


def serving_paths(given: LayerInput, tokens: int) -> dict[str, str | None]:
    """Every backend of `experts` but the arbiter, and why it refuses such a call; None where it serves."""
    x, shape = given.x, tuple(given.gate_up.shape)
    call = Call("experts", x.device.type, x.dtype, tokens, False, False, Kernels().policy, shape)
    backends = OPERATIONS["experts"].backends
    return {name: backend.refusal(call) for name, backend in backends.items() if name != "reference"}


def automatic_path(given: LayerInput, tokens: int) -> str:
    """The backend that is taken where none is named."""
    kernels = Kernels()
    with torch.inference_mode():
        kernels.experts(*given.under(OWN, tokens))
    return next(row.backend for row in kernels.attestation() if row.op == "experts")


def count_paths(given: LayerInput) -> pd.DataFrame:
    """path, syncs, and for the loads OWN and ONE_SET kernels launched and MB touched, of all its tokens at once.

    Counted, see `analysis.launches`: the same at every run.
    """
    rows = []
    for name, refusal in serving_paths(given, len(given.x)).items():
        if refusal is not None:
            continue
        run = Kernels({"experts": name}).experts
        own, one = (count_launches(partial(run, *given.under(load))) for load in (OWN, ONE_SET))
        rows.append((name, own.syncs, own.kernels, one.kernels, own.bytes / 1e6, one.bytes / 1e6))
    return pd.DataFrame(rows, columns=["path", "syncs", "kernels", "kernels_one", "megabytes", "megabytes_one"])


#: Headings of `count_paths`.
COUNT_HEADINGS = {
    "path": "backend", "syncs": "host syncs", "kernels": "kernels launched", "kernels_one": "on one set",
    "megabytes": "MB touched", "megabytes_one": "MB on one set",
}  # fmt: skip


def count_reading(counts: pd.DataFrame, given: LayerInput) -> str:
    moved = counts[counts["kernels"] != counts["kernels_one"]]
    still = counts[counts["kernels"] == counts["kernels_one"]]
    free = counts[counts["syncs"] == 0]["path"].tolist()
    return (
        f"The experts of layer {given.layer} on {counted(len(given.x), 'token')} of the prompt, as its router spreads "
        f"them, and all on one set of {given.experts.shape[1]}. What {_list(moved['path'])} launch depends on the "
        f"load; {_list(still['path'])} launch the same. Without a host sync: {_list(free)}."
    )


def _list(names) -> str:
    return ", ".join(names) or "none"


@torch.inference_mode()
def time_paths(given: LayerInput, load: str, tokens: int, rounds: int = 5) -> pd.DataFrame:
    """path, ms (median of `rounds`, rounds interleaved), fastest first, of every backend that serves such a call.

    These are times of this machine at this moment: no two runs give the same.
    """
    arguments = given.under(load, tokens)
    serving = [name for name, refusal in serving_paths(given, len(arguments[0])).items() if refusal is None]
    kernels = {name: Kernels({"experts": name}) for name in serving}
    seconds: dict[str, list[float]] = {name: [] for name in serving}
    for number in range(rounds + 1):
        for name in serving:
            started = time.perf_counter()
            kernels[name].experts(*arguments)
            if arguments[0].is_cuda:
                torch.cuda.synchronize(arguments[0].device)
            if number:
                seconds[name].append(time.perf_counter() - started)
    rows = [(name, 1e3 * statistics.median(found)) for name, found in seconds.items()]
    return pd.DataFrame(rows, columns=["path", "ms"]).sort_values("ms", kind="stable").reset_index(drop=True)
