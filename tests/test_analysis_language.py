"""Unigram perplexity against a count by hand."""

import math

import numpy as np
import pytest

from workbench.analysis.language import unigram_perplexity
from workbench.errors import InputError


def test_unigram_perplexity_by_hand():
    # counts 3, 1, 0, 0 of 4 tokens and 4 ids: p = 4/8, 2/8, 1/8, 1/8
    train = np.array([0, 0, 0, 1], dtype=np.uint16)
    expected = math.exp(-(math.log(4 / 8) + math.log(2 / 8) + math.log(1 / 8)) / 3)
    assert unigram_perplexity(train, np.array([0, 1, 3], dtype=np.uint16), vocab_size=4) == pytest.approx(
        expected, rel=1e-12
    )


def test_unigram_perplexity_of_uniform_text_is_the_vocabulary_size():
    tokens = np.arange(16)
    assert unigram_perplexity(tokens, tokens, vocab_size=16) == pytest.approx(16, rel=1e-12)


@pytest.mark.parametrize(
    ("train", "evaluation", "reason"),
    [
        (np.array([], dtype=np.uint16), np.array([0]), "train_tokens: expected a non-empty"),
        (
            np.array([0]),
            np.array([0.5]),
            "eval_tokens: expected a non-empty one-dimensional array of integers",
        ),
        (np.array([0]), np.array([4]), "eval_tokens: token ids run from 4 to 4, expected 0 to 3"),
        (np.array([-1]), np.array([0]), "train_tokens: token ids run from -1"),
    ],
)
def test_unusable_tokens_are_named(train, evaluation, reason):
    with pytest.raises(InputError, match=reason):
        unigram_perplexity(train, evaluation, vocab_size=4)
