"""What every preset policy does to the miniature: errors, text, conversations, and prefill against decode.

    python benchmarks/policy_verdicts.py

Per preset, in float32: relative error of output and state against the float64 oracle in the worst layer, the largest
share of an output that is not finite, and whether a clamp binds, on the inputs of the first 512 held-out tokens;
perplexity over 20 held-out windows; 20 dialogues and 20 recalls; and how far the logits of one prefill are from those
of decode steps. A figure that is not finite has no row. The gate: the safe policy's error. A policy that is done is
kept in OUT until all are, so that the same command goes on after an interruption. Writes
benchmarks/results/policy_verdicts.cpu.json.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

import workbench
from workbench import bench, quality
from workbench.analysis import parity, policies, runs
from workbench.errors import WorkbenchError
from workbench.model import CausalLM
from workbench.numerics import CATALOGUE
from workbench.provenance import checkpoint_hash, commit
from workbench.tokenizer import Tokenizer
from workbench.training.corpus import sha256_of_file

ROOT = Path(__file__).resolve().parent.parent
NAME = policies.RECORDED
TEXTS = ("dialogues.jsonl", "recall.jsonl", "heldout.jsonl")
PROMPT_TOKENS, WINDOWS = 512, 20
LIMIT = 3e-6


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(model: CausalLM, tokenizer: Tokenizer, tensors: Mapping[str, Tensor], policy: str) -> list[dict]:
    """The rows of one preset, as fields of `bench.Row`."""
    started = time.monotonic()
    op = policies.verdicts(model, tokenizer, tensors, [policy], windows=WINDOWS).iloc[0]
    error = parity.worst_errors(parity.delta_rule_errors(tensors, [policy])).iloc[0]
    whole = policies.answers(model, tokenizer, [policy]).iloc[0]
    figures = [
        ("error of the output", "relative, Frobenius", error["error_out"], PROMPT_TOKENS),
        ("error of the state", "relative, Frobenius", error["error_state"], PROMPT_TOKENS),
        ("output not finite", "share", op["bad_out"], PROMPT_TOKENS),
        ("perplexity", "1", op["perplexity"], 512 * WINDOWS),
        (policies.RECORDED_CASES["dialogues"], "share", whole["dialogues"], 20),
        (policies.RECORDED_CASES["recall"], "share", whole["recall"], 20),
        (policies.RECORDED_CASES["divergence"], "share of the largest logit", whole["divergence"],
         policies.DIVERGENCE_TOKENS),
        ("time of all", "s", time.monotonic() - started, 1),
    ]  # fmt: skip
    if CATALOGUE[policy].policy.clamps:
        figures.append(("a clamp binds", "1 yes, 0 no", float(op["binds"]), PROMPT_TOKENS))
    return [
        dataclasses.asdict(bench.Row(what, policy, unit, float(value), 0.0, count))
        for what, unit, value, count in figures
        if math.isfinite(value)
    ]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "data" / "miniature")
    parser.add_argument("--policies", nargs="+", choices=CATALOGUE, default=list(CATALOGUE), metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    bench.pin_threads(options.threads)
    model = workbench.load(options.checkpoint, dtype="float32")
    tokenizer = Tokenizer.from_directory(options.checkpoint)
    prompt = quality.heldout_tokens(tokenizer, windows=1, length=PROMPT_TOKENS)[:PROMPT_TOKENS].tolist()
    safe = runs.run_prompt(
        model, runs.as_input(model, prompt, PROMPT_TOKENS), "safe", keep=parity.KEEP_DELTA_RULE_INPUTS
    )
    errors = parity.worst_errors(parity.delta_rule_errors(safe.trace.tensors, ["safe"]))
    largest = float(errors[["error_out", "error_state"]].max(axis=None, skipna=False))
    correctness = bench.Correctness("relative error of the safe policy against the float64 oracle", largest, LIMIT)
    correctness.check()

    measured = {
        "commit": commit(ROOT)[0], "checkpoint": checkpoint_hash(options.checkpoint),
        "data": {name: sha256_of_file(ROOT / "data" / name) for name in TEXTS},
    }  # fmt: skip
    kept = bench.Unfinished(options.out, NAME, measured, say)
    for policy in options.policies:
        if policy not in kept.done:
            say(policy)
            kept.add(policy, measure(model, tokenizer, safe.trace.tensors, policy))
        figures = ", ".join(f"{row['case']} {row['median']:.3g}" for row in kept.done[policy])
        print(f"{policy:24} {figures}", flush=True)
    rows = [bench.Row(**row) for policy in options.policies for row in kept.done[policy]]
    path = bench.write_result(
        options.out, NAME, correctness, rows, project=ROOT,
        conditions={"dtype": "float32", "checkpoint": measured["checkpoint"]},
    )  # fmt: skip
    kept.remove()
    print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (WorkbenchError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
