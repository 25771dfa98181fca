"""Every hot op on a GPU: our kernels, torch's, and the libraries', at the shapes of published models, in one run.

    python benchmarks/gpu_kernels.py --device cuda [--minutes 8] [--only gated_delta_rule] [--out FOLDER]

Each side is held to the float64 arbiter on inputs that are drawn for this run, and on inputs that are hard, before it
is timed; times are of CUDA graphs over several sets of inputs, so that none is cached, sides in turn. The share of the
limit is that of what a copy and a matrix product do on the same card in the same run. `moe_layer` is routing, alignment
and experts. flash-linear-attention is kept from handing its calls to FlashQLA, which is a side of its own.
Writes benchmarks/results/gpu_kernels.HARDWARE.json after every case; the same command goes on after a stop.
"""

import argparse
import inspect
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.setdefault("FLA_FLASH_QLA", "0")  # read when fla is imported

import torch
from torch import Tensor

from workbench.bench.cases import IN_PLACE, MOE_LAYER, TIMED, Case, Words, case_of, parse_tokens
from workbench.bench.measure import Side, flagged, side_named
from workbench.bench.shapes import shape_named
from workbench.bench.suite import Entry, Settings, run_suite
from workbench.errors import WorkbenchError, one_line
from workbench.kernels.registry import OPERATIONS, register_backend
from workbench.kernels.requirements import Requires, load_symbol
from workbench.loading import dtype_named
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap

ROOT = Path(__file__).resolve().parent.parent
NAME = "gpu_kernels"

PREFILL = (
    "triton_chunk", "cuda_chunk", "cuda_chunk_split", "torch_chunk", "fla", "flash_qla", "flashinfer", "vllm",
    "transformers",
)  # fmt: skip
DECODE = ("triton_recurrent", "cuda_recurrent", "torch_recurrent", "fla", "vllm", "transformers")
FUSED = ("triton_packed", "torch_composed")
MOE = ("automatic", "triton_grouped+triton_count+triton_topk", "torch_grouped")
MOE_FEW = ("automatic", "triton_few+triton_topk", "torch_gathered", "torch_grouped")

#: Sides with nothing to compile, by how they begin.
NOT_COMPILED = ("torch_", "transformers", "automatic")
#: Where flags are timed too: from so many tokens of a prompt, or sequences of a step, on.
FLAG_TOKENS, FLAG_ROWS = 512, 8

#: op, shape, tokens, sides: what must be known first.
PLAN = (
    ("gated_delta_rule", "35b-a3b", ("1x16384", "8x4096", "1x65536", "1x4096", "1x512"), PREFILL),
    (MOE_LAYER, "35b-a3b", ("1x4096", "1x16384"), MOE),
    (MOE_LAYER, "35b-a3b", ("1x1", "8x1"), MOE_FEW),
    (IN_PLACE, "35b-a3b", ("1x1", "64x1", "256x1", "8x1"), FUSED),
    ("gdn_decode", "35b-a3b", ("1x1", "64x1"), FUSED),
    ("gated_delta_rule", "35b-a3b", ("64x1", "256x1", "1x1", "8x1"), DECODE),
    (MOE_LAYER, "35b-a3b", ("64x1", "512x1"), (*MOE_FEW, *MOE[1:2])),
    ("gated_delta_rule", "397b-tp8", ("1x8192",), PREFILL[:-1]),
    ("gated_delta_rule", "27b", ("1x8192",), PREFILL[:-1]),
    ("gated_delta_rule", "35b-a3b", ("1x1024", "1x2048", "1x8192", "4x2048"), PREFILL[:-1]),
    ("causal_conv", "35b-a3b", ("1x16384", "8x4096"), ("triton_conv", "torch_depthwise", "causal_conv1d", "vllm")),
    ("gated_rms_norm", "35b-a3b", ("1x16384", "64x1"), ("triton_rms", "torch_rms", "fla", "vllm")),
    ("routing", "35b-a3b", ("1x4096", "8x1"), ("triton_topk", "torch_max", "torch_sort", "vllm")),
    ("alignment", "35b-a3b", ("1x4096",), ("triton_count", "torch_count", "torch_sort", "vllm")),
    (MOE_LAYER, "397b-tp8", ("1x4096", "8x1"), (*MOE_FEW, *MOE[1:2])),
)


#: transformers' delta rule in PyTorch, by the phase of the call.
TRANSFORMERS = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"


