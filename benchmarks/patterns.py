"""Patterns of a CUDA library in the workbench, each against the way that one writes first, same inputs, one run.

    python benchmarks/patterns.py [--rounds 21] [--clock processor] [--device cuda]

The sides of a comparison take the same inputs and their results are compared before anything is timed. The first side
is the plain way: in the workbench where it keeps one, else written here. Beside the times: the kernels that a side
launches, how often the host waits for the device, and the bytes that it touches, counted (`analysis.launches`). Figures
that are no comparison follow, such as how many values depend on an order of summation. `--clock processor` counts the
seconds of the process alone, where other programs share the machine. docs/patterns.md cites the figures. Writes
benchmarks/results/patterns.<hardware>.json.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path

import torch
from torch import Tensor

import workbench
from workbench import bench
from workbench.analysis.expert_paths import layer_input
from workbench.analysis.launches import count_launches
from workbench.cache import Cache
from workbench.checkpoint.accounting import cast
from workbench.errors import InputError, WorkbenchError
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.experts import torch_onednn
from workbench.kernels.experts.spec import Chain, declare_scratch, swiglu
from workbench.kernels.experts.torch_sorted import Segment, by_segments, rows_of, segments, weighted_sum
from workbench.kernels.gated_delta_rule import spec as rule_spec
from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.kernels.linear.torch_onednn import product
from workbench.kernels.registry import OPERATIONS, Call
from workbench.kernels.workspace import Workspace
from workbench.model import ModelOutput
from workbench.numerics import PRESETS
from workbench.recovery import Recovery
from workbench.tokenizer import Tokenizer
from workbench.tracing.casts import count_cast
from workbench.tracing.checks import is_finite
from workbench.training.corpus import read_documents

ROOT = Path(__file__).resolve().parent.parent
NAME = "patterns"
#: Multiplications and sums in another order: the largest relative difference (Frobenius) of fp32 results.
ROUNDING = 1e-5
#: Values in a block of the check that stops at the first bad one.
STOP_BLOCK = 1 << 16
#: Numbers of rows that are given to a product for the first time.
NEW_NUMBERS = 48
#: Times that one computation is repeated where its bits are compared.
REPEATS = 20

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of the comparisons: the experts of a middle-sized layer, heads of two models, lengths."""

    tokens: int = 512
    experts: int = 256
    top_k: int = 8
    hidden: int = 512
    width: int = 128
    #: (name, key heads, value heads, key and value dim)
    heads: tuple[tuple[str, int, int, int], ...] = (("35B", 16, 32, 128), ("miniature", 2, 4, 64))
    rule_tokens: int = 1024
    sequences: int = 8
    output: tuple[int, int, int] = (2048, 32, 128)
    cast_values: int = 1 << 22
    calls: int = 200
    prompt_tokens: int = 512


