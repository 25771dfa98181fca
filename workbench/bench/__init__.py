"""Timing that can be trusted: correctness first, sides interleaved, spread shown, conditions recorded.

    from workbench import bench

    bench.pin_threads(1)
    correctness = bench.Correctness("logit parity", difference, limit=1e-5)
    samples = bench.interleave({"ours": ours, "theirs": theirs}, rounds=9)
    rows = [bench.Row.of("prefill 2048", name, "ms", times) for name, times in samples.items()]
    bench.write_result(Path("benchmarks/results"), "prefill", correctness, rows)

`write_result` refuses a red gate: where the results differ by more than the limit there is nothing to time. What times
the backends of the ops at the shapes of models is in `shapes`, `cases`, `clocks`, `limits`, `measure` and `suite`.
"""

from workbench.bench.here import kernel_result
from workbench.bench.machine import hardware, keep_freed_memory, pin_threads
from workbench.bench.result import Correctness, Row, read_result, recorded_result, write_result
from workbench.bench.timing import interleave, spread
from workbench.bench.unfinished import Unfinished

__all__ = [
    "Correctness",
    "Row",
    "Unfinished",
    "hardware",
    "interleave",
    "keep_freed_memory",
    "kernel_result",
    "pin_threads",
    "read_result",
    "recorded_result",
    "spread",
    "write_result",
]
