"""Reading `config.json`: what every family needs, what is refused and that the refusal says where and why."""

import json
from dataclasses import replace

import pytest
from models import mini, mini256, mini_dense, mini_next

from workbench.config import ModelConfig, read_json_object
from workbench.errors import ConfigError

BUILDERS = [mini, mini256, mini_dense, mini_next]


def error_of(raw) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(raw, source="some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ") and "\n" not in message
    return message


# ---- reading


def test_fields_of_the_miniature_configuration():
    config = ModelConfig.from_hf(mini())
    assert config.family == "qwen3_5_moe"
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert config.mlp_types == ("sparse",) * 4
    assert (config.key_dim, config.value_dim, config.conv_dim) == (32, 96, 160)
    assert (config.head_dim, config.rotary_dim, config.mrope_section) == (32, 8, (2, 1, 1))
    assert (config.num_experts, config.num_experts_per_tok, config.is_moe) == (8, 2, True)
    assert (config.norm_topk_prob, config.mtp_num_hidden_layers, config.rope_theta) == (True, 1, 1e7)
    assert config.intermediate_size is None


def test_256_experts():
    config = ModelConfig.from_hf(mini256())
    assert (config.num_experts, config.num_experts_per_tok) == (256, 8)


def test_dense_family_has_no_expert_fields():
    config = ModelConfig.from_hf(mini_dense())
    assert (config.family, config.mlp_types, config.intermediate_size) == ("qwen3_5", ("dense",) * 4, 80)
    assert (config.num_experts, config.norm_topk_prob, config.is_moe) == (None, None, False)


def test_qwen3_next_mixes_dense_and_sparse_layers():
    config = ModelConfig.from_hf(mini_next())
    assert config.mlp_types == ("sparse", "dense", "sparse", "sparse")
    stepped = ModelConfig.from_hf(mini_next(decoder_sparse_step=2, mlp_only_layers=[3]))
    assert stepped.mlp_types == ("dense", "sparse", "dense", "dense")
    assert ModelConfig.from_hf(mini_next(norm_topk_prob=False)).norm_topk_prob is False


@pytest.mark.parametrize("builder", BUILDERS)
def test_flat_and_nested_give_the_same_record(builder):
    raw = builder()
    config = ModelConfig.from_hf(raw)
    if "text_config" in raw:
        assert ModelConfig.from_hf(raw["text_config"]) == config
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert ModelConfig.from_hf(config.to_hf(nested=False)) == config


def test_dtype_tokens_and_training_fields_survive_writing():
    raw = mini(dtype="bfloat16", eos_token_id=[3, 5], bos_token_id=3, initializer_range=0.1)
    config = ModelConfig.from_hf(raw)
    assert (config.dtype, config.eos_token_id, config.bos_token_id) == ("bfloat16", (3, 5), 3)
    assert config.initializer_range == 0.1
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_old_and_new_rotary_fields_give_the_same_record():
    new = mini()
    old = mini(
        rope_parameters=None, rope_theta=10_000_000, partial_rotary_factor=0.25, mrope_section=[2, 1, 1]
    )
    older = mini(rope_parameters=None, rope_theta=1e7, partial_rotary_factor=0.25,
                 rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})  # fmt: skip
    both = mini(rope_theta=1e7, partial_rotary_factor=0.25)
    assert len({ModelConfig.from_hf(raw) for raw in (new, old, older, both)}) == 1


def test_layer_pattern_from_interval_alone():
    config = ModelConfig.from_hf(mini(layer_types=None, full_attention_interval=2))
    assert config.layer_types == ("linear_attention", "full_attention") * 2
    assert ModelConfig.from_hf(mini(full_attention_interval=None)) == ModelConfig.from_hf(mini())


def test_tie_word_embeddings_may_stand_on_the_outer_object_alone():
    raw = mini(tie_word_embeddings=None)
    raw["tie_word_embeddings"] = True
    assert ModelConfig.from_hf(raw).tie_word_embeddings is True


def test_absent_norm_topk_prob_is_the_family_default_and_is_said():
    config = ModelConfig.from_hf(mini_next(norm_topk_prob=None))
    assert config.norm_topk_prob is True
    assert any("norm_topk_prob = true" in line and "family default" in line for line in config.assumed)
    assert not ModelConfig.from_hf(mini_next()).assumed


