"""Tensor names: the model's own (canonical) names and shapes, and the names under which files hold them.

Canonical names are the official ones without their prefix, experts stacked:
`layers.0.mlp.experts.gate_up_proj` [E, 2I, D] has the gate rows before the up rows,
`layers.0.linear_attn.in_proj_qkv.weight` all q rows, then k, then v. Files may hold a canonical tensor in
another form:

* experts in any of the layouts of `expert_layouts`, under `mlp.` or `block_sparse_moe.`;
* Qwen3-Next: `in_proj_qkvz` and `in_proj_ba`, rows grouped per key head:
  [q | k | its v heads | their z heads] and [b of its value heads | a of its value heads].

Dimension letters: D hidden, V vocabulary, H key heads, R value heads per key head, K key head width, W value
head width, E experts, I expert width.
"""

import re
from dataclasses import dataclass

import torch

from workbench.config import FULL, LINEAR, SPARSE, ModelConfig

# Prefixes of the text model, longest first: official multimodal files, an older multimodal wrapper, text-only
# files.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")

# Tensors that no file needs to have and this model does not use: glob -> reason.
SKIP_REASONS = {
    "model.visual.*": "vision tower; this model is text only",
    "visual.*": "vision tower; this model is text only",
    "*.rotary_emb.inv_freq": "rotary frequencies are computed from the configuration",
}

# These stay fp32 whatever the model's dtype: their rounding is exponentiated and adds up over the sequence.
ALWAYS_FLOAT32 = re.compile(r".*\.linear_attn\.(A_log|dt_bias)")
# Official files keep these in fp32 between bf16 neighbours.
OFFICIAL_FLOAT32 = re.compile(r".*\.linear_attn\.(A_log|norm\.weight)")


def canonical_name(stored_name: str) -> str:
    """A stored name without the text model's prefix; `mtp.*` and `lm_head.weight` officially have none."""
    if stored_name == "language_model.lm_head.weight":
        return "lm_head.weight"
    name = stored_name
    for prefix in _PREFIXES:
        if stored_name.startswith(prefix):
            name = stored_name.removeprefix(prefix)
            break
    return name.replace(".block_sparse_moe.", ".mlp.")  # as Mixtral names the block with router and experts


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the configured model has, in the order of the forward pass."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for layer, (mixer, mlp) in enumerate(zip(c.layer_types, c.mlp_types, strict=True)):
        shapes |= _layer_shapes(c, f"layers.{layer}.", mixer, mlp)
    shapes["norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    if c.mtp_num_hidden_layers:
        shapes["mtp.pre_fc_norm_embedding.weight"] = (c.hidden_size,)
        shapes["mtp.pre_fc_norm_hidden.weight"] = (c.hidden_size,)
        shapes["mtp.fc.weight"] = (c.hidden_size, 2 * c.hidden_size)
        shapes |= _layer_shapes(c, "mtp.layers.0.", FULL, c.mtp_mlp_type)
        shapes["mtp.norm.weight"] = (c.hidden_size,)
    return shapes


def _layer_shapes(c: ModelConfig, prefix: str, mixer: str, mlp: str) -> dict[str, tuple[int, ...]]:
    hidden = c.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if mixer == LINEAR:
        heads = c.linear_num_value_heads
        shapes |= {
            "linear_attn.in_proj_qkv.weight": (c.conv_dim, hidden),
            "linear_attn.in_proj_z.weight": (c.value_dim, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (c.linear_value_head_dim,),
            "linear_attn.out_proj.weight": (hidden, c.value_dim),
        }
    else:
        query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        shapes |= {
            "self_attn.q_proj.weight": (2 * query, hidden),  # per head: query rows, then output gate rows
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.q_norm.weight": (c.head_dim,),
            "self_attn.k_norm.weight": (c.head_dim,),
            "self_attn.o_proj.weight": (hidden, query),
        }
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if mlp == SPARSE:
        experts, width, shared = c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size
        shapes |= {
            "mlp.gate.weight": (experts, hidden),
            "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
            "mlp.experts.down_proj": (experts, hidden, width),
            "mlp.shared_expert.gate_proj.weight": (shared, hidden),
            "mlp.shared_expert.up_proj.weight": (shared, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared),
            "mlp.shared_expert_gate.weight": (1, hidden),
        }
    else:
        shapes |= {
            "mlp.gate_proj.weight": (c.intermediate_size, hidden),
            "mlp.up_proj.weight": (c.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, c.intermediate_size),
        }
    return {prefix + name: shape for name, shape in shapes.items()}


# ============================================================================================================
# Forms in which a file may hold a canonical tensor
# ============================================================================================================


@dataclass(frozen=True, slots=True)
class Form:
    """One way to hold a canonical tensor: the names and shapes of its sources, `name -> shape`."""

    label: str
    sources: dict[str, tuple[int, ...]]


def forms_of(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[Form, ...]:
    """All forms of one canonical tensor but those of experts; the first is the canonical tensor itself."""
    forms = [Form("one tensor", {name: shape})]
    stem, _, leaf = name.rpartition(".linear_attn.in_proj_")
    if stem:
        source, rows = ("qkvz", config.conv_dim + config.value_dim)
        if leaf in ("b.weight", "a.weight"):
            source, rows = ("ba", 2 * config.linear_num_value_heads)
        source_name = f"{stem}.linear_attn.in_proj_{source}.weight"
        forms.append(Form("fused projections", {source_name: (rows, config.hidden_size)}))
    return tuple(forms)


def split_qkvz(config: ModelConfig, qkvz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows grouped per key head [H*(2K + 2RW), D] -> in_proj_qkv [2HK + HRW, D] and in_proj_z [HRW, D]."""
    heads, key, value = config.linear_num_key_heads, config.linear_key_head_dim, config.value_dim
    per_head = value // heads  # R*W
    q, k, v, z = qkvz.unflatten(0, (heads, -1)).split([key, key, per_head, per_head], dim=1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v)]), z.flatten(0, 1)


def fuse_qkvz(config: ModelConfig, qkv: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Inverse of `split_qkvz`."""
    heads = config.linear_num_key_heads
    parts = [*qkv.split([config.key_dim, config.key_dim, config.value_dim]), z]
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def split_ba(config: ModelConfig, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows grouped per key head [H*2R, D] -> in_proj_b [HR, D] and in_proj_a [HR, D]."""
    b, a = ba.unflatten(0, (config.linear_num_key_heads, 2, -1)).unbind(1)
    return b.flatten(0, 1), a.flatten(0, 1)


def fuse_ba(config: ModelConfig, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Inverse of `split_ba`."""
    heads = config.linear_num_key_heads
    return torch.stack([part.unflatten(0, (heads, -1)) for part in (b, a)], dim=1).flatten(0, 2)
