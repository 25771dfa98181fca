"""Rows of shared memory with 16 unused bytes at their end against rows without, in the CUDA kernels of the delta rule.

    python benchmarks/shared_memory_padding.py [--rounds 21] [--commit HASH] [--out FOLDER]

The same sources twice, on the same inputs: bfloat16, heads of the 35B model. Their results must be the same to the last
bit before they are timed, in CUDA graphs over several sets of inputs, in turn. docs/patterns.md cites the figures.
Writes benchmarks/results/shared_memory_padding.<hardware>.json.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from workbench import bench
from workbench.bench import clocks
from workbench.errors import BackendError, InputError, WorkbenchError
from workbench.kernels import cuda_build
from workbench.kernels.gated_delta_rule import cuda_chunk, spec
from workbench.numerics import SAFE

ROOT = Path(__file__).resolve().parent.parent
NAME = "shared_memory_padding"
PADDINGS = {"without padding": 0, "16 bytes": cuda_chunk.ROW_PADDING}
FORMS = {"cuda_chunk": cuda_chunk.WARPS, "cuda_chunk_split": cuda_chunk.SPLIT_WARPS}
TOKENS, SETS = 16384, 3
HEADS = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--commit", help="the commit measured, for a tree that was copied without its history")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise InputError("shared_memory_padding: expected a CUDA device, found none; run it on a machine with a GPU")
    reason = cuda_build.refusal()
    if reason is not None:
        raise BackendError(f"shared_memory_padding: what it times {reason}")
    sets = [
        spec.example(tokens=TOKENS, **HEADS, log_decay=-0.1, dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed in range(SETS)
    ]
    empty = {"initial_state": None, "cu_seqlens": None, "tap": None, "flags": None}
    rows, differing = [], 0
    for form, warps in FORMS.items():
        sides = {
            name: [
                partial(cuda_chunk.run_in_blocks, **given, **empty, policy=SAFE, warps=warps, row_padding=padding)
                for given in sets
            ]
            for name, padding in PADDINGS.items()
        }
        (out, state), *others = [calls[0]() for calls in sides.values()]
        differing += sum(int((out != a).sum() + (state != b).sum()) for a, b in others)
        bench.Correctness("values that differ", differing, 0).check()
        ready = {name: clocks.prepare(calls, "cuda") for name, calls in sides.items()}
        samples = {name: [] for name in ready}
        for _ in range(options.rounds):
            for name, clock in ready.items():
                samples[name].append(clock.sample())
        case = f"shared-memory padding: {form}, 1 x {TOKENS} tokens, 35B heads, bfloat16"
        plain, padded = samples
        for name, found in samples.items():
            rows.append(bench.Row.of(case, name, "us", found, attested=[ready[name].how]))
        ratios = [a / b for a, b in zip(samples[plain], samples[padded], strict=True)]
        rows.append(bench.Row.of(case, padded, f"times as fast as {plain}", ratios))
    for row in rows:
        print(f"{row.case:75} {row.backend:16} {row.median:10.2f} {row.unit}, IQR {row.iqr:.2f}", flush=True)
    correctness = bench.Correctness("values that differ between the sides", differing, 0)
    measured = None if options.commit is None else (options.commit, False)
    print(bench.write_result(options.out, NAME, correctness, rows, project=ROOT, device="cuda", measured=measured))
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        try:
            sys.exit(main())
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