def test_absent_mtp_field_is_said():
    config = ModelConfig.from_hf(mini(mtp_num_hidden_layers=None))
    assert config.mtp_num_hidden_layers == 0
    assert any("mtp_num_hidden_layers = 0" in line for line in config.assumed)
    assert ModelConfig.from_hf(mini_next(mtp_num_hidden_layers=None, num_nextn_predict_layers=1)) == (
        ModelConfig.from_hf(mini_next())
    )


# ---- refusals


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "hidden_act",
        "rms_norm_eps",
        "tie_word_embeddings",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ],
)
def test_required_field_missing(name):
    assert f"text_config.{name} is missing: expected " in error_of(mini(**{name: None}))


def test_layer_pattern_missing():
    message = error_of(mini(layer_types=None, full_attention_interval=None))
    assert "text_config.layer_types is missing" in message and "full_attention_interval" in message


@pytest.mark.parametrize("name", ["rope_theta", "partial_rotary_factor"])
def test_rotary_field_missing(name):
    raw = mini()
    del raw["text_config"]["rope_parameters"][name]
    assert f"text_config.rope_parameters.{name} is missing: expected " in error_of(raw)


@pytest.mark.parametrize("name", ["decoder_sparse_step", "mlp_only_layers", "intermediate_size"])
def test_qwen3_next_field_missing(name):
    assert f"{name} is missing: expected " in error_of(mini_next(**{name: None}))


def test_dense_width_missing():
    assert "text_config.intermediate_size is missing" in error_of(mini_dense(intermediate_size=None))


