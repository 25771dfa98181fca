"""One GatedDeltaNet layer at the shape of Qwen3.6-35B-A3B, by the workbench and by transformers, same weights, one run.

    python benchmarks/gdn_layer_vs_transformers.py [--rounds 7]

Hidden size 2048, 16 key and 32 value heads of 128, convolution of 4; batch 1. Prefill and decode steps of the whole
layer, and of everything but its projections (both sides' projections then return stored results of the same input, so
that only lookups remain of them), in fp32, in fp32 with chunks of 32, and with bf16 weights and input. Beside them the
gated delta rule alone, with the kernels that each launches: two-phase (in blocks of chunks under the CPU's byte budget,
and under the GPU's) against interleaved for four chunk sizes, and every solver for the same chunk sizes. Outputs are
compared before anything is timed. Writes benchmarks/results/gdn_layer_vs_transformers.cpu.json.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from workbench import bench
from workbench.analysis.launches import count_launches
from workbench.cache import DeltaCache
from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.kernels.gated_delta_rule.spec import example
from workbench.model import GatedDeltaNet, Joint, Pass
from workbench.numerics import ACCURATE_SOLVERS, PRESETS

ROOT = Path(__file__).resolve().parent.parent
NAME = "gdn_layer_vs_transformers"
SHAPE = {
    "hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
CHUNKS = (16, 32, 64, 128)
#: Name of a setting of the layer, its dtype and chunk.
SETTINGS = (
    ("float32", torch.float32, 64), ("float32, chunk 32", torch.float32, 32), ("bfloat16", torch.bfloat16, 64)
)  # fmt: skip
#: The gate by dtype: largest relative difference (Frobenius) of outputs and states.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DECODE_STEPS = 8
#: Bytes of a matrix per block of chunks in the state-free phase, see `torch_chunk.BYTES_AT_ONCE`.
STRUCTURES = {
    "two-phase": torch_chunk.BYTES_AT_ONCE["cpu"],
    "two-phase, GPU's budget": torch_chunk.BYTES_AT_ONCE["cuda"],
    "interleaved": 0,
}


class Stored(nn.Module):
    """Stands for a projection: returns `results[tokens]`, or its input where none are stored."""

    def __init__(self, results: dict[int, object] | None = None):
        super().__init__()
        self.results = results

    def forward(self, x: Tensor, kernels: Kernels | None = None) -> object:
        return x if self.results is None else self.results[x.shape[1]]


class Workbench:
    """Our layer with its kernels and the memory of one sequence."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, chunk: int):
        self.kernels = Kernels(None, dataclasses.replace(PRESETS["safe"], chunk=chunk))
        self.config, self.dtype = config, dtype
        self.layer = GatedDeltaNet(config).to(dtype)
        self.shared = Pass(self.kernels, [0], None, None, torch.empty(0), torch.empty(0))

    def load(self, weights: dict[str, Tensor]) -> None:
        self.layer.load_state_dict(weights)
        self.layer.joint = Joint(*self.layer.joint.layers)
        self.layer.joint.lay_out()

    def memory(self) -> DeltaCache:
        c = self.config
        window = torch.zeros(1, c.linear_conv_kernel_dim - 1, c.conv_dim, dtype=self.dtype)
        state = torch.zeros(1, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        return DeltaCache(window, state)

    def __call__(self, x: Tensor, memory: DeltaCache) -> Tensor:
        return self.layer(x, self.shared, memory, None)

    def state(self, memory: DeltaCache) -> Tensor:
        return memory.state

    @contextmanager
    def without_projections(self, inputs: list[Tensor]) -> Iterator[None]:
        layer, joint, out = self.layer, self.layer.joint, self.layer.out_proj
        layer.joint = Stored({x.shape[1]: joint(x, self.kernels) for x in inputs}).forward  # as Joint, not a module
        layer.out_proj = Stored()
        try:
            yield
        finally:
            layer.joint, layer.out_proj = joint, out

    def attested(self, tokens: str) -> list[str]:
        return [row.in_words() for row in self.kernels.attestation() if row.tokens == tokens]


class Transformers:
    """The other side, in PyTorch as it comes."""

    PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def __init__(self, config: Qwen3_5MoeTextConfig, dtype: torch.dtype):
        self.config, self.dtype = config, dtype
        self.layer = Qwen3_5MoeGatedDeltaNet(config, 0).to(dtype).eval()

    def load(self, weights: dict[str, Tensor]) -> None:
        self.layer.load_state_dict(weights)
        for name in GatedDeltaNet.KEPT_WIDE:  # the same numbers on both sides, in bf16 too
            setattr(self.layer, name, nn.Parameter(weights[name].clone(), requires_grad=False))

    def memory(self) -> transformers.DynamicCache:
        return transformers.DynamicCache(config=self.config)

    def __call__(self, x: Tensor, memory: transformers.DynamicCache) -> Tensor:
        return self.layer(x, cache_params=memory)

    def state(self, memory: transformers.DynamicCache) -> Tensor:
        return memory.layers[0].recurrent_states[0]

    @contextmanager
    def without_projections(self, inputs: list[Tensor]) -> Iterator[None]:
        before = {name: getattr(self.layer, name) for name in (*self.PROJECTIONS, "out_proj")}
        for name in self.PROJECTIONS:
            setattr(self.layer, name, Stored({x.shape[1]: before[name](x) for x in inputs}))
        self.layer.out_proj = Stored()
        try:
            yield
        finally:
            for name, module in before.items():
                setattr(self.layer, name, module)


def make_weights(layer: nn.Module) -> dict[str, Tensor]:
    """fp32 weights of the sizes of a trained layer, gates of its range: a few strong heads among weak ones."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in layer.state_dict().items():
        x = torch.randn(parameter.shape, generator=generator)
        if name == "A_log":
            x = torch.empty(parameter.shape).uniform_(0.01, 16.0, generator=generator).log()
        elif name == "dt_bias":
            x = x - 3.0
        elif name == "norm.weight":
            x = 1.0 + 0.1 * x
        elif name == "conv1d.weight":
            x = 0.3 * x
        else:
            x = x * parameter.shape[1] ** -0.5
        weights[name] = x
    return weights


Side = Workbench | Transformers


def run_all(side: Side, prefills: list[Tensor], steps: Tensor) -> list[Tensor]:
    """Outputs and final states of the prefills, then of decode steps after the first of them."""
    results = []
    for x in prefills:
        memory = side.memory()
        results += [side(x, memory), side.state(memory).clone()]
    memory = side.memory()
    side(prefills[0], memory)
    results.append(torch.cat([side(steps[:, t : t + 1], memory) for t in range(steps.shape[1])], dim=1))
    results.append(side.state(memory))
    return results


def both_sides(case: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int, *, factor: float,
               unit: str, attested: Callable[[], list[str]]) -> list[bench.Row]:  # fmt: skip
    samples = bench.interleave({"workbench": ours, "transformers": theirs}, rounds=rounds, warmup=1)
    used = {"workbench": attested(), "transformers": []}
    rows = [
        bench.Row.of(case, side, unit, [factor * s for s in seconds], attested=used[side])
        for side, seconds in samples.items()
    ]
    ratios = [b / a for a, b in zip(samples["workbench"], samples["transformers"], strict=True)]
    return [*rows, bench.Row.of(case, "transformers / workbench", "ratio of one round", ratios)]


def layer_rows(setting: str, ours: Workbench, theirs: Transformers, prefills: list[Tensor], steps: Tensor,
               rounds: int) -> list[bench.Row]:  # fmt: skip
    found = []

    def decode(side: Side, memory: object) -> None:
        for t in range(steps.shape[1]):
            side(steps[:, t : t + 1], memory)

    def measure(part: str) -> None:
        for x in prefills:
            found.extend(
                both_sides(
                    f"{setting}, {part}, prefill of {x.shape[1]} tokens",
                    lambda x=x: ours(x, ours.memory()), lambda x=x: theirs(x, theirs.memory()), rounds,
                    factor=1e3, unit="ms", attested=lambda: ours.attested("2 and more"),
                )
            )  # fmt: skip
        mine, other = ours.memory(), theirs.memory()
        ours(prefills[0], mine)
        theirs(prefills[0], other)
        found.extend(
            both_sides(
                f"{setting}, {part}, decode step", lambda: decode(ours, mine), lambda: decode(theirs, other),
                3 * rounds, factor=1e3 / steps.shape[1], unit="ms per token", attested=lambda: ours.attested("1"),
            )
        )  # fmt: skip

    measure("whole layer")
    inputs = [*prefills, steps[:, :1]]
    with ours.without_projections(inputs), theirs.without_projections(inputs):
        measure("all but projections")
    return found


def structure_rows(lengths: list[int], rounds: int) -> tuple[list[bench.Row], float]:
    """The gated delta rule alone: structures and chunks, time and launches; and how far the structures differ."""
    rows, largest = [], 0.0
    for tokens in lengths:
        inputs = example(tokens=tokens, key_heads=16, value_heads=32, key_dim=128, value_dim=128)
        for chunk in CHUNKS:
            named = {
                "policy": dataclasses.replace(PRESETS["safe"], chunk=chunk), "tap": None, "initial_state": None,
                "cu_seqlens": None, **inputs,
            }  # fmt: skip
            runs = {
                name: partial(torch_chunk.run_in_parts, **named, limit=limit) for name, limit in STRUCTURES.items()
            }
            expected = runs["two-phase"]()[0]
            largest = max(largest, *(relative_error(run()[0], expected) for run in runs.values()))
            samples = bench.interleave(runs, rounds=rounds, warmup=1)
            case = f"float32, gated delta rule alone, {tokens} tokens, chunk {chunk}"
            for name, seconds in samples.items():
                rows.append(bench.Row.of(case, name, "ms", [1e3 * s for s in seconds]))
                rows += launch_rows(case, name, runs[name])
            ratios = [b / a for a, b in zip(samples["two-phase"], samples["interleaved"], strict=True)]
            rows.append(bench.Row.of(case, "interleaved / two-phase", "ratio of one round", ratios))
    return rows, largest


def solver_rows(tokens: int, rounds: int) -> tuple[list[bench.Row], float]:
    """The two-phase form with every accurate solver and chunk: time and launches; and how far the solvers differ."""
    rows, largest = [], 0.0
    inputs = example(tokens=tokens, key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    for chunk in CHUNKS:
        case = f"float32, gated delta rule alone, {tokens} tokens, chunk {chunk}, by solver"
        runs = {
            solver: partial(
                torch_chunk.run, **inputs, policy=dataclasses.replace(PRESETS["safe"], chunk=chunk, solver=solver)
            )
            for solver in ACCURATE_SOLVERS
        }
        expected = runs[ACCURATE_SOLVERS[0]]()[0]
        largest = max(largest, *(relative_error(run()[0], expected) for run in runs.values()))
        for solver, seconds in bench.interleave(runs, rounds=rounds, warmup=1).items():
            rows.append(bench.Row.of(case, solver, "ms", [1e3 * s for s in seconds]))
            rows += launch_rows(case, solver, runs[solver])
    return rows, largest


def launch_rows(case: str, backend: str, run: Callable[[], object]) -> list[bench.Row]:
    with torch.inference_mode(False):
        launched = count_launches(run)
    counts = (("kernels launched", launched.kernels), ("host syncs", launched.syncs))
    return [bench.Row(case, backend, unit, count, 0.0, 1) for unit, count in counts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of the prefills")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    bench.pin_threads(1)
    keeps_memory = bench.keep_freed_memory()
    theirs_config = Qwen3_5MoeTextConfig(**SHAPE, num_hidden_layers=1, layer_types=["linear_attention"])
    ours_config = ModelConfig.from_hf(theirs_config.to_dict())
    generator = torch.Generator().manual_seed(1)
    wide = [torch.randn(1, n, ours_config.hidden_size, generator=generator) for n in (*arguments.lengths, DECODE_STEPS)]

    weights, sides, share = None, [], 0.0
    for setting, dtype, chunk in SETTINGS:
        limit = LIMITS[dtype]
        ours, theirs = Workbench(ours_config, dtype, chunk), Transformers(theirs_config, dtype)
        weights = weights if weights is not None else make_weights(theirs.layer)
        ours.load(weights)
        theirs.load(weights)
        *prefills, steps = [x.to(dtype) for x in wide]
        pairs = zip(run_all(ours, prefills, steps), run_all(theirs, prefills, steps), strict=True)
        largest = max(relative_error(a, b) for a, b in pairs)
        print(f"{setting}: outputs and states differ by {largest:.1e}, limit {limit:.0e}", flush=True)
        share = max(share, largest / limit)
        sides.append((setting, ours, theirs, prefills, steps))
    limits = ", ".join(f"{str(dtype).removeprefix('torch.')} {limit:.0e}" for dtype, limit in LIMITS.items())
    metric = f"relative difference of outputs and states over its limit ({limits}; structures 1e-06)"
    bench.Correctness(metric, share, 1.0).check()

    rows = [row for side in sides for row in layer_rows(*side, arguments.rounds)]
    more, largest = structure_rows(arguments.lengths, arguments.rounds)
    rows += more
    more, found = solver_rows(min(arguments.lengths), arguments.rounds)
    rows, largest = rows + more, max(largest, found)
    correctness = bench.Correctness(metric, max(share, largest / 1e-6), 1.0)
    for row in rows:
        print(f"{row.case:58} {row.backend:26} {row.median:9.3f} {row.unit}, IQR {row.iqr:.3f}, n {row.n}")
    path = bench.write_result(
        arguments.out, NAME, correctness, rows, project=ROOT, peers=("transformers",),
        conditions={"keeps_freed_memory": keeps_memory, "shape": SHAPE},
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
