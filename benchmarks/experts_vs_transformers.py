"""The routed experts at the shape of Qwen3.6-35B-A3B: every backend and transformers, same weights, one run.

    python benchmarks/experts_vs_transformers.py [--rounds 5] [--device cuda]

Hidden size 2048, 256 experts of width 512, 8 per token; fp32 and bf16, one CPU thread or a GPU, 1 to 2048 tokens,
experts chosen evenly at random. Beside the time: the kernels and host syncs of a call, the bytes that it touches, and
the share of the time in which the weights of the experts that are hit could be read once at the rate measured for plain
reading here. At 512 tokens also skewed loads: a Zipf distribution, all tokens on the same eight experts, and every
expert with equally many. Outputs are compared before anything is timed. Writes
benchmarks/results/experts_vs_transformers.<hardware>.json.
"""

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from workbench import bench
from workbench.analysis.launches import count_launches
from workbench.errors import WorkbenchError
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error
from workbench.kernels.registry import OPERATIONS, Call
from workbench.numerics import PRESETS

ROOT = Path(__file__).resolve().parent.parent
NAME = "experts_vs_transformers"
HIDDEN, EXPERTS, WIDTH, TOP_K = 2048, 256, 512, 8
LENGTHS = (1, 4, 16, 64, 512, 2048)
#: The gate by dtype: largest relative difference (Frobenius) from transformers' eager loop.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
#: Backends and the most tokens for which they are timed: beyond it some would copy tens of gigabytes.
MOST_TOKENS = {
    "torch_loop": 2048, "torch_sorted": 2048, "torch_sized": 2048, "torch_onednn": 2048, "torch_grouped": 2048,
    "torch_batched": 2048, "torch_pairs": 64, "torch_gathered": 16,
}  # fmt: skip
SKEW_TOKENS = 512

Run = Callable[[], Tensor]


def make_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.empty(EXPERTS, 2 * WIDTH, HIDDEN).normal_(0.0, HIDDEN**-0.5, generator=generator).to(dtype)
    down = torch.empty(EXPERTS, HIDDEN, WIDTH).normal_(0.0, WIDTH**-0.5, generator=generator).to(dtype)
    return gate_up, down


def choose(tokens: int, load: str) -> Tensor:
    """[tokens, TOP_K] distinct experts: `even` at random, `zipf` with probability 1 / rank, `one set` the same for
    every token, `equal` every expert with as many tokens as every other."""
    generator = torch.Generator().manual_seed(tokens)
    if load == "one set":
        return torch.arange(TOP_K).expand(tokens, -1).clone()
    if load == "equal":
        return (torch.arange(tokens)[:, None] * TOP_K + torch.arange(TOP_K)) % EXPERTS
    odds = torch.ones(EXPERTS) if load == "even" else 1.0 / torch.arange(1, EXPERTS + 1)
    return torch.multinomial(odds.expand(tokens, -1), TOP_K, generator=generator)


def inputs_for(tokens: int, load: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + 1)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    weights = torch.rand(tokens, TOP_K, generator=generator) + 0.1
    return x, (weights / weights.sum(-1, keepdim=True)).to(dtype), choose(tokens, load)


def settled(run: Run) -> Run:
    """`run` until the device has done it."""

    def wait() -> Tensor:
        result = run()
        if result.is_cuda:
            torch.cuda.synchronize()
        return result

    return wait


def read_rate(weights: Tensor) -> float:
    """Bytes a second at which a maximum reads the weights: the best of five, on a CPU in pieces of one expert."""
    whole = weights.view(torch.int32 if weights.element_size() == 4 else torch.int16)
    pieces = [whole] if weights.is_cuda else list(whole)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        for piece in pieces:
            settled(piece.max)()
        seconds.append(time.perf_counter() - started)
    return weights.numel() * weights.element_size() / min(seconds)


def peers(config: Qwen3_5MoeTextConfig, gate_up: Tensor, down: Tensor) -> dict[str, Qwen3_5MoeExperts]:
    """transformers' experts as they come (grouped_mm, what a model gets by default) and its eager loop."""
    found = {}
    for name in ("grouped_mm", "eager"):
        own = copy.deepcopy(config)
        own._experts_implementation = name
        with torch.device("meta"):
            module = Qwen3_5MoeExperts(own)
        module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        module.down_proj = torch.nn.Parameter(down, requires_grad=False)
        found[name] = module
    return found


def resolves(name: str, device: str, dtype: torch.dtype, tokens: int) -> bool:
    """Whether the backend serves device and dtype; torch_onednn is written for fp32 on a CPU alone."""
    call = Call("experts", device, dtype, tokens, False, False, PRESETS["safe"], (EXPERTS, 2 * WIDTH, HIDDEN))
    return OPERATIONS["experts"].backends[name].refusal(call) is None


