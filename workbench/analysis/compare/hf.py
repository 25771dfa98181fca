"""transformers as a side: what its modules compute, by our names of tap points.

Hooks on modules give what a module takes or returns (`MODULES`); what its own code hands to functions of the same file
is seen there (`FUNCTIONS`). Stages that neither shows are not compared.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.compare.sides import HF, Side, named
from workbench.analysis.stages import CACHE_TAPS, Seen, judge_passes
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.model import CausalLM

#: Family of a configuration -> the class that computes it.
CLASSES = {
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tap point is seen: a module of theirs, relative to the layer or to the model, and what of it.

    `read(inputs, output, config)` gives the tensor as ours is laid out.
    """

    module: str
    read: Callable[[tuple, Any, ModelConfig], Tensor]


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _out(inputs: tuple, output: Any, config: ModelConfig) -> Tensor:
    return _first(output)


def _value_heads(x: Tensor, config: ModelConfig) -> Tensor:
    return x.reshape(*x.shape[:2], config.linear_num_value_heads, config.linear_value_head_dim)


def _gated_norm(inputs: tuple, output: Tensor, config: ModelConfig) -> Tensor:
    """Theirs has a row for each head of each token of the one sequence."""
    return output.reshape(1, -1, config.linear_num_value_heads * config.linear_value_head_dim)


def _attention_gate(inputs: tuple, output: Tensor, config: ModelConfig) -> Tensor:
    heads = output.unflatten(-1, (config.num_attention_heads, -1))
    return heads.chunk(2, dim=-1)[1].flatten(2)


#: Tap point -> the module of theirs that shows it.
MODULES: dict[str, Source] = {
    taps.EMBED: Source("model.embed_tokens", _out),
    taps.INPUT_NORM: Source("input_layernorm", _out),
    taps.GDN_QKV: Source("linear_attn.in_proj_qkv", _out),
    taps.GDN_GATE: Source("linear_attn.in_proj_z", lambda inputs, output, config: _value_heads(output, config)),
    taps.GDN_NORM: Source("linear_attn.norm", _gated_norm),
    taps.ATTN_GATE: Source("self_attn.q_proj", _attention_gate),
    taps.RESIDUAL_MID: Source("post_attention_layernorm", lambda inputs, output, config: inputs[0]),
    taps.POST_NORM: Source("post_attention_layernorm", _out),
    taps.MOE_LOGITS: Source("mlp.gate", _out),
    taps.MOE_TOPK: Source("mlp.gate", lambda inputs, output, config: output[1]),
    taps.MOE_EXPERTS: Source("mlp.experts", _out),
    taps.MOE_OUT: Source("mlp", _out),
    taps.FINAL_NORM: Source("model.norm", _out),
    taps.LOGITS: Source("lm_head", _out),
}
#: The same where the name of the module depends on the kind of layer, and the layer itself.
LINEAR_MODULES = {taps.MIXER_OUT: Source("linear_attn.out_proj", _out)}
FULL_MODULES = {taps.MIXER_OUT: Source("self_attn.o_proj", _out)}

#: Functions of theirs and the tap points that their arguments and results show.
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": (taps.GDN_CONV, taps.GDN_V, taps.GDN_BETA, taps.GDN_LOG_DECAY, taps.GDN_STATE),
    "torch_recurrent_gated_delta_rule": (taps.GDN_CONV, taps.GDN_V, taps.GDN_BETA, taps.GDN_LOG_DECAY, taps.GDN_STATE),
    "eager_attention_forward": (taps.ATTN_Q, taps.ATTN_K, taps.ATTN_V, taps.ATTN_OUT),
}