REFUSED = {
    "more experts than memory": (
        mini(num_experts=10**9),
        "text_config.num_experts: expected a positive integer of at most 16384",
        "integer 1000000000",
    ),
    "more layers than memory": (
        mini(num_hidden_layers=10**9, layer_types=None, full_attention_interval=4),
        "text_config.num_hidden_layers: expected a positive integer of at most 4096",
    ),
    "string for an integer": (
        mini(head_dim="32"),
        "text_config.head_dim: expected a positive integer",
        'string "32"',
    ),
    "boolean for an integer": (mini(num_experts=True), "num_experts: expected a positive", "boolean true"),
    "float for an integer": (mini(vocab_size=97.0), "vocab_size: expected a positive integer", "number 97.0"),
    "zero": (mini(num_key_value_heads=0), "num_key_value_heads: expected a positive integer", "integer 0"),
    "integer for a boolean": (mini(tie_word_embeddings=1), "tie_word_embeddings: expected true", "integer 1"),
    "boolean for a number": (
        mini(rms_norm_eps=True),
        "rms_norm_eps: expected a positive number",
        "boolean true",
    ),
    "number for a dtype": (mini(dtype=16), "dtype: expected the name", "integer 16"),
    "list for an object": (mini(rope_parameters=[1]), "rope_parameters: expected a JSON object", "list [1]"),
    "value heads not a multiple": (
        mini(linear_num_value_heads=5),
        "linear_num_value_heads: expected a multiple of linear_num_key_heads 2",
        "5",
    ),
    "query heads not a multiple": (
        mini(num_attention_heads=3),
        "num_attention_heads: expected a multiple of num_key_value_heads 2",
        "3",
    ),
    "top-k above experts": (
        mini(num_experts_per_tok=9),
        "num_experts_per_tok: expected at most num_experts 8",
        "9",
    ),
    "activation": (mini(hidden_act="gelu"), 'hidden_act: expected "silu"', '"gelu"'),
    "no output gate": (mini(attn_output_gate=False), "attn_output_gate: expected true", "false"),
    "attention bias": (mini(attention_bias=True), "attention_bias: expected false", "true"),
    "dropout": (mini(attention_dropout=0.1), "attention_dropout: expected 0", "0.1"),
    "state dtype": (mini(mamba_ssm_dtype="bfloat16"), 'mamba_ssm_dtype: expected "float32"', '"bfloat16"'),
    "sigmoid gate": (mini(output_gate_type="sigmoid"), 'output_gate_type: expected "silu"', '"sigmoid"'),
    "sliding window": (mini(use_sliding_window=True), "use_sliding_window: expected false", "true"),
    "own draft embeddings": (
        mini(mtp_use_dedicated_embeddings=True),
        "dedicated_embeddings: expected false",
        "true",
    ),
    "two draft layers": (mini(mtp_num_hidden_layers=2), "mtp_num_hidden_layers: expected 0 or 1", "2"),
    "no renormalisation": (mini(norm_topk_prob=False), "norm_topk_prob: expected true", "false"),
    "dense layer in a sparse family": (mini(mlp_only_layers=[0]), "mlp_only_layers: expected []", "[0]"),
    "sparse step in a sparse family": (mini(decoder_sparse_step=2), "decoder_sparse_step: expected 1", "2"),
    "experts in the dense family": (mini_dense(num_experts=8), "num_experts: expected 0", "8"),
    "dense layer out of range": (
        mini_next(mlp_only_layers=[4]),
        "mlp_only_layers: expected a list of",
        "[4]",
    ),
    "boolean as a layer number": (
        mini_next(mlp_only_layers=[True]),
        "mlp_only_layers: expected a list",
        "[true]",
    ),
    "unknown layer type": (
        mini(layer_types=["linear_attention"] * 3 + ["sliding_attention"]),
        "layer_types[3]",
        '"sliding_attention"',
    ),
    "too few layer types": (mini(layer_types=["full_attention"]), "layer_types: expected 4 entries", "list"),
    "pattern against interval": (
        mini(full_attention_interval=2),
        "layer_types[1] is 'linear_attention'",
        "full_attention_interval 2",
    ),
    "rotary dimension odd": (mini(head_dim=20), "partial_rotary_factor: expected head_dim 20", "it is 5"),
    "rotary dimension not whole": (
        mini(head_dim=30),
        "partial_rotary_factor: expected head_dim 30",
        "it is 7.5",
    ),
    "rotary sections": (
        mini(rope_parameters={**mini()["text_config"]["rope_parameters"], "mrope_section": [11, 11, 10]}),
        "mrope_section: expected parts that sum to half the rotary dimension, 4",
        "[11, 11, 10]",
    ),
    "rotary scaling": (
        mini(
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "factor": 4.0,
            }
        ),
        'rope_parameters.rope_type: expected "default"',
        '"yarn"',
    ),
    "rotary scaling, old field": (
        mini(rope_scaling={"type": "linear", "factor": 2.0}),
        'rope_scaling.type: expected "default"',
        '"linear"',
    ),
    "unknown rotary key": (
        mini(rope_scaling={"factor": 2.0}),
        "rope_scaling.factor: expected only the keys",
        "2.0",
    ),
    "theta twice": (
        mini(rope_theta=10000.0),
        "rope_parameters.rope_theta is number 10000000.0",
        "rope_theta is number 10000.0",
    ),
    "factor twice": (
        mini(partial_rotary_factor=0.5),
        "rope_parameters.partial_rotary_factor is number 0.25",
        "number 0.5",
    ),
    "token outside the vocabulary": (mini(eos_token_id=97), "eos_token_id: expected a token id below", "97"),
    "token of a wrong type": (mini(eos_token_id=["</s>"]), "eos_token_id: expected a token id", '["</s>"]'),
    "two dtypes": (
        mini(dtype="bfloat16", torch_dtype="float16"),
        "dtype and torch_dtype disagree",
        "float16",
    ),
    "own code": (mini(auto_map={"AutoModel": "m.M"}), "text_config.auto_map: expected no code", "never run"),
    "own code, outer": (
        {**mini(), "auto_map": {"AutoModel": "m.M"}},
        "auto_map: expected no code",
        "never run",
    ),
    "unknown model type": ({**mini(), "model_type": "llama"}, "model_type: expected one of", '"llama"'),
    "model types disagree": (
        {**mini(), "model_type": "qwen3_5"},
        "model_type is 'qwen3_5'",
        "qwen3_5_moe_text",
    ),
    "tie disagrees": (
        {**mini(), "tie_word_embeddings": True},
        "tie_word_embeddings is boolean true",
        "false",
    ),
    "size disagrees": (
        {**mini(), "vocab_size": 96},
        "vocab_size is integer 96 at the top level",
        "integer 97",
    ),
    "text_config no object": (
        {**mini(), "text_config": 1},
        "text_config: expected a JSON object",
        "integer 1",
    ),
    "no object": ([1, 2], "expected a JSON object at the top level", "list [1, 2]"),
    "empty": ({}, "model_type is missing", "qwen3_next"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_field_expected_and_found(case):
    raw, *wanted = REFUSED[case]
    message = error_of(raw)
    for part in wanted:
        assert part in message


def test_a_record_changed_in_code_is_checked_too():
    config = ModelConfig.from_hf(mini())
    with pytest.raises(ConfigError, match="linear_num_value_heads: expected a multiple"):
        replace(config, linear_num_value_heads=3)
    with pytest.raises(ConfigError, match="layer_types: expected a tuple of 5 entries"):
        replace(config, num_hidden_layers=5)
    with pytest.raises(ConfigError, match="intermediate_size: expected None"):
        replace(config, intermediate_size=64)


def test_qwen3_next_has_no_nested_layout():
    with pytest.raises(ConfigError, match="no nested layout"):
        ModelConfig.from_hf(mini_next()).to_hf(nested=True)


# ---- files


def test_a_file_that_cannot_be_read_is_not_called_badly_encoded(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config.json: cannot be read: Is a directory$"):
        ModelConfig.from_file(tmp_path)


def test_from_file_and_from_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(mini()))
    assert ModelConfig.from_file(tmp_path) == ModelConfig.from_file(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b'{"model_type": ', "invalid JSON at line 1 column 16"),
        (b"[1]", "expected a JSON object at the top level, found list [1]"),
        (b'{"head_dim": 32, "head_dim": 64}', "key 'head_dim' appears twice"),
        (b'{"rms_norm_eps": NaN}', "NaN is not JSON"),
        (b"\xff\xfe", "cannot be read as UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"", "invalid JSON"),
        (b'{"head_dim": 1' + b"0" * 5000 + b"}", "invalid JSON"),
    ],
)
def test_unreadable_file(tmp_path, content, wanted):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_json_object(path)
    assert str(path) in str(caught.value) and wanted in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: file not found"):
        ModelConfig.from_file(tmp_path)


