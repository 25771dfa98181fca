"""Small model configurations that every test shares, as the content of a Hugging Face `config.json`.

The sizes are unequal on purpose: key and value head widths differ, so that a transposed state cannot hide,
and value heads outnumber key heads, so that a wrong head mapping shows.

>>> ModelConfig.from_hf(mini(tie_word_embeddings=True))
"""

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
    "initializer_range": 0.02,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "router_aux_loss_coef": 0.001,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
_QWEN3_5: dict[str, Any] = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}


def mini(**changes: Any) -> dict[str, Any]:
    """MINI: Qwen3.5 mixture of experts, nested; three linear layers and one full, 8 experts top-2, MTP head.

    `changes` replace fields of the text model; a change to None removes the field.
    """
    return _nested("qwen3_5_moe", {**_COMMON, **_EXPERTS, **_QWEN3_5}, changes)


def mini256(**changes: Any) -> dict[str, Any]:
    """MINI256: the same with 256 experts, top-8."""
    return mini(**{"num_experts": 256, "num_experts_per_tok": 8, **changes})


def mini_dense(**changes: Any) -> dict[str, Any]:
    """Qwen3.5 dense, nested, with an MTP head."""
    return _nested("qwen3_5", {**_COMMON, **_QWEN3_5, "intermediate_size": 80}, changes)


def mini_next(**changes: Any) -> dict[str, Any]:
    """Qwen3-Next, flat; layer 1 has a dense MLP, the others experts."""
    fields = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **_COMMON,
        **_EXPERTS,
        "rope_parameters": dict(_ROPE),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "intermediate_size": 80,
        "norm_topk_prob": True,
    }
    return _changed(fields, changes)


def _nested(family: str, text: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    stem = {"qwen3_5_moe": "Qwen3_5Moe", "qwen3_5": "Qwen3_5"}[family]
    return {
        "architectures": [f"{stem}ForConditionalGeneration"],
        "model_type": family,
        "text_config": {"model_type": f"{family}_text", **_changed(text, changes)},
    }


def _changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    # Copied deeply enough that a test which edits a list or the rope group cannot reach another test.
    merged = {**fields, **changes}
    return {
        name: value.copy() if isinstance(value, list | dict) else value
        for name, value in merged.items()
        if value is not None
    }