def measure(case: str, runs: dict[str, Run], counted: dict[str, Run], chosen: dict[str, Kernels], hit_bytes: int,
            rate: float, rounds: int) -> list[bench.Row]:  # fmt: skip
    """Time, share of the limit, launches, syncs and bytes of every way to do one case; `chosen` say what ran."""
    samples = bench.interleave({name: settled(run) for name, run in runs.items()}, rounds=rounds, warmup=1)
    least = hit_bytes / rate
    rows = [
        bench.Row.of(
            case, name, "ms", [1e3 * s for s in seconds], share_of_limit=least / statistics.median(seconds),
            attested=[row.in_words() for row in chosen[name].attestation()] if name in chosen else [],
        )
        for name, seconds in samples.items()
    ]  # fmt: skip
    rows.append(bench.Row(case, "limit: experts hit, read once", "ms", 1e3 * least, 0.0, 1))
    base = samples["transformers (grouped_mm)"]
    for name, seconds in samples.items():
        if not name.startswith("transformers"):
            ratios = [b / a for a, b in zip(seconds, base, strict=True)]
            rows.append(bench.Row.of(case, name, "times as fast as transformers (grouped_mm)", ratios))
    for name, run in counted.items():
        with torch.inference_mode(False):
            found = count_launches(run)
        for unit, value in (("kernels launched", found.kernels), ("host syncs", found.syncs), ("bytes", found.bytes)):
            rows.append(bench.Row(case, name, unit, value, 0.0, 1))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--backends", nargs="+", default=list(MOST_TOKENS), choices=list(MOST_TOKENS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    bench.pin_threads(1)
    keeps_memory = bench.keep_freed_memory()
    config = Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, moe_intermediate_size=WIDTH, num_experts_per_tok=TOP_K
    )
    rows, worst, rates = [], 0.0, {}
    for dtype_name in options.dtypes:
        dtype = getattr(torch, dtype_name)
        gate_up, down = (weight.to(options.device) for weight in make_weights(dtype))
        rates[dtype_name] = rate = read_rate(gate_up)
        print(f"{dtype_name}: weights are read at {rate / 1e9:.1f} GB/s", flush=True)
        expert_bytes = (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()
        cases = [(tokens, "even") for tokens in options.lengths]
        cases += [(SKEW_TOKENS, load) for load in ("zipf", "one set", "equal") if SKEW_TOKENS in options.lengths]
        for tokens, load in cases:
            x, weights, experts = (tensor.to(options.device) for tensor in inputs_for(tokens, load, dtype))
            runs: dict[str, Run] = {
                f"transformers ({name})": partial(module, x, experts, weights)
                for name, module in peers(config, gate_up, down).items()
            }
            chosen = {
                name: Kernels({"experts": name})
                for name in options.backends
                if tokens <= MOST_TOKENS[name] and resolves(name, options.device, dtype, tokens)
            }
            counted = {
                name: partial(kernels.experts, x, weights, experts, gate_up, down) for name, kernels in chosen.items()
            }
            case = f"{dtype_name}, {tokens} tokens, {load}"
            expected = runs["transformers (eager)"]()
            for name, run in (runs | counted).items():
                difference = relative_error(run(), expected) / LIMITS[dtype]
                worst = max(worst, difference if math.isfinite(difference) else math.inf)
                if difference > 1.0:
                    print(f"{case}, {name}: differs by {difference:.1e} of the limit", file=sys.stderr)
            hit = len(experts.unique())
            rounds = 3 * options.rounds if tokens <= 16 else options.rounds
            found = measure(case, runs | counted, counted, chosen, hit * expert_bytes, rate, rounds)
            for row in found:
                if row.unit == "ms":
                    print(f"{row.case:36} {row.backend:30} {row.median:9.2f} ms, IQR {row.iqr:.2f}", flush=True)
            rows += found
    limits = ", ".join(f"{str(dtype).removeprefix('torch.')} {limit:.0e}" for dtype, limit in LIMITS.items())
    metric = f"relative difference from transformers' loop over its limit ({limits})"
    correctness = bench.Correctness(metric, worst, 1.0)
    path = bench.write_result(
        options.out, NAME, correctness, rows, project=ROOT, device=options.device, peers=("transformers",),
        conditions={
            "keeps_freed_memory": keeps_memory, "read_bytes_per_second": rates,
            "shape": {"hidden": HIDDEN, "experts": EXPERTS, "width": WIDTH, "top_k": TOP_K},
        },
    )  # fmt: skip
    print(path)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        try:
            sys.exit(main())
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