# ---- transformers


def transformers_config(builder):
    """The transformers configuration object that reads what we write, and its class of the text model."""
    transformers = pytest.importorskip("transformers")
    config = ModelConfig.from_hf(builder())
    text_class = {
        "qwen3_5_moe": "Qwen3_5MoeTextConfig",
        "qwen3_5": "Qwen3_5TextConfig",
        "qwen3_next": "Qwen3NextConfig",
    }[config.family]
    return config, getattr(transformers, text_class).from_dict(config.to_hf(nested=False))


@pytest.mark.parametrize("builder", BUILDERS)
def test_transformers_reads_what_we_write_and_we_read_what_it_saves(builder, tmp_path):
    config, peer = transformers_config(builder)
    assert (peer.head_dim, peer.linear_value_head_dim) == (config.head_dim, config.linear_value_head_dim)
    assert peer.layer_types == list(config.layer_types)
    assert peer.rope_parameters["rope_theta"] == config.rope_theta
    assert peer.rope_parameters["partial_rotary_factor"] == config.partial_rotary_factor
    peer.save_pretrained(tmp_path)
    assert ModelConfig.from_file(tmp_path) == config


@pytest.mark.parametrize("builder", [mini, mini_dense])
def test_transformers_reads_the_nested_layout(builder, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = ModelConfig.from_hf(builder())
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    peer = transformers.AutoConfig.from_pretrained(tmp_path)
    assert peer.text_config.hidden_size == config.hidden_size
    assert peer.text_config.rope_parameters["rope_theta"] == config.rope_theta
    peer.save_pretrained(tmp_path / "saved")
    assert ModelConfig.from_file(tmp_path / "saved") == config


def test_a_rotary_share_other_than_a_quarter_survives_transformers(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config, peer = transformers_config(lambda: mini(rope_parameters=rope))
    peer.save_pretrained(tmp_path)
    assert ModelConfig.from_file(tmp_path) == config