def transformers_rule(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The contract's op by transformers: its own PyTorch, not the library that it hands over to where one is there.

    It takes a key head for each value head, and scales the queries itself.
    """
    names = {True: "torch_recurrent_gated_delta_rule", False: "torch_chunk_gated_delta_rule"}
    rule = inspect.unwrap(load_symbol(f"{TRANSFORMERS}:{names[q.shape[1] == 1]}"))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q.float() * q.shape[-1] ** 0.5, k))
    out, state = rule(q, k, v, g=log_decay, beta=beta, initial_state=initial_state, output_final_state=True)
    return out.to(v.dtype), state.float()


def register_peers() -> None:
    """Add the sides that are no backends of the package."""
    if "transformers" not in OPERATIONS["gated_delta_rule"].backends:
        register_backend(
            "gated_delta_rule", "transformers", transformers_rule,
            lambda call: "has no packed sequences" if call.packed else None, policy="transformers",
            requires=Requires(symbols=(f"{TRANSFORMERS}:torch_chunk_gated_delta_rule",)),
        )  # fmt: skip


def entries(only: list[str] | None, tokens: list[str] | None, dtype: torch.dtype, shape: str | None) -> list[Entry]:
    """The plan, or the part of it that was asked for; backends that no op here has are left out."""
    register_peers()
    found: dict[str, tuple[Case, dict[str, Side]]] = {}  # with --shape, cases of the plan may become one
    for op, name, lengths, labels in PLAN:
        if (only and op not in only) or op not in TIMED:
            continue
        for length in lengths:
            if tokens and length not in tokens:
                continue
            case = case_of(op, shape_named(shape or name), parse_tokens(length), dtype)
            known = {"automatic"} | {backend for one in case.ops for backend in OPERATIONS[one].backends}
            sides = [side_named(case, label) for label in labels if set(label.split("+")) <= known]
            has_flags = case.tokens >= FLAG_TOKENS or (case.rows >= FLAG_ROWS and case.tokens == 1)
            _, known_sides = found.setdefault(case.name, (case, {}))
            known_sides |= {side.label: side for side in (*sides, *(flagged(sides) if has_flags else ()))}
    return [Entry(case, list(sides.values())) for case, sides in found.values()]


def compile_sides(planned: list[Entry], workers: int, seconds: float) -> None:
    """Run each side of each op and shape once, in processes of their own: what compiles for minutes does so at once.

    The caches on disk are what stays of it; no more than `seconds` are waited for, and what fails will say so later.
    """
    jobs: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in planned:
        for side in (side for side in entry.sides if not side.label.startswith(NOT_COMPILED)):
            jobs.setdefault((entry.case.op, entry.case.shape.name, side.label), []).append(Entry(entry.case, [side]))
    started = time.monotonic()
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    waiting = {pool.submit(run_once, found): " ".join(name) for name, found in jobs.items()}
    try:
        for over in as_completed(waiting, timeout=seconds):
            error = over.exception()  # of a process that broke off too
            said = over.result() if error is None else one_line(f"{type(error).__name__}: {error}")
            print(f"{time.monotonic() - started:.0f} s: {waiting[over]}: {said[:200]}", flush=True)
    except TimeoutError:
        left = [name for future, name in waiting.items() if not future.done()]
        print(f"{seconds:.0f} s are over; not compiled beforehand: {', '.join(left)}", flush=True)
    for process in list(pool._processes.values()):
        process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)


def run_once(entries: list[Entry]) -> str:
    """Call one side in each of its cases, with a state and without one; what came of it."""
    register_peers()
    try:
        for entry in entries:
            case = entry.case.with_weights("cuda", 0)
            (side,) = entry.sides
            kernels, watch = side.kernels(), Words("cuda") if side.has_flags else None
            with torch.inference_mode():
                case.call(kernels, case.draw("cuda", 0), watch)
                for given in list(case.hard("cuda", 0).values())[-4:]:
                    case.call(kernels, given, watch)
        torch.cuda.synchronize()
    except WorkbenchError as error:
        return one_line(str(error))
    return "done"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", action="append", metavar="OP", help="only this op; may be repeated")
    parser.add_argument("--tokens", action="append", metavar="SEQUENCESxTOKENS", help="only these; may be repeated")
    parser.add_argument("--without", action="append", default=[], metavar="SIDE", help="leave this side out; may be "
                        "repeated: a library that ends the process")  # fmt: skip
    parser.add_argument("--shape", help="this shape in the place of the plan's")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--minutes", type=float, help="no case is begun after so many; what is left is told")
    parser.add_argument("--compile", type=int, metavar="PROCESSES", help="first run every side once in so many "
                        "processes at a time")  # fmt: skip
    parser.add_argument("--compile-seconds", type=float, default=120.0, help="wait so long for it (default 120)")
    parser.add_argument("--commit", help="of the tree, where it was copied without its history")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_kernels: expected a CUDA device, found none; next: --device cpu --shape miniature", file=sys.stderr)
        return 2
    settings = Settings(device=options.device, rounds=options.rounds, minutes=options.minutes)
    planned = entries(options.only, options.tokens, dtype_named(options.dtype), options.shape)
    planned = [
        Entry(entry.case, [side for side in entry.sides if side.label.split(",")[0] not in options.without])
        for entry in planned
    ]
    if options.compile:
        compile_sides(planned, options.compile, options.compile_seconds)
    outcome = run_suite(
        planned, settings, name=NAME, folder=options.out, project=ROOT, say=lambda line: print(line, flush=True),
        measured=None if options.commit is None else (options.commit, False),
        conditions={"fla": f"FLA_FLASH_QLA={os.environ['FLA_FLASH_QLA']}", "left out": options.without},
    )  # fmt: skip
    print(outcome.path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