class Watched:
    """A model of theirs, whose tensors go into `tensors` of the current pass."""

    def __init__(self, model: Any, config: ModelConfig):
        self.model, self.config = model, config
        self.tensors: dict[str, Tensor] = {}
        self.experts: dict[int, Tensor] = {}
        self.layer = -1

    def see(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.detach().clone()

    def delta_rule(self, function: Callable) -> Callable:
        """Their gated delta rule, which is given q, k, v of every value head before they are normalised."""

        def seen(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named_args: Any) -> Any:
            out = function(query, key, value, *args, **named_args)
            groups = self.config.linear_num_value_heads // self.config.linear_num_key_heads
            q, k = (x[:, :, :: groups if x.shape[2] == value.shape[2] else 1].flatten(2) for x in (query, key))
            name = lambda tap: taps.full_name(self.layer, tap)  # noqa: E731
            self.see(name(taps.GDN_CONV), torch.cat([q, k, value.flatten(2)], dim=-1))
            self.see(name(taps.GDN_V), value)
            for argument, tap in (("beta", taps.GDN_BETA), ("g", taps.GDN_LOG_DECAY)):
                if argument in named_args:
                    self.see(name(tap), named_args[argument])
            if isinstance(out, tuple) and out[1] is not None:
                self.see(name(taps.GDN_STATE), out[1])
            self.see(name(taps.GDN_OUT), _value_heads(out[0], self.config))
            return out

        return seen

    def attention(self, function: Callable) -> Callable:
        """Their attention, which is given [B, heads, T, head_dim] and all visible keys."""

        def seen(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named_args: Any) -> Any:
            out = function(module, query, key, value, *args, **named_args)
            tokens = query.shape[2]
            shown = {taps.ATTN_Q: query, taps.ATTN_K: key[:, :, -tokens:], taps.ATTN_V: value[:, :, -tokens:]}
            for tap, tensor in shown.items():
                self.see(taps.full_name(self.layer, tap), tensor.transpose(1, 2))
            self.see(taps.full_name(self.layer, taps.ATTN_OUT), out[0])
            return out

        return seen

    def hook(self, layer: int | None, tap: str, source: Source) -> Callable:
        name = tap if layer is None else taps.full_name(layer, tap)

        def seen(module: Any, inputs: tuple, output: Any) -> None:
            self.see(name, source.read(inputs, output, self.config))
            if tap == taps.MOE_LOGITS and isinstance(output, tuple) and len(output) > 2:
                self.experts[layer] = output[2].detach().clone()

        return seen

    def entered(self, layer: int) -> Callable:
        def enter(module: Any, inputs: tuple) -> None:
            self.layer = layer

        return enter


@contextmanager
def watched(model: Any, config: ModelConfig) -> Iterator[Watched]:
    """Hooks on the modules of `model` and on the functions of its file, taken off at the end."""
    watch = Watched(model, config)
    modules = dict(model.named_modules())
    handles = []
    places: list[tuple[str, int | None, str, Source]] = []
    for tap, source in MODULES.items():
        if tap in taps.MODEL_TAPS:
            places.append((source.module, None, tap, source))
    for index, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{index}"
        handles.append(modules[prefix].register_forward_pre_hook(watch.entered(index)))
        own = LINEAR_MODULES if kind == "linear_attention" else FULL_MODULES
        inside = {tap: source for tap, source in MODULES.items() if tap in taps.LAYER_TAPS} | own
        places += [(f"{prefix}.{source.module}", index, tap, source) for tap, source in inside.items()]
        places.append((prefix, index, taps.RESIDUAL, Source("", _out)))
    for path, index, tap, source in places:
        if path in modules:
            handles.append(modules[path].register_forward_hook(watch.hook(index, tap, source)))
    file = sys.modules[type(model).__module__]
    before = {name: getattr(file, name) for name in FUNCTIONS if hasattr(file, name)}
    try:
        for name, function in before.items():
            wrap = watch.attention if name == "eager_attention_forward" else watch.delta_rule
            setattr(file, name, wrap(function))
        yield watch
    finally:
        for name, function in before.items():
            setattr(file, name, function)
        for handle in handles:
            handle.remove()


def order_of(names: Sequence[str]) -> list[str]:
    """Full names of tap points in the order of computation; what a pass finds in its memory comes before it."""
    inside = list(taps.LAYER_TAPS)
    last = [taps.FINAL_NORM, taps.LOGITS]

    def place(name: str) -> tuple[int, int]:
        layer, tap = taps.split_name(name)
        if layer is not None and tap in CACHE_TAPS:
            return -2, layer
        if layer is not None:
            return layer, inside.index(tap)
        return (-1, 0) if name == taps.EMBED else (1 << 30, last.index(name))

    return sorted(names, key=place)


def run_hf(model: CausalLM, checkpoint: str | Path, feeds: Sequence[Tensor], decode: int) -> Side:
    """`checkpoint` in transformers, in the dtype of `model`, whose weights judge what it computes.

    Raises InputError where transformers is not installed or lacks the model's class.
    """
    if find_spec("transformers") is None:
        raise InputError(
            f"side {HF}: expected the package transformers, not installed here; `pip install transformers` or compare "
            "with another side"
        )
    library = importlib.import_module("transformers")
    name = CLASSES[model.config.family]
    if not hasattr(library, name):
        raise InputError(
            f"side {HF}: expected a transformers with {name}, found version {library.__version__}, which lacks it; "
            "install a newer one"
        )
    with quiet(library):
        peer = getattr(library, name).from_pretrained(
            str(checkpoint), dtype=model.dtype, attn_implementation="eager", local_files_only=True
        )
        peer = peer.to(model.device).eval()
        passes = run_peer(peer, model.config, feeds, decode)
    table = judge_passes(model, passes).table
    backends = [{"op": "model", "backend": f"transformers {library.__version__}, eager"}]
    return Side(HF, HF, passes, table, named(model.dtype), None, backends)


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """No progress bars and no notes on slower functions, which are what is compared here."""
    logging = library.utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def run_peer(peer: Any, config: ModelConfig, feeds: Sequence[Tensor], decode: int) -> list[Seen]:
    """The passes of a model of theirs."""
    device = next(peer.parameters()).device
    passes: list[Seen] = []
    with torch.inference_mode(), watched(peer, config) as watch:
        cache, past = None, 0
        pending = [ids.to(device) for ids in feeds]
        while pending:
            ids = pending.pop(0)
            watch.tensors, watch.experts = {}, {}
            output = peer(ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            order = order_of(list(watch.tensors))
            passes.append(Seen(ids, past, [], {name: watch.tensors[name] for name in order}, watch.experts, order))
            past += ids.shape[1]
            if not pending and len(passes) < len(feeds) + decode:
                pending.append(output.logits[:, -1:].argmax(-1))
    return passes
