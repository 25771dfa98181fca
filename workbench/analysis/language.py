"""How predictable a text is without any model: the yardstick beside a language model's perplexity. Pure
numpy."""

import numpy as np

from workbench.errors import InputError


def unigram_perplexity(train_tokens: np.ndarray, eval_tokens: np.ndarray, *, vocab_size: int) -> float:
    """Perplexity of `eval_tokens` under the token frequencies of `train_tokens`, whatever stands before a
    token.

    Formula, with n_v the count of token v in the N training tokens and V = vocab_size (add-one smoothing, so
    that a token that never occurred in training has a probability above zero):

        p(v) = (n_v + 1) / (N + V)
        perplexity = exp(-mean over the M evaluation tokens of ln p(token))

    Shapes and dtypes: `train_tokens` [N] and `eval_tokens` [M], any integer dtype; the arithmetic is float64.
    Every token given counts, document separators too: to compare with a model, give exactly the tokens that
    the model is asked to predict. Raises `InputError` for an empty or non-integer array and for a token
    outside 0 .. V - 1.
    """
    train_counts = _token_counts(train_tokens, vocab_size, "train_tokens")
    eval_counts = _token_counts(eval_tokens, vocab_size, "eval_tokens")
    log_probability = np.log(train_counts + 1.0) - np.log(train_counts.sum() + float(vocab_size))
    return float(np.exp(-(eval_counts * log_probability).sum() / eval_counts.sum()))


def _token_counts(tokens: np.ndarray, vocab_size: int, name: str) -> np.ndarray:
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InputError(
            f"{name}: expected a non-empty one-dimensional array of integers, found shape {array.shape} of "
            f"{array.dtype}; read a token file with workbench.training.tokenize.read_tokens"
        )
    if vocab_size < 1 or array.min() < 0 or array.max() >= vocab_size:
        raise InputError(
            f"{name}: token ids run from {array.min()} to {array.max()}, expected 0 to {vocab_size - 1}; "
            f"pass the vocab_size of the tokenizer that made them"
        )
    return np.bincount(array, minlength=vocab_size)
