"""One setting of the numerics lab: a prompt under a policy, with what it shows of one layer and head."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis import gates, nans, parity
from workbench.analysis.runs import continue_prompt, readable, using_policy
from workbench.errors import InputError
from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.model import CausalLM
from workbench.numerics import NumericsPolicy
from workbench.tokenizer import Tokenizer
from workbench.tracing import trace

#: The lab looks at chunks: one token would go to the recurrence, which has none.
IN_CHUNKS = {"gated_delta_rule": "torch_chunk"}


@dataclass(frozen=True, slots=True)
class Probe:
    """What a setting shows.

    path   row, cumsum, chunk of one layer and head: G over the rows of each chunk, as the policy clamps it (nats)
    shares share of values that are not finite, layers by tap points (`nans.share_map`)
    errors layer, error: relative error of each layer's output against the fp64 oracle, inf where it is not finite
    text   what the model writes after the prompt, or why it writes nothing
    """

    path: pd.DataFrame
    shares: pd.DataFrame
    errors: pd.DataFrame
    text: str


@dataclass(slots=True)
class Lab:
    """A model, a prompt and what does not depend on the policy: kept, so that a setting is answered at once."""

    model: CausalLM
    tokenizer: Tokenizer
    tokens: int = 192
    new_tokens: int = 16
    _models: dict[str, CausalLM] = field(default_factory=dict)
    _safe: dict[tuple[str, str], tuple[Tensor, dict[int, dict[str, Tensor]], dict[int, Tensor]]] = field(
        default_factory=dict
    )

    @property
    def linear_layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.model.config.layer_types) if kind == "linear_attention"]

    def in_dtype(self, dtype: str) -> CausalLM:
        """The model with its weights in `dtype`, made once."""
        if dtype not in self._models:
            own = str(self.model.dtype).removeprefix("torch.")
            self._models[dtype] = self.model if dtype == own else copy.deepcopy(self.model).to(getattr(torch, dtype))
        return self._models[dtype]

    def probe(self, prompt: str, policy: NumericsPolicy, *, dtype: str, layer: int, head: int) -> Probe:
        """Run `prompt` (its first `tokens` tokens) under `policy`, the gated delta rule in chunks even of one token.

        The text is written by the model's own choice of backends. Raises InputError for no text, an unknown head, and
        a model whose gated delta rule was given a backend without chunks.
        """
        if layer not in self.linear_layers or not 0 <= head < self.model.config.linear_num_value_heads:
            raise InputError(
                f"lab: expected a layer of {self.linear_layers} and a head below "
                f"{self.model.config.linear_num_value_heads}, found layer {layer}, head {head}"
            )
        model = self.in_dtype(dtype)
        ids, inputs, exact = self._of_safe(prompt, dtype)
        name = taps.full_name(layer, taps.GDN_CUMSUM)
        with torch.inference_mode(), using_policy(model, policy, IN_CHUNKS), trace(model, keep=[name]) as seen:
            model(ids, use_cache=False)
        if name not in seen.tensors:
            raise InputError(
                "lab: expected a gated delta rule in chunks, found backend "
                f"{model.kernels.requested['gated_delta_rule']}, which has none; load the model without naming it"
            )
        with torch.inference_mode():
            text = continue_prompt(model, ids, policy, self.new_tokens)
        errors = [
            (i, relative_error(gated_delta_rule(**x, policy=policy, backend="torch_chunk")[0], exact[i]))
            for i, x in inputs.items()
        ]
        cumsum = seen.tensors[name][:, head]  # [N, C]
        rows = torch.arange(cumsum.numel())
        path = pd.DataFrame({
            "row": rows.numpy(), "chunk": (rows // cumsum.shape[1]).numpy(), "cumsum": cumsum.double().flatten().numpy()
        })[: ids.shape[1]]  # fmt: skip
        return Probe(
            path, nans.share_map(seen.table), pd.DataFrame(errors, columns=["layer", "error"]),
            readable(text, self.tokenizer)[1],
        )  # fmt: skip

    def prepare(self, prompt: str, dtype: str) -> None:
        """Compute what a setting of `prompt` in `dtype` needs and no policy changes, ahead of the first setting."""
        self._of_safe(prompt, dtype)

    def _of_safe(self, prompt: str, dtype: str) -> tuple[Tensor, dict[int, dict[str, Tensor]], dict[int, Tensor]]:
        """(token ids, inputs of each delta rule under the safe policy, their exact outputs), kept for each prompt."""
        key = (prompt, dtype)
        if key not in self._safe:
            ids = self.tokenizer.encode(prompt)[: self.tokens]
            if not ids:
                raise InputError("prompt: expected some text, found none")
            model = self.in_dtype(dtype)
            batch = torch.tensor([ids], device=model.device)
            with torch.inference_mode(), using_policy(model, "safe"):
                with trace(model, keep=parity.KEEP_DELTA_RULE_INPUTS) as seen:
                    model(batch, use_cache=False)
            inputs = parity.kept_inputs(seen.tensors)
            self._safe[key] = batch, inputs, {i: oracle(**x)[0] for i, x in inputs.items()}
        return self._safe[key]

    def strongest(self, prompt: str, dtype: str) -> tuple[int, int]:
        """(layer, head) of the largest decay in a chunk: where to look first."""
        _, inputs, _ = self._of_safe(prompt, dtype)
        table = gates.gate_table({taps.full_name(i, taps.GDN_LOG_DECAY): x["log_decay"] for i, x in inputs.items()})
        top = table.loc[table["span_max"].idxmax()]
        return int(top["layer"]), int(top["head"])
