"""The libraries' backends on this machine: held to their contracts, then to the real shapes, then timed beside ours.

    python benchmarks/library_conformance.py --device cuda [--backend fla] [--op experts] [--out FOLDER]

One line for each op and backend: passed, refused (with the reason) or failed (with the first failure). Real shapes are
those of Qwen3.6-35B-A3B in bfloat16 (float16 for a vendor's modules), one token and a prefill, against the arbiter in
float64 on the same values; what is not within the contract's limit there is wrong and not timed. Times are medians of
CUDA events around single calls, sides interleaved, the second-level cache flushed before each; ours is what the
automatic order takes. Of the contract the cases of the heads that libraries are built for are run by default, since a
kernel that is compiled for each shape takes minutes for all of them: `--all-cases` runs them, `--skip-contract` runs
the real shapes alone. `--out` writes library_conformance.HARDWARE.json into a folder; until then what is over is kept
there line by line, so that a run that is stopped loses nothing of it, and the same command goes on after it.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench import bench
from workbench.bench import interleave, spread
from workbench.errors import WorkbenchError, one_line
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error
from workbench.kernels.conformance import CONTRACTS, PASSED, conform
from workbench.kernels.contract import Contract
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.gated_delta_rule import spec as rule_spec
from workbench.kernels.registry import OPERATIONS, Backend, Call
from workbench.kernels.requirements import dtype_name
from workbench.numerics import resolve_policy
from workbench.provenance import commit

ROOT = Path(__file__).resolve().parent.parent
NAME = "library_conformance"
#: Distributions that the backends' functions and kernels come from, recorded as far as they are installed.
PEERS = (
    "causal-conv1d", "fla-core", "flash-attn", "flash-linear-attention", "flash-qla", "flashinfer-python",
    "nvidia-cutlass-dsl", "tilelang", "triton", "vllm",
)  # fmt: skip
#: Gate of the result file: what is over its limit is told as wrong, or as a failed check, and never timed.
METRIC = "error of a value that counts as right over its contract's limit"

#: Backends that are no code of ours.
FOREIGN = (
    "causal_conv1d", "corex_fa2", "corex_gdn", "corex_moe", "fla", "flash_attn", "flash_qla", "flashinfer", "ixformer",
    "vllm",
)  # fmt: skip
#: Cases of the contracts that are run by default, by op; all where an op is not named.
CASES = {
    "gated_delta_rule": (
        "heads of 128, from zero", "heads of 128, from a state", "packed, heads of 128, from a state",
        "one token of three sequences, from a state",
    ),
    "attention": ("heads of 64", "packed heads of 256", "one token, uneven pasts", "prefill onto a past"),
}  # fmt: skip
#: Bytes that are written before a timed call, past what any card's second-level cache holds.
FLUSHED_BYTES = 1 << 28

REAL = {
    "hidden": 2048, "key_heads": 16, "value_heads": 32, "head": 128, "q_heads": 16, "kv_heads": 2, "head_dim": 256,
    "experts": 256, "width": 512, "top_k": 8, "past": 4096,
}  # fmt: skip
#: The same with nothing in it: to see that the script runs.
TINY = {
    "hidden": 64, "key_heads": 1, "value_heads": 2, "head": 128, "q_heads": 2, "kv_heads": 1, "head_dim": 64,
    "experts": 8, "width": 32, "top_k": 2, "past": 16,
}  # fmt: skip


def real_calls(op: str, sizes: dict[str, int], tokens: int) -> dict[str, Any]:
    """Arguments of one call of an op at the sizes of the model, floating tensors in fp32."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = sizes["head"] * (2 * sizes["key_heads"] + sizes["value_heads"])
    if op == "gated_delta_rule":
        inputs = rule_spec.example(
            tokens=tokens, key_heads=sizes["key_heads"], value_heads=sizes["value_heads"], key_dim=sizes["head"],
            value_dim=sizes["head"],
        )  # fmt: skip
        return inputs | {"initial_state": normal(1, sizes["value_heads"], sizes["head"], sizes["head"])}
    if op == "attention":
        keys = tokens if tokens > 1 else sizes["past"]
        shape = (1, keys, sizes["kv_heads"], sizes["head_dim"])
        q = normal(1, tokens, sizes["q_heads"], sizes["head_dim"])
        return {"q": q, "k": normal(*shape), "v": normal(*shape), "scale": sizes["head_dim"] ** -0.5}
    if op == "causal_conv":
        return {"x": normal(1, tokens, channels), "weight": 0.5 * normal(channels, 4), "window": normal(1, 3, channels)}
    if op == "linear":
        return {"x": normal(1, tokens, sizes["hidden"]), "weight": normal(channels, sizes["hidden"]) / 45.0}
    if op == "rms_norm":
        return {"x": normal(1, tokens, sizes["hidden"]), "weight": 0.3 * normal(sizes["hidden"]), "eps": 1e-6}
    if op == "gated_rms_norm":
        shape = (1, tokens, sizes["value_heads"], sizes["head"])
        return {"x": normal(*shape), "gate": normal(*shape), "weight": 1.0 + 0.1 * normal(sizes["head"]), "eps": 1e-6}
    chosen = torch.rand(tokens, sizes["experts"], generator=generator).topk(sizes["top_k"], dim=-1).indices
    if op == "routing":
        order = torch.rand(tokens, sizes["experts"], generator=generator).argsort(-1)
        return {"logits": order.float() * (8.0 / sizes["experts"]) - 4.0, "top_k": sizes["top_k"], "normalise": True}
    if op == "alignment":
        return {"experts": chosen, "num_experts": sizes["experts"], "block": 64}
    return experts_spec.example(
        tokens=tokens, hidden=sizes["hidden"], experts=sizes["experts"], top_k=sizes["top_k"], width=sizes["width"]
    )


