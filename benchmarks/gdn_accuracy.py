"""Error of the chunked gated delta rule against its fp64 oracle on inputs where wrong forms fail.

    python benchmarks/gdn_accuracy.py

For each kind of input, length and chunk: the default policy with each of its solvers, segment sums, and the
cumulative sum in fp32 beside them. The gate holds for the accurate differences alone (float64 and segsum):
3e-6 for output and final state. Writes benchmarks/results/gdn_accuracy.cpu.json, which has errors where other
results have times.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from workbench import bench
from workbench.errors import WorkbenchError
from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.killer_inputs import VALID_EXTREMES
from workbench.numerics import ACCURATE_SOLVERS, PRESETS, NumericsPolicy

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 3e-6
LENGTHS = (1, 63, 64, 65, 129, 320, 2048)
CHUNKS = (16, 32, 64, 128)


def policies() -> dict[str, NumericsPolicy]:
    accurate = {f"safe, {solver}": dataclasses.replace(PRESETS["safe"], solver=solver) for solver in ACCURATE_SOLVERS}
    return accurate | {name: PRESETS[name] for name in ("segsum", "fp32_cumsum")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    bench.pin_threads(1)
    rows, worst = [], 0.0
    columns = policies()
    print(f"{'largest of output and state':26} " + " ".join(f"{name:>24}" for name in columns))
    for name, extreme in VALID_EXTREMES.items():
        # A kind may choose the next length that it can have.
        for tokens in dict.fromkeys(extreme.make(tokens, 0)["q"].shape[1] for tokens in LENGTHS):
            inputs = extreme.make(tokens, 0)
            exact_out, exact_state = oracle(**inputs)
            largest = dict.fromkeys(columns, 0.0)
            for label, policy in columns.items():
                errors: dict[str, list[float]] = {"output": [], "state": []}
                for chunk in CHUNKS:
                    named = dataclasses.replace(policy, chunk=chunk)
                    out, state = gated_delta_rule(**inputs, policy=named, backend="torch_chunk")
                    errors["output"].append(relative_error(out, exact_out))
                    errors["state"].append(relative_error(state, exact_state))
                for what, values in errors.items():
                    case = f"{name}, {tokens} tokens, {what}, largest over chunks {CHUNKS}"
                    rows.append(bench.Row(case, label, "relative error", max(values), 0.0, len(values)))
                    largest[label] = max(largest[label], *values)
            worst = max(worst, *(error for label, error in largest.items() if label != "fp32_cumsum"))
            print(f"{name:20} {tokens:5} " + " ".join(f"{error:24.1e}" for error in largest.values()))
    correctness = bench.Correctness("relative error of output and state, accurate differences", worst, LIMIT)
    print(f"{correctness.metric}: {worst:.1e}, limit {LIMIT:.0e}")
    print(bench.write_result(arguments.out, "gdn_accuracy", correctness, rows, project=ROOT))
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        try:
            sys.exit(main())
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
