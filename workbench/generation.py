"""Choosing the next token: greedy, temperature and nucleus sampling, stop ids, streaming."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.errors import InputError, NonFiniteError

if TYPE_CHECKING:
    from workbench.model import CausalLM


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """`sequences`: the new tokens of each prompt, stop token included. `reasons`: `stop` or `length` for each."""

    sequences: list[list[int]]
    reasons: list[str]


def sample(logits: Tensor, *, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Next token ids [B] from logits [B, vocabulary].

    Temperature 0 is the largest logit (lowest id among equals). Otherwise softmax(logits / temperature) cut to the
    smallest set of most likely tokens whose probability reaches `top_p`. Raises NonFiniteError for logits that are not
    finite: a token drawn from them would hide the fault.
    """
    finite = torch.isfinite(logits).all(-1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        share = (~torch.isfinite(logits[row])).double().mean().item()
        raise NonFiniteError(
            f"logits of sequence {row}: expected finite values, found {share:.1%} NaN or Inf; "
            "run `workbench trace` with the same prompt and backend to find the first bad op"
        )
    if temperature == 0.0:
        return logits.argmax(-1)
    # Differences first, in float64: a tiny temperature then gives 0 and -inf, not inf and NaN.
    below = logits.double() - logits.double().amax(-1, keepdim=True)
    probabilities = torch.softmax(below / temperature, dim=-1).float()
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    outside = ranked.cumsum(-1) - ranked >= top_p  # the first token is always inside
    ranked = ranked.masked_fill(outside, 0.0)
    return order.gather(-1, torch.multinomial(ranked, 1, generator=generator)).squeeze(-1)


def check_settings(
    model: CausalLM, input_ids: Tensor, max_new_tokens: int, temperature: float, top_p: float, seed: int | None
) -> None:
    if not isinstance(input_ids, Tensor):
        raise InputError(f"input_ids: expected a tensor [batch, tokens], found {type(input_ids).__name__}")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens: expected a whole number of at least 1, found {max_new_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise InputError(f"temperature: expected a finite number of at least 0, found {temperature}")
    if not 0.0 < top_p <= 1.0:
        raise InputError(f"top_p: expected a number above 0 and at most 1, found {top_p}")
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**64):
        raise InputError(f"seed: expected a whole number of 64 bits, found {seed}")
    wanted = input_ids.shape[-1] + max_new_tokens
    if wanted > model.config.max_position_embeddings:
        raise InputError(
            f"prompt of {input_ids.shape[-1]} tokens and {max_new_tokens} new ones: expected at most "
            f"max_position_embeddings = {model.config.max_position_embeddings}, found {wanted}; shorten one"
        )


@torch.no_grad()
def generate(
    model: CausalLM,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop_ids: Collection[int] = (),
    seed: int | None = None,
    attention_mask: Tensor | None = None,
    stream: Callable[[list[int | None]], None] | None = None,
) -> GenerateOutput:
    """Continue each prompt of input_ids [B, T] by up to `max_new_tokens` tokens.

    `attention_mask` [B, T] marks padding as in `CausalLM.forward`. `stream` is called after each step with one id per
    sequence, None for a sequence that has ended. `seed` fixes the draws of temperature sampling.
    """
    check_settings(model, input_ids, max_new_tokens, temperature, top_p, seed)
    if not isinstance(stop_ids, Collection):
        raise InputError(f"stop_ids: expected a collection of token ids, found {stop_ids!r}; write [{stop_ids}]")
    generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
    batch = input_ids.shape[0]
    out = model(input_ids, attention_mask=attention_mask, last_only=True)
    sequences: list[list[int]] = [[] for _ in range(batch)]
    reasons: list[str | None] = [None] * batch
    for step in range(max_new_tokens):
        tokens = sample(out.logits[:, -1], temperature=temperature, top_p=top_p, generator=generator)
        row: list[int | None] = []
        for s, token in enumerate(tokens.tolist()):
            if reasons[s] is not None:
                row.append(None)
                continue
            sequences[s].append(token)
            row.append(token)
            if token in stop_ids:
                reasons[s] = "stop"
        if stream is not None:
            stream(row)
        if step + 1 == max_new_tokens or all(reasons):
            break
        out = model(tokens[:, None], cache=out.cache)
    return GenerateOutput(sequences, [reason or "length" for reason in reasons])
