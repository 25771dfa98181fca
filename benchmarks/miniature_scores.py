"""Scores of the miniature as it is, and destroyed in the ways of `tracing.FIELD_INTERVENTIONS`.

    python benchmarks/miniature_scores.py [--subset 200]

Dialogue, recall, perplexity and draft acceptance, and the time that each took: of the intact model; with the mixer of
each linear layer zeroed; with NaN replaced under the factored form; and with the cumulative log decay clamped to +-12.
The gate: an intervention that changes nothing changes no bit of the logits. A case that is done is kept in OUT until
all are, so that the same command goes on after an interruption. Writes benchmarks/results/miniature_scores.cpu.json.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import workbench
from workbench import bench, quality
from workbench.analysis.runs import using_policy
from workbench.config import ModelConfig
from workbench.dialogue import Dialogue, fixed_dialogues, fixed_recalls
from workbench.errors import WorkbenchError
from workbench.kernels.agreement import logit_difference
from workbench.model import CausalLM
from workbench.provenance import checkpoint_hash, commit
from workbench.tokenizer import Tokenizer
from workbench.tracing import FIELD_INTERVENTIONS, intervene
from workbench.training.corpus import sha256_of_file

ROOT = Path(__file__).resolve().parent.parent
NAME = "miniature_scores"
TEXTS = ("dialogues.jsonl", "recall.jsonl", "heldout.jsonl")


@dataclass(frozen=True)
class Case:
    """A way to run the model: `changes` is the argument of `intervene`, empty for the intact one."""

    name: str
    policy: str
    changes: Mapping


def cases(config: ModelConfig) -> Iterator[Case]:
    yield Case("intact", "safe", {})
    for name, entry in FIELD_INTERVENTIONS.items():
        if name == "zero_linear_layer":
            for layer, kind in enumerate(config.layer_types):
                if kind == "linear_attention":
                    yield Case(f"{name} {layer}", entry.policy, entry.changes(layer))
        else:
            yield Case(name, entry.policy, entry.changes())


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(model: CausalLM, tokenizer: Tokenizer, case: Case, subset: int, data: Path) -> list[dict]:
    """The rows of one case, as fields of `bench.Row`."""
    tokens = quality.heldout_tokens(tokenizer, windows=20 if subset == 20 else None, data=data)
    dialogues = fixed_dialogues(subset, data)
    recalls = fixed_recalls(20 if subset == 20 else 100, data)

    def replies(of: list[Dialogue]) -> quality.DialogueScore:
        return quality.dialogue_score(model, tokenizer, of, progress=lambda line: say(f"  {line}"))

    scores = {
        "dialogue": lambda: replies(dialogues),
        "recall": lambda: replies(recalls),
        "perplexity": lambda: quality.perplexity(model, tokens, tokenizer=tokenizer),
        "drafts": lambda: quality.draft_acceptance(model, tokens),
    }
    found, seconds = {}, {}
    with using_policy(model, case.policy), intervene(model, case.changes) as done:
        for name, score in scores.items():
            started = time.monotonic()
            found[name] = score()
            seconds[name] = time.monotonic() - started
    dialogue, recall, perplexity, drafts = found.values()
    figures = [
        ("dialogues right", "share", dialogue.share, dialogue.asked),
        ("recall right", "share", recall.share, recall.asked),
        ("perplexity", "1", perplexity.perplexity, perplexity.predicted),
        ("negative log-likelihood", "nats per byte", perplexity.nats_per_byte, perplexity.predicted),
        ("drafts accepted", "share", drafts.rate, drafts.proposed),
        *((f"time of {name}", "s", value, 1) for name, value in seconds.items()),
    ]
    attested = [f"policy={case.policy}", *str(done).splitlines()]
    return [
        dataclasses.asdict(bench.Row(what, case.name, unit, value, 0.0, count, attested=attested))
        for what, unit, value, count in figures
    ]


def no_change(model: CausalLM) -> bench.Correctness:
    """The gate: what an intervention that returns every tensor as it came does to the logits."""
    ids = torch.arange(200)[None] % model.config.vocab_size
    plain = model(ids, use_cache=False).logits
    with intervene(model, {"*": lambda x: x}):
        changed = model(ids, use_cache=False).logits
    metric = "max |logit difference| / max |logit| under an intervention that changes nothing"
    return bench.Correctness(metric, logit_difference(changed, plain), 0.0)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "data" / "miniature")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help=f"folder of {', '.join(TEXTS)}")
    parser.add_argument("--subset", type=int, choices=(20, 200), default=20, help="dialogues; 200 takes all text too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    bench.pin_threads(options.threads)
    model = workbench.load(options.checkpoint, dtype="float32")
    tokenizer = Tokenizer.from_directory(options.checkpoint)
    correctness = no_change(model)
    correctness.check()

    measured = {
        "commit": commit(ROOT)[0], "checkpoint": checkpoint_hash(options.checkpoint), "subset": options.subset,
        "data": {name: sha256_of_file(options.data / name) for name in TEXTS},
    }  # fmt: skip
    kept = bench.Unfinished(options.out, NAME, measured, say)
    for case in cases(model.config):
        if case.name not in kept.done:
            say(f"{case.name}, policy {case.policy}")
            started = time.monotonic()
            kept.add(case.name, measure(model, tokenizer, case, options.subset, options.data))
            say(f"  {time.monotonic() - started:.0f} s")
        figures = ", ".join(f"{row['case']} {row['median']:.4g}" for row in kept.done[case.name])
        print(f"{case.name:22} {figures}", flush=True)
    rows = [bench.Row(**row) for case_rows in kept.done.values() for row in case_rows]
    path = bench.write_result(
        options.out, NAME, correctness, rows, project=ROOT,
        conditions={"dtype": "float32", "checkpoint": measured["checkpoint"], "subset": options.subset},
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
