"""Perplexity and draft acceptance against a model whose answers are known beforehand."""

import dataclasses
import math

import models
import numpy as np
import pytest
import torch

from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.model import CausalLM
from workbench.quality import draft_acceptance, perplexity, windows


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(ModelConfig.from_hf(models.mini())).init_weights(3).eval()


def test_windows_are_consecutive_and_share_their_border_token():
    rows = windows(np.arange(11, dtype=np.uint16), 5)
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    assert rows.dtype == torch.int64


def test_too_few_tokens_for_one_window_is_an_error():
    with pytest.raises(InputError, match="expected at least 6 for one window, found 5"):
        windows(np.arange(5), 5)


def test_perplexity_of_a_model_without_opinion_is_the_vocabulary(model):
    with torch.no_grad():
        flat = CausalLM(model.config).init_weights(3).eval()
        flat.lm_head.weight.zero_()
    tokens = np.random.default_rng(0).integers(0, 97, size=301)
    found = perplexity(flat, tokens, length=50)
    assert found.perplexity == pytest.approx(97.0, rel=1e-6)
    assert found.predicted == 300


def test_perplexity_is_that_of_each_window_read_by_itself(model):
    tokens = np.random.default_rng(1).integers(0, 97, size=101)
    losses = []
    for row in windows(tokens, 20):
        log_probabilities = model(row[None, :-1], use_cache=False).logits.double().log_softmax(-1)[0]
        losses += [-log_probabilities[t, row[t + 1]].item() for t in range(20)]
    found = perplexity(model, tokens, length=20, batch=3).perplexity
    assert found == pytest.approx(math.exp(np.mean(losses)), rel=1e-7)  # fp32 products of another batch size


def test_drafts_that_repeat_the_main_choice_are_all_accepted(model, monkeypatch):
    tokens = np.random.default_rng(2).integers(0, 97, size=81)

    def oracle(hidden, next_ids):
        # What the main model says after one more token, which is what a draft tries to foresee.
        row = next(r for r in windows(tokens, 40).tolist() if r[1:-1] == next_ids[0].tolist())
        return model(torch.tensor([row[:-1]]), use_cache=False).logits[:, 1:]

    monkeypatch.setattr(model, "mtp_logits", oracle)
    found = draft_acceptance(model, tokens, length=40, batch=1)
    assert (found.accepted, found.proposed, found.rate) == (78, 78, 1.0)


def test_a_random_head_is_rarely_right(model):
    tokens = np.random.default_rng(3).integers(0, 97, size=161)
    assert draft_acceptance(model, tokens, length=40).rate < 0.5


def test_a_model_without_the_head_is_refused():
    config = dataclasses.replace(ModelConfig.from_hf(models.mini()), mtp_num_hidden_layers=0)
    with pytest.raises(InputError, match="multi-token-prediction head"):
        draft_acceptance(CausalLM(config).init_weights(0), np.arange(41), length=40)
