"""The gated delta rule in PyTorch on a GPU: structure x chunk x solver, with the kernels and host syncs of each.

    python benchmarks/gdn_variants.py --device cuda [--tokens 1x4096] [--minutes 3] [--out FOLDER]

Two-phase is `torch_chunk`, which computes what needs no state for as many chunks at once as its byte budget allows;
interleaved is `torch_interleaved`, chunk after chunk. Each is held to float64 on drawn and hard inputs, then timed in a
CUDA graph, and once more with its launches: the same calls between events, as a model makes them without a graph.
Writes benchmarks/results/gdn_variants.HARDWARE.json, and gdn_variants_eager.HARDWARE.json for the latter.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from workbench.bench.cases import case_of, parse_tokens
from workbench.bench.clocks import EAGER, GRAPH
from workbench.bench.measure import Side
from workbench.bench.shapes import shape_named
from workbench.bench.suite import Entry, Settings, run_suite
from workbench.errors import WorkbenchError
from workbench.loading import dtype_named
from workbench.numerics import ACCURATE_SOLVERS, PRESETS

ROOT = Path(__file__).resolve().parent.parent
NAME = "gdn_variants"
STRUCTURES = {"two-phase": "torch_chunk", "interleaved": "torch_interleaved"}
CHUNKS = (16, 32, 64)
#: `auto` is one of the others.
SOLVERS = tuple(name for name in ACCURATE_SOLVERS if name != "auto")


def sides(chunks: list[int], solvers: list[str]) -> list[Side]:
    """``two-phase, chunk 64, block_substitution``, ..."""
    return [
        Side(
            label=f"{structure}, chunk {chunk}, {solver}", requested={"gated_delta_rule": backend}, has_counts=True,
            policy=dataclasses.replace(PRESETS["safe"], chunk=chunk, solver=solver),
        )
        for chunk in chunks for solver in solvers for structure, backend in STRUCTURES.items()
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", default="35b-a3b")
    parser.add_argument("--tokens", nargs="+", default=["1x512", "1x4096"], metavar="SEQUENCESxTOKENS")
    parser.add_argument("--chunk", type=int, nargs="+", default=list(CHUNKS))
    parser.add_argument("--solver", nargs="+", default=list(SOLVERS), choices=SOLVERS)
    parser.add_argument("--clock", nargs="+", default=[GRAPH, EAGER], choices=(GRAPH, EAGER))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, help="no case is begun after so many, of each clock")
    parser.add_argument("--commit", help="of the tree, where it was copied without its history")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gdn_variants: expected a CUDA device, found none; next: --device cpu --shape miniature", file=sys.stderr)
        return 2
    shape, dtype = shape_named(options.shape), dtype_named(options.dtype)
    found = sides(options.chunk, options.solver)
    entries = [Entry(case_of("gated_delta_rule", shape, parse_tokens(text), dtype), found) for text in options.tokens]
    for clock in options.clock:
        settings = Settings(device=options.device, rounds=options.rounds, clock=clock, minutes=options.minutes)
        outcome = run_suite(
            entries, settings, name=NAME if clock == GRAPH else f"{NAME}_{clock}", folder=options.out, project=ROOT,
            measured=None if options.commit is None else (options.commit, False),
            say=lambda line: print(line, flush=True),
        )  # fmt: skip
        print(outcome.path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
