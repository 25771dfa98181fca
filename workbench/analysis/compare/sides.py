"""The sides of a comparison: what was asked for, and the passes that came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench.analysis.stages import Seen, stage_watch
from workbench.cards import Card
from workbench.errors import BackendError, InputError
from workbench.kernels import Kernels
from workbench.kernels.registry import parse_selection
from workbench.loading import load
from workbench.model import CausalLM

#: The name of transformers as a side.
HF = "hf"
#: In the place of token ids that a bundle does not say.
UNKNOWN = -1


@dataclass(slots=True)
class Side:
    """One run.

    label     as it was asked for
    source    `model`, `hf` or `bundle`
    passes    every pass with its tensors by tap name, the tokens that it was given, and the experts chosen
    judged    `StageWatch.table`: each op beside float64 of its own inputs; None where there were no weights
    dtype     of the weights, where known
    policy, backends   JSON values, as in a bundle
    model_hash  of the checkpoint that a bundle says it was made with, None where it does not
    is_cut    whether some tensors hold a range of the tokens alone, or the tokens of a pass are not even counted
    interrupted  how a recorded run ended that did not end by itself, None for one that did
    """

    label: str
    source: str
    passes: list[Seen]
    judged: pd.DataFrame | None = None
    dtype: str | None = None
    policy: dict[str, Any] | None = None
    backends: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    model_hash: str | None = None
    interrupted: str | None = None

    @property
    def feeds(self) -> list[Tensor]:
        """The tokens of each pass, [1, T]."""
        return [seen.input_ids.cpu() for seen in self.passes]

    def about(self) -> dict[str, Any]:
        """Plain JSON values that say what ran."""
        return {
            "label": self.label, "source": self.source, "dtype": self.dtype, "policy": self.policy,
            "backends": self.backends,
        }  # fmt: skip


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernels_of(text: str) -> Kernels:
    """``[OP=]NAME[:POLICY]``, several separated by commas; a part may be a policy alone, ``:factored``.

    Raises BackendError for what is none of these, and for two policies.
    """
    parts = [part.strip() for part in text.split(",")]
    alone = [part[1:] for part in parts if part.startswith(":")]
    rest = [part for part in parts if not part.startswith(":")]
    if not all(alone) or (HF in (part.partition(":")[0] for part in rest)):
        raise BackendError(
            f"side {text!r}: expected [OP=]NAME[:POLICY], :POLICY, {HF} alone or the directory of a bundle; found "
            f"{'an empty policy' if not all(alone) else f'{HF} with something else'}"
        )
    selection = parse_selection(",".join(rest) if rest else None)
    policies = set(alone) | ({selection.policy} - {None})
    if len(policies) > 1:
        raise BackendError(f"side {text!r}: two policies, {' and '.join(sorted(policies))}; name one")
    return Kernels(selection.backends, next(iter(policies), None))


def is_bundle(text: str | Path) -> bool:
    """Whether a side is a directory: a Path, or the name of one that exists."""
    return isinstance(text, Path) or Path(text).is_dir()


class Models:
    """Models of one checkpoint by dtype, each read once."""

    def __init__(self, checkpoint: str | Path | None, device: str, expert_layout: str | None):
        self.checkpoint, self.device, self.expert_layout = checkpoint, device, expert_layout
        self._loaded: dict[Any, CausalLM] = {}

    def of(self, dtype: str | None) -> CausalLM:
        if self.checkpoint is None:
            raise InputError("compare: expected a checkpoint, without which only saved bundles can be compared")
        if dtype not in self._loaded:
            self._loaded[dtype] = load(
                self.checkpoint, dtype=dtype, device=self.device, expert_layout=self.expert_layout
            )
        return self._loaded[dtype]


def run_model(model: CausalLM, label: str, feeds: Sequence[Tensor], decode: int) -> Side:
    """The passes of `feeds` [1, T] one after the other, then `decode` tokens, each the likeliest after the last."""
    with torch.inference_mode(), stage_watch(model, keep=True) as watch:
        cache = None
        for ids in feeds:
            output = model(ids.to(model.device), cache=cache)
            cache = output.cache
        for _ in range(decode):
            output = model(output.logits[:, -1:].argmax(-1), cache=output.cache)
    kernels = model.kernels
    backends = [row.to_json() for row in kernels.attestation()]
    return Side(label, "model", watch.passes, watch.table, named(model.dtype), kernels.policy.to_json(), backends)


def run_selection(
    model: CausalLM, text: str, feeds: Sequence[Tensor], decode: int, card: Card | None = None
) -> Side:
    """`run_model` with the backends and the policy of `text`, on `card` if one is named; the model's own come back."""
    before = model.kernels
    chosen = kernels_of(text)
    model.kernels = before.altered(requested=chosen.requested, policy=chosen.policy, card=card or before.card)
    label = text if card is None else f"{text} on {card.name}"
    try:
        return run_model(model, label, feeds, decode)
    finally:
        model.kernels = before


def check_length(model: CausalLM, feeds: Sequence[Tensor], decode: int) -> None:
    """Raise InputError for more tokens than the model has positions."""
    tokens = sum(ids.shape[1] for ids in feeds) + decode
    limit = model.config.max_position_embeddings
    if tokens > limit:
        raise InputError(
            f"compare: expected at most {limit} tokens (max_position_embeddings), found {tokens}; shorten the prompt "
            "or decode fewer"
        )
