"""What a call costs before it computes: the choice of a backend, which is made once, and a scratch buffer.

    python benchmarks/dispatch_overhead.py [--rounds 99]

`Kernels.linear` beside `F.linear` and `Kernels.routing` beside the backend that it chose, on arguments so small that
the call is most of the time; `Workspace.take` with the return of the buffer beside `torch.empty` of the same shape.
Rows "added" are differences within a round. The gate: dispatched results are those of the direct call, bit for bit.
Writes benchmarks/results/dispatch_overhead.cpu.json.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F

from workbench import bench
from workbench.errors import WorkbenchError
from workbench.kernels import Kernels
from workbench.kernels.registry import OPERATIONS
from workbench.kernels.workspace import KEPT_VIEWS, Workspace

ROOT = Path(__file__).resolve().parent.parent
NAME = "dispatch_overhead"
#: Calls in one sample: few, so that a sample fits between two interruptions.
CALLS = {"linear": 200, "routing": 20, "scratch": 200}
EXPERTS, TOP_K = 256, 8
SHAPE = (64, 512)

Run = Callable[[], object]


def measured(case: str, calls: int, runs: dict[str, Run], rounds: int, added: tuple[str, str]) -> list[bench.Row]:
    """A row for each run, in microseconds a call, and one for what the first of `added` costs above the second."""
    samples = bench.interleave(runs, rounds=rounds)
    us = {name: [1e6 * seconds / calls for seconds in values] for name, values in samples.items()}
    rows = [bench.Row.of(case, name, "us", values) for name, values in us.items()]
    above, below = added
    difference = [a - b for a, b in zip(us[above], us[below], strict=True)]
    return [*rows, bench.Row.of(case, f"added by {above}", "us", difference)]


def linear_runs(kernels: Kernels) -> tuple[dict[str, Run], float]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((1, 1, 64), (64, 64)))

    def direct() -> None:
        for _ in range(CALLS["linear"]):
            F.linear(x, weight)

    def dispatched() -> None:
        for _ in range(CALLS["linear"]):
            kernels.linear(x, weight)

    difference = float((kernels.linear(x, weight) - F.linear(x, weight)).abs().max())
    return {"F.linear": direct, "Kernels.linear": dispatched}, difference


def routing_runs(kernels: Kernels) -> tuple[dict[str, Run], float]:
    logits = torch.randn(1, EXPERTS, generator=torch.Generator().manual_seed(1))
    chosen = kernels.routing(logits, top_k=TOP_K, normalise=True)
    (name,) = [row.backend for row in kernels.attestation() if row.op == "routing"]
    run = OPERATIONS["routing"].backends[name].run

    def direct() -> None:
        for _ in range(CALLS["routing"]):
            run(logits, top_k=TOP_K, normalise=True)

    def dispatched() -> None:
        for _ in range(CALLS["routing"]):
            kernels.routing(logits, top_k=TOP_K, normalise=True)

    pairs = zip(chosen, run(logits, top_k=TOP_K, normalise=True), strict=True)
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    return {name: direct, "Kernels.routing": dispatched}, difference


def take_runs(workspace: Workspace, filling: Workspace) -> dict[str, Run]:
    rows = cycle(range(1, 2 * KEPT_VIEWS))

    def take_one_shape() -> None:
        for _ in range(CALLS["scratch"]):
            with workspace.take("scratch", SHAPE, torch.float32):
                pass

    def take_many_shapes() -> None:  # more than are kept, in turn: each is made anew
        for _ in range(CALLS["scratch"]):
            with workspace.take("scratch", (next(rows), 8), torch.float32):
                pass

    def take_filled() -> None:
        for _ in range(CALLS["scratch"]):
            with filling.take("scratch", SHAPE, torch.float32):
                pass

    def empty() -> None:
        for _ in range(CALLS["scratch"]):
            torch.empty(SHAPE)

    def nothing() -> None:
        for _ in range(CALLS["scratch"]):
            pass

    return {
        "Workspace.take": take_one_shape, "Workspace.take, a new shape each time": take_many_shapes,
        "Workspace.take, debug": take_filled, "torch.empty": empty, "nothing": nothing,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=99)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    bench.pin_threads(1)
    kernels = Kernels({"linear": "torch_linear"})  # whose product is F.linear
    rows, worst = [], 0.0
    for case, (runs, difference) in {
        "linear 1 x 64 by 64 x 64": linear_runs(kernels),
        f"routing of 1 token, {EXPERTS} experts top-{TOP_K}": routing_runs(kernels),
    }.items():
        worst = max(worst, difference)
        direct, dispatched = runs
        rows += measured(case, CALLS[case.partition(" ")[0]], runs, arguments.rounds, (dispatched, direct))
    with Workspace() as workspace, Workspace(debug=True) as filling:
        for one in (workspace, filling):
            one.declare("scratch", SHAPE, torch.float32)
            one.allocate()
        runs = take_runs(workspace, filling)
        case = f"scratch of {SHAPE[0]} x {SHAPE[1]}"
        rows += measured(case, CALLS["scratch"], runs, arguments.rounds, ("Workspace.take", "nothing"))
    for row in rows:
        print(f"{row.case:44} {row.backend:40} {row.median:8.3f} {row.unit}, IQR {row.iqr:.3f}, n {row.n}")
    correctness = bench.Correctness("largest difference between dispatched and direct results", worst, 0.0)
    conditions = {"calls_in_a_sample": CALLS}
    print(bench.write_result(arguments.out, NAME, correctness, rows, project=ROOT, conditions=conditions))
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        try:
            sys.exit(main())
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
