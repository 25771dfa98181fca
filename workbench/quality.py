"""How well a checkpoint does what it was trained for: perplexity and draft acceptance on token arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import InputError
from workbench.model import CausalLM


@dataclass(frozen=True, slots=True)
class Perplexity:
    """`perplexity` = exp(mean negative log-likelihood) over `predicted` tokens."""

    perplexity: float
    predicted: int


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """`rate` = `accepted` / `proposed`: drafts of the prediction head that equal the main model's own next choice."""

    rate: float
    accepted: int
    proposed: int


def windows(tokens: np.ndarray, length: int) -> Tensor:
    """Consecutive windows of `length` inputs and the token after each input, [windows, length + 1] of int64.

    The last, shorter remainder is left out, so that all windows have the same context. Raises InputError where not
    even one fits.
    """
    count = (len(tokens) - 1) // length
    if count < 1:
        raise InputError(
            f"tokens: expected at least {length + 1} for one window, found {len(tokens)}; shorten the window"
        )
    rows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), length + 1)[: count * length : length]
    return torch.from_numpy(rows.astype(np.int64))


@torch.inference_mode()
def perplexity(model: CausalLM, tokens: np.ndarray, *, length: int = 512, batch: int = 8) -> Perplexity:
    """Perplexity over consecutive windows of `length` tokens, each read from an empty state."""
    total, predicted = 0.0, 0
    for rows in windows(tokens, length).split(batch):
        rows = rows.to(model.device)
        logits = model(rows[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits.flatten(0, 1).double(), rows[:, 1:].flatten(), reduction="sum").item()
        predicted += rows[:, 1:].numel()
    return Perplexity(math.exp(total / predicted), predicted)


@torch.inference_mode()
def draft_acceptance(model: CausalLM, tokens: np.ndarray, *, length: int = 512, batch: int = 8) -> DraftAcceptance:
    """Teacher-forced greedy acceptance of the multi-token-prediction head.

    At each position t the text continues with its own token t + 1; the head's most likely token t + 2 is accepted where
    it equals the main model's most likely one after reading token t + 1.
    """
    accepted = proposed = 0
    for rows in windows(tokens, length).split(batch):
        rows = rows.to(model.device)
        out = model(rows[:, :-1], use_cache=False)
        drafts = model.mtp_logits(out.hidden[:, :-1], rows[:, 1:-1]).argmax(-1)
        choices = out.logits[:, 1:].argmax(-1)
        accepted += int((drafts == choices).sum())
        proposed += drafts.numel()
    return DraftAcceptance(accepted / proposed, accepted, proposed)
