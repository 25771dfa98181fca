"""Checks for NaN: what the sampled one misses, by extent and position of the fault, and what each costs.

    python benchmarks/nan_checks.py [--trials 100] [--rounds 7]

Miss rates: faults of six extents laid at six positions into the output of a gated delta rule at the heads of the 35B
model; and the tensors of a real pass of the miniature that the factored exponents make NaN, its prompt the held-out
text. Costs: of each check on outputs of one and of many tokens, and of tracing a whole pass with it. The gate: the
exact check misses no fault. Writes benchmarks/results/nan_checks.cpu.json.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import workbench
from workbench import bench
from workbench.analysis.nan_checks import EXTENTS, miss_rates, missed_in_pass
from workbench.analysis.runs import using_policy
from workbench.errors import WorkbenchError
from workbench.model import CausalLM
from workbench.tokenizer import Tokenizer
from workbench.tracing import trace
from workbench.tracing.checks import CHECKS, check_exact, check_sampled
from workbench.training.corpus import read_documents

ROOT = Path(__file__).resolve().parent.parent
NAME = "nan_checks"
HEADS, WIDTH = 32, 128
#: Tokens of the outputs in which faults are laid: a decode step, a prompt.
MISS_TOKENS = (1, 512)
#: Tokens of the outputs that are checked against the clock: a decode step, a chunk, a prompt.
TOKENS = (1, 64, 2048)


def three_passes(x: Tensor) -> Tensor:
    """What the sampled check was brought in for: isnan, then the share and a replacement where any is found."""
    if torch.isnan(x).any():
        torch.isnan(x).float().mean().item()
        return x.nan_to_num(nan=0.0)
    return x


#: What is timed on one tensor.
TIMED: dict[str, Callable[[Tensor], object]] = {
    "exact (smallest and largest value)": check_exact,
    "sampled (64 + 64 values)": check_sampled,
    "isnan(x).any()": lambda x: bool(torch.isnan(x).any()),
    "isfinite(x).all()": lambda x: bool(torch.isfinite(x).all()),
    "isnan, share, nan_to_num": three_passes,
    "all statistics": CHECKS["statistics"],
}


def cost_rows(rounds: int) -> list[bench.Row]:
    """Without a NaN, as nearly always; and of the longest output with one in the middle, which then is counted."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, has_nan in (*((tokens, False) for tokens in TOKENS), (TOKENS[-1], True)):
            x = torch.randn(1, tokens, HEADS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
            if has_nan:
                x[0, tokens // 2, HEADS // 2, 0] = torch.nan
            repeats = max(1, 200 // tokens)

            def run(check: Callable[[Tensor], object], x: Tensor = x, repeats: int = repeats) -> None:
                for _ in range(repeats):
                    check(x)

            samples = bench.interleave({name: partial(run, check) for name, check in TIMED.items()}, rounds=rounds)
            case = f"cost on {tokens} x {HEADS} x {WIDTH} values of {str(dtype).removeprefix('torch.')}"
            case += ", one NaN" if has_nan else ""
            for name, seconds in samples.items():
                rows.append(bench.Row.of(case, name, "us", [1e6 * s / repeats for s in seconds]))
    return rows


def read_ids(checkpoint: Path, count: int) -> Tensor:
    tokenizer = Tokenizer.from_directory(checkpoint)
    ids: list[int] = []
    for document in read_documents(ROOT / "data" / "heldout.jsonl"):
        ids += tokenizer.encode(document.text)
        if len(ids) >= count:
            break
    return torch.tensor([ids[:count]])


def traced(model: CausalLM, ids: Tensor, check: str) -> object:
    with trace(model, check=check) as seen:
        model(ids, use_cache=False)
    return seen.table


def pass_rows(model: CausalLM, ids: Tensor, rounds: int) -> tuple[list[bench.Row], float]:
    """Costs of tracing a pass, then the bad tensors of a pass that overflows; and how many the exact check missed."""
    runs: dict[str, Callable[[], object]] = {"no trace": lambda: model(ids, use_cache=False)}
    runs |= {f"trace, {check}": partial(traced, model, ids, check) for check in CHECKS}
    samples = bench.interleave(runs, rounds=rounds, warmup=1)
    case = f"cost of a traced pass of {ids.shape[1]} tokens of the miniature"
    rows = [bench.Row.of(case, name, "ms", [1e3 * s for s in seconds]) for name, seconds in samples.items()]
    with using_policy(model, "factored"):
        full, exact, sampled = (traced(model, ids, check) for check in ("statistics", "exact", "sampled"))
    found = missed_in_pass(exact, sampled)
    bad = (full[["frac_nan", "frac_pinf", "frac_ninf"]].sum(axis=1) > 0).sum()
    case = f"bad tensors of a pass of {ids.shape[1]} tokens under policy factored"
    rows += [
        bench.Row(case, "exact", "tensors missed", float(bad - len(found)), 0.0, int(bad)),
        bench.Row(case, "sampled", "tensors missed", float(found["missed"].sum()), 0.0, len(found)),
    ]
    return rows, float(bad - len(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "data" / "miniature")
    parser.add_argument("--trials", type=int, default=100, help="places of a fault of each extent and position")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the traced pass")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    bench.pin_threads(1)
    rows, missed_by_exact = [], 0.0
    for tokens in MISS_TOKENS:
        table = miss_rates((1, tokens, HEADS, WIDTH), trials=arguments.trials)
        missed_by_exact += float(table["exact"].sum())
        for row in table.itertuples():
            case = f"fault in 1 x {tokens} x {HEADS} x {WIDTH}: {EXTENTS[row.extent].what}, {row.position}"
            said = [f"bad values={row.values}", f"share={row.share:.2g}"]
            for check in ("exact", "sampled"):
                share = getattr(row, check)
                rows.append(bench.Row(case, check, "share missed", share, 0.0, row.places, attested=said))
    model = workbench.load(arguments.checkpoint, dtype="float32")
    more, missed = pass_rows(model, read_ids(arguments.checkpoint, arguments.tokens), arguments.rounds)
    rows += [*more, *cost_rows(arguments.rounds)]
    for row in rows:
        if row.backend != "exact" or row.unit != "share missed":
            print(f"{row.case:86} {row.backend:36} {row.median:10.3f} {row.unit}, IQR {row.iqr:.3f}, n {row.n}")
    correctness = bench.Correctness("faults that the exact check missed", missed_by_exact + missed, 0.0)
    print(bench.write_result(arguments.out, NAME, correctness, rows, project=ROOT))
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        try:
            sys.exit(main())
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