FULL = Sizes()
#: For tests: every path is taken, nothing is worth a time.
SMALL = Sizes(
    tokens=24, experts=8, top_k=4, hidden=16, width=8, heads=(("tiny", 1, 2, 8),), rule_tokens=160, sequences=2,
    output=(64, 2, 8), cast_values=1 << 10, calls=2, prompt_tokens=32,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """`sides` by name, the plain way first; each returns what its result is judged by, within `limit` of the first.

    `calls` of a side make one sample; a `static` side has counts that are the same at every call. `chosen` are the
    `Kernels` of the sides that have some, whose attestation is recorded.
    """

    pattern: str
    case: str
    sides: dict[str, Run]
    limit: float = 0.0
    calls: int = 1
    is_static: bool = True
    chosen: dict[str, Kernels] = field(default_factory=dict)


def normal(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def routed(sizes: Sizes, device: str, load: str = "even", seed: int = 0) -> dict[str, Tensor]:
    """Arguments of the op `experts`: experts `even` at random, by a `zipf` distribution, `one set` for all tokens."""
    given = experts_spec.example(
        tokens=sizes.tokens, hidden=sizes.hidden, experts=sizes.experts, top_k=sizes.top_k, width=sizes.width, seed=seed
    )
    if load == "zipf":
        odds = (1.0 / torch.arange(1, sizes.experts + 1)).expand(sizes.tokens, -1)
        given["experts"] = torch.multinomial(odds, sizes.top_k, generator=torch.Generator().manual_seed(seed))
    elif load == "one set":
        given["experts"] = torch.arange(sizes.top_k).expand(sizes.tokens, -1).clone()
    elif load != "even":
        raise InputError(f"load: expected even, zipf or one set, found {load!r}")
    return {name: tensor.to(device) for name, tensor in given.items()}


def layer_shape(sizes: Sizes) -> str:
    return f"{sizes.tokens} tokens, {sizes.experts} experts of {sizes.hidden} x {sizes.width}, top-{sizes.top_k}"


# Batched device-to-host copy.


def bounds_one_by_one(offsets: Tensor, token: Tensor) -> list[Segment]:
    """`segments` with an int() for every bound that is wanted, as it is first written."""
    found = []
    for expert in range(len(offsets) - 1):
        start, end = int(offsets[expert]), int(offsets[expert + 1])
        if end > start:
            first, last = int(token[start]), int(token[end - 1])
            found.append(Segment(expert, start, end, first if last - first + 1 == end - start else None))
    return found


def batched_copy(sizes: Sizes, device: str) -> Iterator[Comparison]:
    plan = Kernels().alignment(routed(sizes, device)["experts"], sizes.experts, 1)
    token = plan.tokens_of_rows()
    yield Comparison(
        "batched device-to-host copy", f"bounds of the segments, {layer_shape(sizes)}",
        {"int() for each bound": partial(bounds_one_by_one, plan.offsets, token),
         "one tolist": partial(segments, plan, token)},
    )  # fmt: skip


# batch_memcpy size classes.


def one_class(rows: int) -> int:
    return -(-rows // torch_onednn.LARGE_MULTIPLE) * torch_onednn.LARGE_MULTIPLE


def size_classes(sizes: Sizes, device: str) -> Iterator[Comparison]:
    """oneDNN's product, whose kernel is compiled anew for each number of rows."""
    call = Call("experts", device, torch.float32, sizes.tokens, False, False, PRESETS["safe"])
    if torch_onednn.supports(call) is not None:
        return
    weights = {name: routed(sizes, device)[name] for name in ("gate_up", "down")}
    many = [routed(dataclasses.replace(sizes, width=1), device, "zipf", seed) for seed in range(64)]  # but for weights
    rules = {"as they come": int, "one class": one_class, "three classes": torch_onednn.rounded}

    def side(rule: Callable[[int], int], inputs: Iterator[dict[str, Tensor]]) -> Run:
        chain = Chain(Kernels().alignment)
        return lambda: by_segments(**next(inputs) | weights, chain=chain, product=product, rounded=rule)

    for load, inputs in (("one routing", many[:1]), ("another routing each call", many)):
        yield Comparison(
            "batch_memcpy size classes", f"rows of segments, {load}, {layer_shape(sizes)}, zipf",
            {name: side(rule, cycle(inputs)) for name, rule in rules.items()}, limit=ROUNDING, is_static=False,
        )  # fmt: skip


# Raking scan, raking memoize, dispatch_scan, segmented scan: the gated delta rule.


def rule_inputs(heads: tuple[str, int, int, int], tokens: int, device: str, batch: int = 1) -> dict[str, Tensor]:
    _, key_heads, value_heads, dim = heads
    return rule_spec.example(
        batch=batch, tokens=tokens, key_heads=key_heads, value_heads=value_heads, key_dim=dim, value_dim=dim,
        device=device,
    )  # fmt: skip


def raking_scan(sizes: Sizes, device: str) -> Iterator[Comparison]:
    """(I + kkt)^-1 right for the chunks of 512 tokens, kkt of unit keys as in the rule."""
    _, _, value_heads, dim = sizes.heads[0]
    chunks, chunk = max(1, sizes.tokens // 64), PRESETS["safe"].chunk
    keys = torch.nn.functional.normalize(normal(chunks, value_heads, chunk, dim, device=device), dim=-1)
    kkt = (0.9 * keys @ keys.transpose(-1, -2)).tril(-1)
    right = normal(chunks, value_heads, chunk, 2 * dim, device=device, seed=1)
    names = ("row_loop", "block_substitution", "solve_triangular")
    sides = {
        name: partial(torch_chunk.unit_lower_solve, kkt, right, name)
        for name in names if torch_chunk.solver_refusal(name, device) is None
    }  # fmt: skip
    case = f"triangular solve, {chunks} chunks of {chunk}, {value_heads} heads of {dim}"
    yield Comparison("raking scan", case, sides, limit=ROUNDING)


def exponentials(log_decay: Tensor, cumsum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of the rule: between the rows of a chunk, since its start, until its end."""
    exponents = torch_chunk.Exponents.of(log_decay, cumsum, "float64")
    between = torch_chunk.pairwise_decay(exponents, "difference_then_mask", torch.float32)
    since_start = exponents.exp(exponents.cumsum, torch.float32)
    return between, since_start, exponents.exp(exponents.differences[..., -1, :], torch.float32)


def exponentials_by_chunk(log_decay: Tensor, cumsum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in the loop over the chunks, as it is first written."""
    found = [exponentials(log_decay[n : n + 1], cumsum[n : n + 1]) for n in range(len(cumsum))]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def raking_memoize(sizes: Sizes, device: str) -> Iterator[Comparison]:
    chunk = PRESETS["safe"].chunk
    for name, _, value_heads, _ in sizes.heads:
        chunks = -(-sizes.rule_tokens // chunk)
        log_decay = -normal(chunks, value_heads, chunk, device=device).abs().double()
        cumsum = log_decay.cumsum(-1)
        yield Comparison(
            "raking memoize", f"exponentials of {chunks} chunks of {chunk}, {name} heads",
            {"in the loop over chunks": partial(exponentials_by_chunk, log_decay, cumsum),
             "once, outside": partial(exponentials, log_decay, cumsum)}, limit=1e-12,
        )  # fmt: skip


def dispatch_scan(sizes: Sizes, device: str) -> Iterator[Comparison]:
    budget = torch_chunk.BYTES_AT_ONCE["cuda" if device == "cuda" else "cpu"]
    limits = {"interleaved": 0, "two-phase": budget, "two-phase, all chunks at once": torch_chunk.BYTES_AT_ONCE["cuda"]}
    if device == "cuda":
        del limits["two-phase, all chunks at once"]
    for heads in sizes.heads:
        given = rule_inputs(heads, sizes.rule_tokens, device) | {
            "policy": PRESETS["safe"], "tap": None, "initial_state": None, "cu_seqlens": None
        }  # fmt: skip
        yield Comparison(
            "dispatch_scan", f"gated delta rule, {sizes.rule_tokens} tokens, {heads[0]} heads",
            {name: partial(torch_chunk.run_in_parts, **given, limit=limit) for name, limit in limits.items()},
            limit=ROUNDING,
        )  # fmt: skip


def segmented_scan(sizes: Sizes, device: str) -> Iterator[Comparison]:
    """Sequences of equal length: found by their bounds, or by division."""
    for heads in sizes.heads:
        batch, tokens = sizes.sequences, sizes.rule_tokens // sizes.sequences
        given = rule_inputs(heads, tokens, device, batch)
        packed = {name: tensor.flatten(0, 1)[None] for name, tensor in given.items()}
        bounds = torch.arange(batch + 1) * tokens

        def by_bounds(packed: dict[str, Tensor] = packed, bounds: Tensor = bounds) -> tuple[Tensor, Tensor]:
            out, state = torch_chunk.run(**packed, cu_seqlens=bounds, policy=PRESETS["safe"])
            return out[0], state

        def by_division(given: dict[str, Tensor] = given) -> tuple[Tensor, Tensor]:
            out, state = torch_chunk.run(**given, policy=PRESETS["safe"])
            return out.flatten(0, 1), state

        yield Comparison(
            "segmented scan", f"gated delta rule, {batch} sequences of {tokens} tokens, {heads[0]} heads",
            {"by their bounds": by_bounds, "by division": by_division}, limit=ROUNDING,
        )  # fmt: skip


# Reduce-by-key, segmented sort, scatter-direct, copy_mdspan, radix-sort chain: the experts.


def named_backends(names: tuple[str, ...], given: dict[str, Tensor], device: str) -> dict[str, Kernels]:
    """`Kernels` for each backend of `experts` that serves such a call."""
    call = Call("experts", device, torch.float32, len(given["x"]), False, False, PRESETS["safe"],
                tuple(given["gate_up"].shape))  # fmt: skip
    backends = OPERATIONS["experts"].backends
    return {name: Kernels({"experts": name}) for name in names if backends[name].refusal(call) is None}


def reduce_by_key(sizes: Sizes, device: str) -> Iterator[Comparison]:
    """The dtype is fp32, of which torch has no grouped product on CUDA: there, see experts_vs_transformers.py."""
    given = routed(sizes, device)
    chosen = named_backends(("torch_sorted", "torch_grouped", "torch_batched"), given, device)
    sides = {name: partial(kernels.experts, **given) for name, kernels in chosen.items()}
    yield Comparison("reduce-by-key", layer_shape(sizes), sides, limit=ROUNDING, chosen=chosen)


def activation_by_segment(rows: Tensor, bounds: list[int]) -> Tensor:
    return torch.cat([swiglu(rows[start:end]) for start, end in pairwise(bounds)])


def segmented_sort(sizes: Sizes, device: str) -> Iterator[Comparison]:
    given = routed(sizes, device)
    chosen = named_backends(("torch_loop", "torch_sorted", "torch_sized"), given, device)
    sides = {name: partial(kernels.experts, **given) for name, kernels in chosen.items()}
    yield Comparison("segmented sort", layer_shape(sizes), sides, limit=ROUNDING, chosen=chosen)
    bounds = Kernels().alignment(given["experts"], sizes.experts, 1).offsets.tolist()
    rows = normal(bounds[-1], 2 * sizes.width, device=device)
    yield Comparison(
        "segmented sort", f"activation, {layer_shape(sizes)}",
        {"for each segment": partial(activation_by_segment, rows, bounds),
         "once over all pairs": partial(swiglu, rows)}, limit=1e-6,
    )  # fmt: skip


def added_by_expert(rows: Tensor, token: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return torch.zeros_like(out).index_add_(0, token, rows * weight[:, None])


def scatter_direct(sizes: Sizes, device: str) -> Iterator[Comparison]:
    given = routed(sizes, device)
    plan = Kernels().alignment(given["experts"], sizes.experts, 1)
    rows = normal(len(plan.rows), sizes.hidden, device=device)
    token, weight = plan.tokens_of_rows(), given["weights"].flatten()[plan.rows]
    yield Comparison(
        "scatter-direct", f"sum over the experts of a token, {layer_shape(sizes)}",
        {"index_add": partial(added_by_expert, rows, token, weight, given["x"]),
         "gathered in rank order": partial(weighted_sum, rows, plan.position, given["weights"])},
        limit=1e-6,
    )  # fmt: skip


def copy_mdspan(sizes: Sizes, device: str) -> Iterator[Comparison]:
    given = routed(sizes, device, "one set")
    plan = Kernels().alignment(given["experts"], sizes.experts, 1)
    token = plan.tokens_of_rows()
    parts = segments(plan, token)

    def gathered() -> list[Tensor]:
        return [given["x"].index_select(0, token[part.start : part.end]) for part in parts]

    yield Comparison(
        "copy_mdspan", f"inputs of the segments, all on one set, {layer_shape(sizes)}",
        {"gathered": gathered, "views": lambda: [rows_of(given["x"], token, part) for part in parts]},
    )  # fmt: skip


def sort_chain(sizes: Sizes, device: str) -> Iterator[Comparison]:
    """Router, alignment, experts; the first link missing: it alone is replaced, or the whole chain by the plain way."""
    given = routed(sizes, device)
    logits = normal(sizes.tokens, sizes.experts, device=device)
    chosen = {
        "whole chain replaced": Kernels({"routing": "torch_sort", "experts": "torch_loop"}),
        "one link replaced": Kernels({"routing": "torch_sort"}), "nothing missing": Kernels(),
    }  # fmt: skip

    def layer(kernels: Kernels) -> Tensor:
        weights, experts = kernels.routing(logits, top_k=sizes.top_k, normalise=True)
        return kernels.experts(given["x"], weights, experts, given["gate_up"], given["down"])

    sides = {name: partial(layer, kernels) for name, kernels in chosen.items()}
    yield Comparison("radix-sort chain", layer_shape(sizes), sides, limit=ROUNDING, chosen=chosen)


# overflow_cast, checked_allocator, short-circuit all_of, sync_handler.


def overflow_cast(sizes: Sizes, device: str) -> Iterator[Comparison]:
    values = normal(sizes.cast_values, device=device)
    values[:: sizes.cast_values // 8] = 1e6  # does not fit
    values[1 :: sizes.cast_values // 8] = 1e-9  # vanishes

    def counted() -> Tensor:
        result = values.to(torch.float16)
        count_cast(values, result)
        return result

    yield Comparison(
        "overflow_cast", f"{sizes.cast_values} values, float32 to float16",
        {"plain cast": partial(values.to, torch.float16),
         "checked at loading": lambda: cast("values", values, torch.float16)[0], "checked in a trace": counted},
    )  # fmt: skip


class Miniature:
    """The miniature after a prompt, and an allocator that fails once when layer `failing` is about to run."""

    def __init__(self, sizes: Sizes, device: str):
        self.model = workbench.load(ROOT / "data" / "miniature", dtype="float32", device=device)
        self.ids = prompt(sizes.prompt_tokens).to(device)
        self.failing: int | None = None
        for number, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(partial(self._fail, number))

    def _fail(self, number: int, *_: object) -> None:
        if self.failing == number:
            self.failing = None
            raise torch.OutOfMemoryError("injected")

    def after_prompt(self) -> Cache:
        return self.model(self.ids, last_only=True).cache

    def decode(self, step: Callable[..., ModelOutput], cache: Cache, failing: int | None = None) -> Tensor:
        """Logits of the prompt's first token once more."""
        self.failing = failing
        return step(self.ids[:, :1], cache=cache).logits


def prompt(tokens: int) -> Tensor:
    """[1, tokens] of the held-out text, as the miniature's tokenizer cuts it."""
    tokenizer = Tokenizer.from_directory(ROOT / "data" / "miniature")
    text = " ".join(document.text for document in read_documents(ROOT / "data" / "heldout.jsonl"))
    return torch.tensor([tokenizer.encode(text[: 16 * tokens])[:tokens]])


def checked_allocator(sizes: Sizes, device: str) -> Iterator[Comparison]:
    """Decode steps, each side on a cache of its own, which grow alike."""
    miniature = Miniature(sizes, device)
    model, last = miniature.model, len(miniature.model.layers) - 1
    step = Recovery(model, tell=lambda incident: None).step
    steps = {
        "plain step": (model, None), "step with recovery": (step, None), "out of memory in the last layer": (step, last)
    }  # fmt: skip
    sides = {
        name: partial(miniature.decode, run, miniature.after_prompt(), failing)
        for name, (run, failing) in steps.items()
    }
    case = f"decode step of the miniature after {sizes.prompt_tokens} tokens"
    yield Comparison("checked_allocator", case, sides, is_static=False)


def stops_early(x: Tensor) -> bool:
    """Whether all values are finite, block after block, no further than the first that are not."""
    return all(is_finite(block) for block in x.view(-1).split(STOP_BLOCK))


def short_circuit(sizes: Sizes, device: str) -> Iterator[Comparison]:
    for place in (None, 0.01, 0.5, 1.0):
        x = normal(*sizes.output, device=device)
        if place is not None:
            x.view(-1)[int(place * (x.numel() - 1))] = math.nan
        yield Comparison(
            "short-circuit all_of", f"{' x '.join(map(str, sizes.output))} values, "
            f"{'all finite' if place is None else f'NaN at {place:g} of the way'}",
            {"isnan(x).any()": lambda x=x: not torch.isnan(x).any(), "smallest and largest": partial(is_finite, x),
             "stops at the first bad block": partial(stops_early, x)},
        )  # fmt: skip


def sync_handler(sizes: Sizes, device: str) -> Iterator[Comparison]:
    small, weight = normal(1, 1, 64, device=device), normal(64, 64, device=device, seed=1)
    kept = Kernels({"linear": "torch_linear"})
    yield Comparison(
        "sync_handler", "choice of a backend, linear 1 x 64 by 64 x 64",
        {"at each call": lambda: Kernels({"linear": "torch_linear"}).linear(small, weight),
         "once": lambda: kept.linear(small, weight)}, calls=sizes.calls,
    )  # fmt: skip
    for here in (sizes, dataclasses.replace(sizes, tokens=4 * sizes.tokens)):
        given = routed(here, device)
        with Workspace(device) as workspace:
            shape = {"tokens": here.tokens, "top_k": here.top_k, "hidden": here.hidden, "width": here.width}
            declare_scratch(workspace, **shape, dtype=torch.float32)
            workspace.allocate()
            scratch = Kernels({"experts": "torch_sorted"}, workspace=workspace)
            yield Comparison(
                "sync_handler", f"scratch memory of torch_sorted, {layer_shape(here)}",
                {"fresh memory": partial(Kernels({"experts": "torch_sorted"}).experts, **given),
                 "declared once": partial(scratch.experts, **given)},
            )  # fmt: skip


#: Comparisons by pattern. The first is of memory that is fresh or kept, and measured with memory as it comes; then the
#: process keeps what it frees, so that no side of the others pays for pages at random.
COMPARISONS: dict[str, Callable[[Sizes, str], Iterator[Comparison]]] = {
    "sync_handler": sync_handler,
    "batched device-to-host copy": batched_copy,
    "batch_memcpy size classes": size_classes,
    "raking scan": raking_scan,
    "raking memoize": raking_memoize,
    "dispatch_scan": dispatch_scan,
    "reduce-by-key": reduce_by_key,
    "scatter-direct": scatter_direct,
    "segmented sort": segmented_sort,
    "segmented scan": segmented_scan,
    "radix-sort chain": sort_chain,
    "copy_mdspan": copy_mdspan,
    "overflow_cast": overflow_cast,
    "checked_allocator": checked_allocator,
    "short-circuit all_of": short_circuit,
}


# Figures that are no comparison of sides.


def compile_rows(sizes: Sizes, device: str) -> list[bench.Row]:
    """batch_memcpy size classes: oneDNN's product with numbers of rows that are new to it, and once more."""
    if torch_onednn.supports(Call("experts", device, torch.float32, 1, False, False, PRESETS["safe"])) is not None:
        return []
    hidden = sizes.hidden + 24  # no other product here has this shape
    x, weight = normal(4 * NEW_NUMBERS, hidden, device=device), normal(2 * sizes.width, hidden, device=device, seed=1)
    product(x, weight)  # so that the first number does not pay for what all share
    us: dict[str, list[float]] = {"first time": [], "second time": []}
    for number in range(1, NEW_NUMBERS + 1):
        for seconds in us.values():
            started = time.process_time()
            product(x[:number], weight)
            seconds.append(1e6 * (time.process_time() - started))
    case = f"batch_memcpy size classes: product with a number of rows up to {NEW_NUMBERS}"
    return [bench.Row.of(case, name, "us", seconds) for name, seconds in us.items()]


def order_rows(sizes: Sizes, device: str) -> list[bench.Row]:
    """Deterministic reduce: how much of an output depends on repetition, and on how the experts are numbered."""
    given = routed(sizes, device)
    renumbered = torch.randperm(sizes.experts, generator=torch.Generator().manual_seed(7)).to(device)
    moved = given | {
        "experts": renumbered[given["experts"]],
        **{name: given[name][renumbered.argsort()] for name in ("gate_up", "down")},
    }
    rows, case = [], f"deterministic reduce: {layer_shape(sizes)}"
    for name, what in (("torch_loop", "index_add"), ("torch_sorted", "gathered in rank order")):
        kernels = Kernels({"experts": name})
        changed = (kernels.experts(**moved) != kernels.experts(**given)).double().mean().item()
        unit = "share of values changed by renumbering experts"
        rows.append(bench.Row(case, f"{name} ({what})", unit, changed, 0.0, 1))
    (sums,) = scatter_direct(sizes, device)
    for side, run in sums.sides.items():
        distinct: list[Tensor] = []
        for _ in range(REPEATS):
            result = run()
            if not any(torch.equal(result, seen) for seen in distinct):
                distinct.append(result)
        unit = f"different results of {REPEATS} runs"
        rows.append(bench.Row(f"deterministic reduce: {sums.case}", side, unit, len(distinct), 0.0, REPEATS))
    return rows


def view_rows(sizes: Sizes, device: str) -> list[bench.Row]:
    """copy_mdspan: how many segments of a real prompt are consecutive tokens, over all layers of the miniature."""
    miniature = Miniature(sizes, device)
    model, ids, rows = miniature.model, miniature.ids, []
    for tokens in (1, sizes.prompt_tokens):
        views = found = 0
        for layer in range(len(model.layers)):
            given = layer_input(model, ids[:, :tokens], layer)
            plan = Kernels().alignment(given.experts, len(given.gate_up), 1)
            parts = segments(plan, plan.tokens_of_rows())
            views, found = views + sum(part.first is not None for part in parts), found + len(parts)
        case = f"copy_mdspan: segments of a prompt of {tokens} token{'' if tokens == 1 else 's'}, miniature"
        rows.append(bench.Row(case, "views", "share of segments", views / found, 0.0, found))
    return rows


def recovery_rows(sizes: Sizes, device: str) -> list[bench.Row]:
    """checked_allocator: how many of the layers may run out of memory without a trace in the logits."""
    miniature = Miniature(sizes, device)
    model = miniature.model
    expected = miniature.decode(model, miniature.after_prompt())
    rows, count = [], len(model.layers)
    for name, step in (("plain step", model), ("step with recovery", Recovery(model, tell=lambda incident: None).step)):
        same = 0
        for layer in range(count):
            cache = miniature.after_prompt()
            try:
                same += torch.equal(miniature.decode(step, cache, layer), expected)
            except torch.OutOfMemoryError:
                continue  # the request has failed
        case = "checked_allocator: decode step of the miniature, one layer out of memory"
        rows.append(bench.Row(case, name, "share of layers with the same logits", same / count, 0.0, count))
    return rows


# Measuring.


def difference(found: object, expected: object) -> float:
    """Relative error of the worst tensor; for what holds no tensors 0 if equal, else inf."""
    if isinstance(expected, Tensor):
        return 0.0 if torch.equal(found, expected) else relative_error(found, expected)
    if isinstance(expected, tuple | list) and len(expected) == len(found):
        return max((difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    return 0.0 if found == expected else math.inf


def gate(comparison: Comparison) -> float:
    """The largest difference of a side from the plain way, over the limit; 0 or inf where the limit is 0."""
    results = [run() for run in comparison.sides.values()]
    worst = max((difference(found, results[0]) for found in results[1:]), default=0.0)
    if comparison.limit:
        return worst / comparison.limit
    return 0.0 if worst == 0.0 else math.inf


def repeated(run: Run, calls: int, device: str) -> Run:
    """`calls` times `run`, until the device has done them."""

    def sample() -> None:
        for _ in range(calls):
            run()
        if device == "cuda":
            torch.cuda.synchronize()

    return sample


def measure(comparison: Comparison, rounds: int, device: str, clock: Callable[[], float]) -> list[bench.Row]:
    """Times, how many times as fast as the plain way (per round), and counts."""
    runs = {name: repeated(run, comparison.calls, device) for name, run in comparison.sides.items()}
    samples = bench.interleave(runs, rounds=rounds, clock=clock)
    case = f"{comparison.pattern}: {comparison.case}"
    plain = next(iter(samples))
    rows = []
    for name, seconds in samples.items():
        kernels = comparison.chosen.get(name)
        ran = [row.in_words() for row in kernels.attestation()] if kernels is not None else []
        rows.append(bench.Row.of(case, name, "us", [1e6 * s / comparison.calls for s in seconds], attested=ran))
    for name, seconds in samples.items():
        if name != plain:
            ratios = [b / a for a, b in zip(seconds, samples[plain], strict=True)]
            rows.append(bench.Row.of(case, name, f"times as fast as {plain}", ratios))
    for name, run in comparison.sides.items() if comparison.is_static else ():
        counted = count_launches(run)
        for unit, value in (("kernels launched", counted.kernels), ("host syncs", counted.syncs),
                            ("bytes", counted.bytes)):  # fmt: skip
            rows.append(bench.Row(case, name, unit, value, 0.0, 1))
    return rows


def main(arguments: list[str] | None = None, sizes: Sizes = FULL) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="of the times, on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), metavar="PATTERN",
                        help="print the comparisons of these patterns and write no result")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    bench.pin_threads(1)
    if options.device != "cpu" and options.clock != "wall":
        raise InputError("--clock processor: expected the CPU, which a GPU's time is not on")
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    rows, worst, keeps_memory = [], 0.0, False
    for pattern in options.only or COMPARISONS:
        if COMPARISONS[pattern] is not sync_handler:
            keeps_memory = bench.keep_freed_memory()
        for comparison in COMPARISONS[pattern](sizes, options.device):
            share = gate(comparison)
            bench.Correctness(f"{pattern}: {comparison.case}: difference over its limit", share, 1.0).check()
            worst = max(worst, share)
            found = measure(comparison, options.rounds, options.device, clock)
            for row in found:
                if row.unit == "us" or row.unit.startswith("times"):
                    found_here = f"{row.median:12.3f} {row.unit}, IQR {row.iqr:.3f}"
                    print(f"{row.case:90} {row.backend:30} {found_here}", flush=True)
            rows += found
    if options.only:
        return 0
    for others in (compile_rows, order_rows, view_rows, recovery_rows):
        for row in others(sizes, options.device):
            print(f"{row.case:90} {row.backend:30} {row.median:12.3f} {row.unit}", flush=True)
            rows.append(row)
    metric = f"difference from the plain way over its limit (0 or up to {ROUNDING:.0e}, by comparison)"
    correctness = bench.Correctness(metric, worst, 1.0)
    conditions = {"clock": options.clock, "keeps_freed_memory_after_sync_handler": keeps_memory}
    path = bench.write_result(
        options.out, NAME, correctness, rows, project=ROOT, device=options.device, conditions=conditions
    )
    print(path)
    return 0


if __name__ == "__main__":
    with torch.no_grad():  # tensors of inference mode hide from the counts what composite operators consist of
        try:
            sys.exit(main())
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