def called(contract: Contract, kernels: Kernels, arguments: dict[str, Any]) -> tuple[Any, ...]:
    return contract.parts(getattr(kernels, contract.op)(**arguments))


def errors(
    contract: Contract, backend: Backend, found: tuple, expected: tuple, dtype: torch.dtype
) -> dict[str, float]:
    """Each output's error in units of its limit; whole numbers are equal (0) or not (inf)."""
    shares = {}
    for name, part, reference in zip(contract.outputs, found, expected, strict=True):
        if not part.is_floating_point():
            shares[name] = 0.0 if torch.equal(part, reference) else math.inf
        else:
            error, limit = relative_error(part, reference.to(part.device)), contract.allowed(dtype, name, backend)
            shares[name] = error / limit if limit else (0.0 if error == 0.0 else math.inf)
    return shares


def refusal(op: str, name: str, device: str) -> str | None:
    """Why the backend cannot serve any call here; the call is one of several tokens in a dtype that it takes."""
    backend = OPERATIONS[op].backends[name]
    dtypes = backend.requires.dtypes or ((torch.int64,) if op == "alignment" else (torch.bfloat16,))
    return backend.requires.refusal(Call(op, device, dtypes[0], 64, False, False, resolve_policy(backend.policy)))


def clock_of(device: str) -> Callable[[Callable[[], Any]], float]:
    """Microseconds of one call: between CUDA events with a cold cache, or of the processor."""
    if device == "cpu":

        def on_cpu(run: Callable[[], Any]) -> float:
            started = time.perf_counter()
            run()
            return 1e6 * (time.perf_counter() - started)

        return on_cpu
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def on_gpu(run: Callable[[], Any]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop)

    return on_gpu


def timed(runs: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, list[float]]:
    """Samples in microseconds of each side, interleaved; what a first call compiles is not among them."""
    clock, samples = clock_of(device), {name: [] for name in runs}

    def sample(name: str) -> Callable[[], None]:
        return lambda: samples[name].append(clock(runs[name]))

    warmup = 3
    with torch.inference_mode():
        interleave({name: sample(name) for name in runs}, rounds=rounds, warmup=warmup)
    return {name: found[warmup:] for name, found in samples.items()}


