"""Models made from weights, and float32 islands in a float16 one: named parts that compute in float32.

    mixer, mlp   the norm in front of it and the mixer or MLP of one layer: weights, activations, products
    head         the last norm and the head
    stream       the residual stream from one layer on: what is written into it and read from it stays float16

A part casts what enters it to float32 and its result back to float16, or leaves it wide where the stream is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.analysis.half_precision.weights import half
from workbench.config import ModelConfig
from workbench.kernels import Kernels
from workbench.model import CausalLM


def build(
    config: ModelConfig, tensors: Mapping[str, Tensor], kernels: Kernels, *, dtype: torch.dtype,
    eps: Mapping[str, float] | None = None,
) -> CausalLM:  # fmt: skip
    """A model in eval mode with these weights in float16 (as the loader casts them) or another `dtype`.

    `eps` replaces that of single norms, by module name.
    """
    with torch.device("meta"):
        model = CausalLM(config, kernels)
    if dtype == torch.float16:
        weights = {name: half(name, tensor) for name, tensor in tensors.items()}
    else:
        weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    for name, value in (eps or {}).items():
        model.get_submodule(name).eps = value
    return model.to(next(iter(tensors.values())).device).eval()  # the cast lays joint projections out


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A part of the model that can be an island: `mixer` or `mlp` of a layer, or the `head` (layer -1)."""

    layer: int
    name: str

    def __str__(self) -> str:
        return self.name if self.layer < 0 else f"{self.name} of layer {self.layer}"


HEAD_PART = Part(-1, "head")


@dataclass(frozen=True, slots=True)
class Islands:
    """Which parts are float32, and from which layer on the residual stream is (None: nowhere)."""

    parts: tuple[Part, ...] = ()
    stream_from: int | None = None

    def __bool__(self) -> bool:
        return bool(self.parts) or self.stream_from is not None

    def words(self) -> list[str]:
        """What is in float32."""
        words = [f"{part} in float32" for part in self.parts]
        if self.stream_from is not None:
            words.append(f"residual stream in float32 from layer {self.stream_from} on")
        return words

    def cost(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """extra_bytes of weights, wide_flops per token in float32 instead of float16, activation_bytes per token more.

        Flops are two per weight of a matrix that a token meets; of E experts it meets A. The stream is kept as 4 bytes
        instead of 2 per channel.
        """
        extra = flops = 0
        for part in self.parts:
            for name, tensor in tensors.items():
                if not _belongs(name, part):
                    continue
                extra += 2 * tensor.numel()
                if tensor.dim() > 1:
                    share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1.0
                    flops += round(2 * tensor.numel() * share)
        stream = 0 if self.stream_from is None else 2 * config.hidden_size
        return {"extra_bytes": extra, "wide_flops": flops, "activation_bytes": stream}

    def apply(self, model: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        """Make these parts of a float16 `model` float32, with the weights in `tensors` as they were before the cast."""
        for part in self.parts:
            for name, tensor in tensors.items():
                if _belongs(name, part):
                    model.get_parameter(name).data = tensor.float()
        last = model.config.num_hidden_layers
        wide_from = last if self.stream_from is None else self.stream_from
        if self.stream_from is not None:
            model.layers[wide_from].register_forward_pre_hook(_widen)
        for index, layer in enumerate(model.layers):
            is_wide = index >= wide_from
            for name, norm, module in (
                ("mixer", layer.input_layernorm, layer.mixer), ("mlp", layer.post_attention_layernorm, layer.mlp),
            ):  # fmt: skip
                if Part(index, name) in self.parts:
                    norm.register_forward_pre_hook(_widen)
                    module.joint.lay_out()
                    if not is_wide:
                        module.register_forward_hook(_narrow)
                elif is_wide:
                    norm.register_forward_hook(_narrow)
        if HEAD_PART in self.parts:
            model.norm.register_forward_pre_hook(_widen)
        elif self.stream_from is not None:
            model.norm.register_forward_hook(_narrow)


def _belongs(name: str, part: Part) -> bool:
    if part == HEAD_PART:
        return name in ("norm.weight", "lm_head.weight")
    at = f"layers.{part.layer}."
    inside = ("input_layernorm.", "linear_attn.", "self_attn.") if part.name == "mixer" else (
        "post_attention_layernorm.", "mlp.",
    )  # fmt: skip
    return name.startswith(tuple(at + prefix for prefix in inside))


def _widen(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0].float(), *inputs[1:])


def _narrow(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.half()


def part_of(name: str) -> Part | None:
    """The part that a watched tensor or a weight is computed in; None for the stream, which is no part."""
    words = name.replace("logits", "head").split(".")
    if words[0] in ("head", "lm_head", "norm", "final_norm"):
        return HEAD_PART
    if words[0] != "layers":
        return None
    place = words[2]
    if place in ("linear_attn", "self_attn", "gdn", "attn", "input_norm", "input_layernorm", "mixer_out"):
        return Part(int(words[1]), "mixer")
    if place in ("mlp", "moe", "post_norm", "post_attention_layernorm"):
        return Part(int(words[1]), "mlp")
    return None
