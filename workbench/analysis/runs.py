"""One prompt run under one numerics policy: what every tap point saw, the logits, and what came out as
text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import InputError, NonFiniteError
from workbench.model import CausalLM
from workbench.numerics import PRESETS, NumericsPolicy
from workbench.tokenizer import Tokenizer
from workbench.tracing import Trace, trace


@dataclass(frozen=True, slots=True)
class Run:
    """A traced forward pass: `label` names it in figures, `logits` [B, T, vocabulary]."""

    label: str
    policy: NumericsPolicy
    trace: Trace
    logits: Tensor
    attestation: list


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a model wrote under a policy: `tokens`, or the `error` that kept it from writing."""

    label: str
    tokens: tuple[int, ...]
    error: str | None


def label_of(policy: str) -> str:
    """How figures and tables call a policy: by its name, one from a file by that of the file."""
    return policy if policy in PRESETS or Path(policy).name in PRESETS else Path(policy).name


@contextmanager
def using_policy(
    model: CausalLM, policy: NumericsPolicy | str, backends: Mapping[str, str] | None = None
) -> Iterator[None]:
    """The same model and backends under another numerics policy; the former kernels come back at the end.

    `backends` names the backend of an op for which the model's own kernels name none.
    """
    before = model.kernels
    requested = {**(backends or {}), **before.requested}
    model.kernels = before.altered(requested=requested, policy=policy)
    try:
        yield
    finally:
        model.kernels = before


def as_input(model: CausalLM, ids: Sequence[int], max_tokens: int) -> Tensor:
    """Token ids as a batch of one, [1, T], on the model's device. Raises InputError for none or too many."""
    if not ids:
        raise InputError("prompt: expected at least one token, found none; give some text")
    if len(ids) > max_tokens:
        raise InputError(
            f"prompt: expected at most {max_tokens} tokens, found {len(ids)}; shorten it or raise max_tokens"
        )
    return torch.tensor([list(ids)], device=model.device)


@torch.inference_mode()
def run_prompt(
    model: CausalLM, input_ids: Tensor, policy: str, keep: Collection[str] = (), *, check: str = "statistics"
) -> Run:
    """One forward pass over `input_ids` [B, T] from an empty cache, traced with `check`, under the named policy."""
    with using_policy(model, policy), trace(model, keep, check=check) as seen:
        logits = model(input_ids, use_cache=False).logits
        attestation = model.kernels.attestation()
        used = model.kernels.policy
    return Run(label_of(policy), used, seen, logits, attestation)


def continue_prompt(
    model: CausalLM, input_ids: Tensor, policy: NumericsPolicy | str, max_new_tokens: int
) -> Continuation:
    """Greedy continuation of `input_ids` [1, T] under the named policy; a refusal to draw a token becomes
    `error`."""
    written: list[int] = []
    label = label_of(policy) if isinstance(policy, str) else "as given"
    with using_policy(model, policy):
        try:
            model.generate(
                input_ids, max_new_tokens=max_new_tokens, stop_ids=model.config.eos_token_id,
                stream=lambda row: written.append(row[0]),
            )  # fmt: skip
        except NonFiniteError as error:
            return Continuation(label, tuple(written), str(error))
    return Continuation(label, tuple(written), None)


def readable(continuation: Continuation, tokenizer: Tokenizer) -> tuple[str, str]:
    """(label, what the model wrote, or why it wrote nothing more)."""
    text = tokenizer.decode(continuation.tokens)
    if continuation.error is not None:
        text = f"{text}[refused: {continuation.error}]"
    return f"policy {continuation.label}", text
