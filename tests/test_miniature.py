"""The trained miniature is what its card says: small, trained, with gates from long memory to past the fp32 limit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench
from workbench.analysis.gates import gate_table
from workbench.analysis.language import unigram_perplexity
from workbench.numerics import EXP_OVERFLOW
from workbench.quality import draft_acceptance, perplexity, windows
from workbench.tokenizer import Tokenizer
from workbench.training.corpus import read_documents
from workbench.training.tokenize import encode_documents, read_tokenizer
from workbench.training.train import MINIATURE

DATA = Path(__file__).parent.parent / "data"
MINIATURE_PATH = DATA / "miniature"


@pytest.fixture(scope="module")
def model():
    return workbench.load(MINIATURE_PATH, dtype="float32")


@pytest.fixture(scope="module")
def heldout() -> np.ndarray:
    """The held-out text as token ids, a separator after each document."""
    return encode_documents(read_tokenizer(MINIATURE_PATH), read_documents(DATA / "heldout.jsonl"))[0]


def test_weights_take_at_most_12_megabytes_in_bf16():
    assert (MINIATURE_PATH / "model.safetensors").stat().st_size <= 12_000_000


def test_configuration_is_the_one_that_the_training_command_has(model):
    assert model.config == MINIATURE


def test_every_tensor_and_byte_is_accounted_for(model):
    totals = model.checkpoint_accounting.totals
    assert {kind for kind, (tensors, _) in totals.items() if tensors} == {"loaded"}
    stored = {row.canonical: row.dtype for row in model.checkpoint_accounting.rows}
    wide = {name for name, dtype in stored.items() if dtype == "F32"}
    assert wide == {name for name in stored if name.endswith(("A_log", "linear_attn.norm.weight"))}
    assert set(stored.values()) == {"F32", "BF16"}


def test_heldout_perplexity_is_under_half_of_the_best_unigram_model(model, heldout):
    """The unigram model is fitted to the held-out text itself, so none can be better."""
    found = perplexity(model, heldout)
    unigram = unigram_perplexity(heldout, heldout, vocab_size=model.config.vocab_size)
    recorded = json.loads((MINIATURE_PATH / "training.json").read_text())
    print(f"held-out perplexity {found.perplexity:.2f}, unigram fitted to the same text {unigram:.1f}")
    assert found.perplexity < 0.5 * unigram < 0.5 * recorded["unigram_perplexity"]
    assert found.predicted == recorded["heldout_predicted_tokens"]
    assert found.perplexity == pytest.approx(recorded["heldout_perplexity"], rel=2e-3)


def test_heldout_draft_acceptance_is_as_recorded(model, heldout):
    found = draft_acceptance(model, heldout[: 16 * 512 + 1])
    recorded = json.loads((MINIATURE_PATH / "training.json").read_text())["draft_acceptance"]
    print(f"held-out draft acceptance {found.rate:.1%} of {found.proposed} drafts")
    assert found.rate == pytest.approx(recorded, abs=0.04)  # a part of the text that the record covers
    assert found.rate >= 0.5


def test_trained_heads_range_from_long_memory_to_past_the_float32_exponent(model, heldout):
    with workbench.trace(model, keep=["*.gdn.log_decay"]) as trace, torch.inference_mode():
        model(torch.from_numpy(heldout[:2048].astype(np.int64))[None])
    spans = [
        log_decay[0].double().unflatten(0, (-1, 64)).sum(1).neg()  # [chunks, V], |G| over each chunk of 64
        for log_decay in trace.tensors.values()
    ]
    spans = torch.cat(spans, dim=1)
    assert spans.shape == (32, 24)
    assert int((spans.max(0).values > EXP_OVERFLOW["float32"]).sum()) >= 2  # forget everything within a chunk
    assert int((spans.median(0).values < 1.0).sum()) >= 6  # keep more than a third of everything over a chunk
    table = gate_table(trace.tensors)
    assert table["span_max"].max() == pytest.approx(spans.max().item(), rel=1e-6)


def test_every_expert_of_every_layer_serves_some_heldout_token(model, heldout):
    used = torch.zeros(len(model.layers), model.config.num_experts, dtype=torch.bool)
    for rows in windows(heldout, 512)[:20].split(4):
        with workbench.trace(model, keep=["layers.*.moe.logits"]) as trace, torch.inference_mode():
            model(rows[:, :-1], use_cache=False)
        for index, logits in enumerate(trace.tensors.values()):
            used[index, logits.topk(model.config.num_experts_per_tok, dim=-1).indices.flatten()] = True
    assert bool(used.all()), (~used).nonzero().tolist()


def test_it_writes_words_of_its_corpus(model):
    tokenizer = Tokenizer.from_directory(MINIATURE_PATH)
    prompt = torch.tensor([tokenizer.encode("And the king said unto")])
    out = model.generate(prompt, max_new_tokens=40, temperature=0.8, top_p=0.9, seed=1)
    words = tokenizer.decode(out.sequences[0]).split()
    corpus = set((DATA / "heldout.jsonl").read_text(encoding="utf-8").replace("\\n", " ").split())
    assert len(words) >= 10 and np.mean([word in corpus for word in words]) > 0.7, words