def held_to_its_contract(op: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The outcome of the conformance suite for one backend."""
    reason = refusal(op, name, options.device)
    if reason is not None:
        return {"op": op, "backend": name, "outcome": "refused", "reason": reason}
    cases = None if options.all_cases else CASES.get(op)
    dtypes = None if options.dtype is None or op == "alignment" else [getattr(torch, options.dtype)]
    started = time.perf_counter()
    found = conform(op, name, device=options.device, cases=cases, dtypes=dtypes)
    counts = found.counts().get("value against the arbiter", {})
    shares = (row.error / row.limit for row in found.rows if row.outcome == PASSED and row.error and row.limit)
    return {
        "op": op, "backend": name, "outcome": found.outcome, "reason": found.reason, "values": counts,
        "seconds": round(time.perf_counter() - started, 1), "share": max(shares, default=0.0),
        "failed_checks": len(found.failures), "failures": [str(row) for row in found.failures][:20],
    }  # fmt: skip


def at_real_shapes(
    op: str, names: Sequence[str], tokens: int, dtype: torch.dtype, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Each backend at the model's sizes: right or not, and where it is, its time beside ours."""
    contract, sizes = CONTRACTS[op], TINY if options.tiny else REAL
    given = contract.cast(real_calls(op, sizes, tokens), dtype, options.device)
    expected = called(contract, Kernels({op: "reference"}), contract.cast(given, torch.float64, options.device))
    runs: dict[str, Callable[[], Any]] = {}
    rows: list[dict[str, Any]] = []
    for name in names:
        kernels = Kernels({op: name})
        row = {"op": op, "backend": name, "tokens": tokens, "dtype": dtype_name(dtype)}
        rows.append(row)
        try:
            with torch.inference_mode():
                found = called(contract, kernels, given)
        except WorkbenchError as error:  # refused, or failed with the library's own text: both are the answer
            is_refused = "was asked for and cannot serve this call" in str(error)
            row |= {"outcome": "refused" if is_refused else "failed", "reason": one_line(str(error))}
            continue
        shares = errors(contract, OPERATIONS[op].backends[name], found, expected, dtype)
        is_right = max(shares.values()) <= 1.0
        row |= {"outcome": "right" if is_right else "wrong", "error_over_limit": shares, "ran": ran(kernels)}
        if is_right:
            runs[name] = lambda kernels=kernels: called(contract, kernels, given)
    if not runs:
        return rows
    automatic = Kernels()
    with torch.inference_mode():
        called(contract, automatic, given)
    own = next(row.backend for row in automatic.attestation() if row.op == op)
    beside = ", ".join(runs)
    samples = timed(runs | {"ours": lambda: called(contract, automatic, given)}, options.device, options.rounds)
    ours_us, ours_iqr_us = spread(samples["ours"])
    for row in rows:
        if row["backend"] in runs:
            median, iqr = spread(samples[row["backend"]])
            row |= {
                "us": median, "iqr_us": iqr, "n": len(samples["ours"]), "ours": own, "ours_us": ours_us,
                "ours_iqr_us": ours_iqr_us, "ours_over_it": ours_us / median, "beside": beside,
                "ours_ran": ran(automatic),
            }  # fmt: skip
    return rows


def ran(kernels: Kernels) -> list[str]:
    """What served the ops, as attested."""
    return [f"{row.op}={row.backend}" for row in kernels.attestation()]


def dtypes_of(op: str, names: Iterable[str]) -> dict[torch.dtype, list[str]]:
    """The dtypes to call an op in, with the backends: bfloat16, and float16 for those that do not take it."""
    taken = {name: OPERATIONS[op].backends[name].requires.dtypes for name in names}
    found = {
        torch.bfloat16: [name for name, dtypes in taken.items() if not dtypes or torch.bfloat16 in dtypes],
        torch.float16: [n for n, dtypes in taken.items() if torch.float16 in dtypes and torch.bfloat16 not in dtypes],
    }
    return {dtype: of_dtype for dtype, of_dtype in found.items() if of_dtype}


def result_rows(rows: Iterable[dict[str, Any]]) -> list[bench.Row]:
    """Rows of a result file: times of the library and of ours beside it, errors, and counts of the contract."""
    found: dict[tuple[str, str, str], bench.Row] = {}

    def add(case: str, backend: str, unit: str, median: float, iqr: float, n: int, attested: Sequence[str] = ()):
        found[case, backend, unit] = bench.Row(case, backend, unit, median, iqr, n, None, tuple(attested))

    for row in rows:
        case, name = case_of(row), row["backend"]
        if "tokens" not in row:
            if row.get("values"):
                add(case, name, "values right", row["values"]["passed"], 0.0, 1)
                add(case, name, "failed checks", row["failed_checks"], 0.0, 1)
            continue
        if row["outcome"] == "right":
            add(case, name, "error over its limit", max(row["error_over_limit"].values()), 0.0, 1, row["ran"])
        if "us" in row:
            add(case, name, "us", row["us"], row["iqr_us"], row["n"], row["ran"])
            add(case, f"{row['ours']} (beside {row['beside']})", "us", row["ours_us"], row["ours_iqr_us"], row["n"],
                row["ours_ran"])  # fmt: skip
    return list(found.values())


def case_of(row: dict[str, Any]) -> str:
    if "tokens" not in row:
        return f"{row['op']}: contract"
    return f"{row['op']}, {row['tokens']} token{'' if row['tokens'] == 1 else 's'}, {row['dtype']}"


def without_a_time(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Case and backend -> what was refused, failed or wrong, with the reason."""
    return {
        f"{case_of(row)}: {row['backend']}": f"{row['outcome']}: {row.get('reason') or row.get('error_over_limit')}"
        for row in rows if row["outcome"] in ("refused", "failed", "wrong")
    }  # fmt: skip


def worst_share(rows: Iterable[dict[str, Any]]) -> float:
    """The value of METRIC."""
    shares = [row.get("share", 0.0) for row in rows]
    shares += [max(row["error_over_limit"].values()) for row in rows if row["outcome"] == "right"]
    return max(shares, default=0.0)


def installed_peers() -> list[str]:
    found = []
    for name in PEERS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def shown(row: dict[str, Any]) -> str:
    """One line of the report."""
    place = f"{row['op']:<17} {row['backend']:<14}"
    if "tokens" not in row:
        values = row.get("values")
        served = f" {values['passed']} values right in {row['seconds']} s" if values else ""
        return f"{place} {row['outcome']}{served}{': ' + row['reason'][:600] if row['reason'] else ''}"
    text = f"{place} {row['tokens']:>6} tokens {row['dtype']:<9} {row['outcome']}"
    if "error_over_limit" in row:
        text += " " + ", ".join(f"{name} {share:.2g} of its limit" for name, share in row["error_over_limit"].items())
    if "us" in row:
        text += f"; {row['us']:.1f} us (iqr {row['iqr_us']:.1f}), {row['ours']} {row['ours_us']:.1f} us, ratio "
        text += f"{row['ours_over_it']:.2f}"
    return text + (": " + row["reason"][:600] if row.get("reason") else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--op", action="append", choices=sorted(OPERATIONS), help="only this op; may be repeated")
    parser.add_argument("--backend", action="append", choices=FOREIGN, help="only this backend; may be repeated")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2048], help="of the calls at real shapes")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each side (default 30)")
    parser.add_argument("--all-cases", action="store_true", help="every case of the contracts, not those of CASES")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the contract, only this one: "
                        "fewer kernels to compile; the real shapes stay as they are")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small sizes in the place of the model's")
    parser.add_argument("--skip-contract", action="store_true", help="only the real shapes")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the result file into this folder")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("library_conformance: expected a CUDA device, found none; next: --device cpu, which shows the refusals",
              file=sys.stderr)  # fmt: skip
        return 2
    kept = None if options.out is None else unfinished(options)
    rows: list[dict[str, Any]] = []

    def over(key: str, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The rows of one part, kept as soon as they are there; not measured again where a stopped run has them."""
        found = kept.done[key] if kept is not None and key in kept.done else measure()
        if kept is not None and key not in kept.done:
            kept.add(key, found)
        rows.extend(found)
        for row in found:
            print(shown(row), flush=True)
        return found

    for op, operation in OPERATIONS.items():
        if options.op and op not in options.op:
            continue
        present = []
        for name in operation.backends:
            if name not in (options.backend or FOREIGN) or name not in FOREIGN:
                continue
            if options.skip_contract and refusal(op, name, options.device) is None:
                present.append(name)
                continue
            (row,) = over(f"{op}: {name}", lambda op=op, name=name: [held_to_its_contract(op, name, options)])
            if row["outcome"] != "refused" or row.get("values"):
                present.append(name)
        for tokens in options.tokens:
            for dtype, names in dtypes_of(op, present).items():
                over(
                    f"{op}: {tokens} in {dtype_name(dtype)}",
                    lambda op=op, names=names, tokens=tokens, dtype=dtype: at_real_shapes(
                        op, names, tokens, dtype, options
                    ),
                )
    if kept is not None:
        finish(rows, kept, options)
    return int(any(row["outcome"] in ("failed", "wrong") for row in rows))


def unfinished(options: argparse.Namespace) -> bench.Unfinished:
    """What a stopped run of the same command, commit, versions and device has left in the folder."""
    head, dirty = commit(ROOT)
    measured = {name: value for name, value in vars(options).items() if name != "out"} | {
        "commit": head, "dirty": dirty, "hardware": bench.hardware(options.device),
        "versions": {name: metadata.version(name) for name in installed_peers()},
    }  # fmt: skip
    return bench.Unfinished(options.out, NAME, measured, lambda line: print(line, file=sys.stderr))


def finish(rows: list[dict[str, Any]], kept: bench.Unfinished, options: argparse.Namespace) -> None:
    """Write the result file; without a row that was served there is none, and what is kept goes."""
    found = result_rows(rows)
    if found:
        clock = "CUDA events around single calls, second-level cache flushed" if options.device == "cuda" else "wall"
        path = bench.write_result(
            options.out, NAME, bench.Correctness(METRIC, worst_share(rows), 1.0), found, project=ROOT,
            device=options.device, peers=installed_peers(),
            conditions={
                "clock": clock, "shape": TINY if options.tiny else REAL, "not_timed": without_a_time(rows),
            },
        )  # fmt: skip
        print(path)
    else:
        print("library_conformance: no backend served a call: no result file", file=sys.stderr)
    kept.remove()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
