"""Prefill and decode of one checkpoint, by the workbench and by transformers, in one process on one thread.

    python benchmarks/prefill_decode_vs_transformers.py [--checkpoint data/miniature] [--rounds 9]

Both read the same held-out text in fp32 and give the same number of logits. Before anything is timed their
logits are compared: the limit is the larger of 2e-5 and 1.5 times what transformers' own prefill and decode
differ by on that text. Tap points are compiled in and nobody observes. Writes
benchmarks/results/prefill_decode_vs_transformers.cpu.json.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from torch import Tensor

import workbench
from workbench import bench
from workbench.errors import InputError, WorkbenchError
from workbench.kernels.agreement import logit_difference
from workbench.model import CausalLM
from workbench.tokenizer import Tokenizer
from workbench.training.corpus import read_documents

ROOT = Path(__file__).resolve().parent.parent
NAME = "prefill_decode_vs_transformers"
PEER_CLASSES = {
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "data" / "miniature")
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "heldout.jsonl")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prefill")
    parser.add_argument("--decode", type=int, default=128, help="tokens decoded, each with a call of its own")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in the cache before decoding")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def read_ids(checkpoint: Path, text: Path, count: int) -> Tensor:
    """The first `count` tokens of the documents, [1, count]."""
    tokenizer = Tokenizer.from_directory(checkpoint)
    ids: list[int] = []
    for document in read_documents(text):
        ids += tokenizer.encode(document.text)
        if len(ids) >= count:
            return torch.tensor([ids[:count]])
    raise InputError(f"{text}: expected at least {count} tokens, found {len(ids)}")


class Workbench:
    """Our side: one prefill, or a prefill and a call for each further token."""

    def __init__(self, model: CausalLM):
        self.model = model

    def prefill(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits

    def decode(self, cache: object, ids: Tensor) -> Tensor:
        logits = []
        for t in range(ids.shape[1]):
            out = self.model(ids[:, t : t + 1], cache=cache)
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    def cache(self, ids: Tensor) -> object:
        return self.model(ids).cache

    def attested(self, tokens: str) -> list[str]:
        return [row.in_words() for row in self.model.kernels.attestation() if row.tokens == tokens]


class Transformers:
    """The other side, as it comes: sdpa attention and its own choice of experts."""

    def __init__(self, checkpoint: Path, family: str):
        peer_class = getattr(transformers, PEER_CLASSES[family])
        self.model = peer_class.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def prefill(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=True).logits

    def decode(self, cache: object, ids: Tensor) -> Tensor:
        logits = []
        for t in range(ids.shape[1]):
            logits.append(self.model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
        return torch.cat(logits, dim=1)

    def cache(self, ids: Tensor) -> object:
        return self.model(ids, use_cache=True).past_key_values

    def attested(self) -> list[str]:
        config = self.model.config
        return [f"attention={config._attn_implementation}", f"experts={config._experts_implementation}"]


def check(ours: Workbench, theirs: Transformers, ids: Tensor, prompt: int, decode: int) -> bench.Correctness:
    """Largest difference of the logits in prefill and decode, against transformers' single prefill."""
    expected = theirs.prefill(ids)
    part, rest = ids[:, :prompt], ids[:, prompt : prompt + decode]
    decoded = expected[:, prompt : prompt + decode]
    own_gap = logit_difference(theirs.decode(theirs.cache(part), rest), decoded)
    difference = max(
        logit_difference(ours.prefill(ids), expected),
        logit_difference(ours.decode(ours.cache(part), rest), decoded),
    )
    metric = f"max |logit difference| / max |logit| (transformers' own prefill-decode gap: {own_gap:.2e})"
    return bench.Correctness(metric, difference, max(2e-5, 1.5 * own_gap))


@torch.inference_mode()
def main() -> int:
    arguments = parse_arguments()
    bench.pin_threads(1)
    keeps_memory = bench.keep_freed_memory()
    model = workbench.load(arguments.checkpoint, dtype="float32")
    ours = Workbench(model)
    theirs = Transformers(arguments.checkpoint, model.config.family)
    count = max(arguments.prefill, arguments.prompt + arguments.decode)
    ids = read_ids(arguments.checkpoint, arguments.text, count)
    prefill_ids = ids[:, : arguments.prefill]
    prompt, rest = ids[:, : arguments.prompt], ids[:, arguments.prompt : arguments.prompt + arguments.decode]

    correctness = check(ours, theirs, ids, arguments.prompt, arguments.decode)
    correctness.check()
    print(f"{correctness.metric}: {correctness.value:.2e}, limit {correctness.limit:.2e}")

    model.kernels.reset_attestation()
    prefill = bench.interleave(
        {
            "workbench": lambda: ours.prefill(prefill_ids),
            "transformers": lambda: theirs.prefill(prefill_ids),
        },
        rounds=arguments.rounds,
    )
    attested_prefill = ours.attested("2 and more")
    # Caches are made outside the measured time; decoding changes them, so each run has a new one.
    fresh = {"workbench": [], "transformers": []}
    for _ in range(arguments.rounds + 2):
        fresh["workbench"].append(ours.cache(prompt))
        fresh["transformers"].append(theirs.cache(prompt))
    decode = bench.interleave(
        {
            "workbench": lambda: ours.decode(fresh["workbench"].pop(), rest),
            "transformers": lambda: theirs.decode(fresh["transformers"].pop(), rest),
        },
        rounds=arguments.rounds,
    )
    attested = {"workbench": (attested_prefill, ours.attested("1")), "transformers": (theirs.attested(),) * 2}

    rows = []
    cases = (
        (f"prefill of {arguments.prefill} tokens, {arguments.prefill} logits", "ms", 1e3, prefill, 0),
        (f"decode after {arguments.prompt} tokens", "ms per token", 1e3 / arguments.decode, decode, 1),
    )
    for case, unit, factor, samples, phase in cases:
        for side, seconds in samples.items():
            scaled = [factor * s for s in seconds]
            rows.append(bench.Row.of(case, side, unit, scaled, attested=attested[side][phase]))
        ratios = [b / a for a, b in zip(samples["workbench"], samples["transformers"], strict=True)]
        rows.append(bench.Row.of(case, "transformers / workbench", "ratio of one round", ratios))
    for row in rows:
        print(f"{row.case:42} {row.backend:26} {row.median:9.3f} {row.unit}, IQR {row.iqr:.3f}, n {row.n}")
    path = bench.write_result(
        arguments.out, NAME, correctness, rows, project=ROOT, peers=("transformers",),
        conditions={"keeps_freed_memory": keeps_memory, "dtype": "float32"},
    )  # fmt: skip
    print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
