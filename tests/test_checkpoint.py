"""Checkpoints: layouts read to the same tensors, every byte is accounted for, every bad file is named."""

import json
import math
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from models import mini, mini256, mini_dense, mini_next
from safetensors.torch import load_file, save_file

from workbench.checkpoint import canonical_name, expected_tensors, read_checkpoint, write_checkpoint
from workbench.checkpoint import write as write_module
from workbench.checkpoint.header import read_header
from workbench.config import ModelConfig
from workbench.errors import CheckpointError, ConfigError

CASES = [
    (mini, "official"),
    (mini, "split"),
    (mini256, "official"),
    (mini_dense, "official"),
    (mini_dense, "split"),
    (mini_next, "qwen3_next"),
]
EXPERTS_UP = "layers.0.mlp.experts.gate_up_proj"
A_LOG = "model.language_model.layers.1.linear_attn.A_log"
Z_NAME = "model.language_model.layers.0.linear_attn.in_proj_z.weight"


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values that bf16 holds exactly; what official files keep in fp32 has fp32 values here."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        values = torch.randn(shape, generator=generator) * 0.1
        wide = name.endswith((".A_log", ".linear_attn.norm.weight"))
        tensors[name] = values if wide else values.bfloat16()
        if name.endswith(".dt_bias"):
            tensors[name] = tensors[name].float()  # as it is returned
    return tensors


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf(mini(dtype="bfloat16"))


@pytest.fixture(scope="module")
def tensors(config):
    return random_tensors(config)


@pytest.fixture(scope="module")
def single(config, tensors, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("single") / "checkpoint"
    write_checkpoint(path, config, tensors)
    return path


@pytest.fixture(scope="module")
def sharded(config, tensors, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sharded") / "checkpoint"
    write_checkpoint(path, config, tensors, max_shard_bytes=100_000)
    return path


@pytest.fixture
def copy(single, tmp_path) -> Path:
    """A copy of the single-file checkpoint that a test may damage."""
    return Path(shutil.copytree(single, tmp_path / "copy"))


@pytest.fixture
def sharded_copy(sharded, tmp_path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def error_of(path: Path, **options) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        read_checkpoint(path, **options)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def change_tensors(path: Path, change) -> None:
    """Rewrite model.safetensors after `change(tensors)` edited the dict of stored tensors."""
    file = path / "model.safetensors"
    stored = load_file(file)
    change(stored)
    file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)


def change_header(file: Path, change) -> None:
    """Rewrite the JSON header after `change(header)` edited it; the data stay."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


# ---- reading and writing


@pytest.mark.parametrize("max_shard_bytes", [None, 100_000])
@pytest.mark.parametrize(("builder", "layout"), CASES)
def test_round_trip_is_bit_exact(builder, layout, max_shard_bytes, tmp_path):
    config = ModelConfig.from_hf(builder(dtype="bfloat16"))
    tensors = random_tensors(config)
    narrowing = write_checkpoint(
        tmp_path / "c", config, tensors, layout=layout, max_shard_bytes=max_shard_bytes
    )
    assert all(record.n_flushed == 0 for record in narrowing)
    checkpoint = read_checkpoint(tmp_path / "c")
    assert checkpoint.config == config
    assert_same(checkpoint.tensors, tensors)
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(files) == (1 if max_shard_bytes is None else len(checkpoint.accounting.files))
    assert (len(files) > 1) == (tmp_path / "c" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(("builder", "layout"), CASES)
def test_bytes_add_up_to_the_size_of_the_files(builder, layout, tmp_path):
    config = ModelConfig.from_hf(builder())
    write_checkpoint(tmp_path, config, random_tensors(config), layout=layout, max_shard_bytes=60_000)
    accounting = read_checkpoint(tmp_path).accounting
    on_disk = {file.name: file.stat().st_size for file in tmp_path.glob("*.safetensors")}
    assert {file.name: file.file_bytes for file in accounting.files} == on_disk
    for file in accounting.files:
        assert file.header_bytes + file.tensor_bytes == file.file_bytes
        assert sum(row.n_bytes for row in accounting.rows if row.file == file.name) == file.tensor_bytes
    by_class = sum(n_bytes for _, n_bytes in accounting.totals.values())
    assert by_class + accounting.header_bytes == accounting.file_bytes == sum(on_disk.values())
    stored = [row.stored_name for row in accounting.rows if row.file]
    headers = [read_header(file) for file in tmp_path.glob("*.safetensors")]
    assert len(stored) == len(set(stored)) == sum(len(header.tensors) for header in headers)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(file.tensor_bytes for file in accounting.files)
    assert not accounting.notes


def test_accounting_refuses_bytes_that_do_not_add_up(single):
    accounting = read_checkpoint(single).accounting
    with pytest.raises(CheckpointError, match="expected header and tensors to add up"):
        type(accounting)(accounting.rows[1:], accounting.files)


def test_classes_of_the_split_layout(config, tensors, tmp_path):
    write_checkpoint(tmp_path, config, tensors, layout="split")
    totals = read_checkpoint(tmp_path).accounting.totals
    n_stacks = 2 * (config.num_hidden_layers + 1)
    assert totals["merged"][0] == 3 * config.num_experts * (config.num_hidden_layers + 1)
    assert totals["loaded"][0] == len(tensors) - n_stacks
    assert totals["skipped"] == totals["unexpected"] == totals["missing"] == (0, 0)


def test_accounting_as_a_table_and_as_text(single):
    accounting = read_checkpoint(single).accounting
    table = accounting.to_frame()
    assert list(table.columns[:4]) == ["kind", "file", "stored_name", "canonical"]
    assert len(table) == len(accounting.rows)
    lines = accounting.summary().splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["loaded", "merged", "skipped", "unexpected", "missing"]
    assert f"{accounting.file_bytes:,} B = size of the files" in lines[-1]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_prefixes_of_all_wrappers_read_to_the_same_tensors(prefix, copy, tensors):
    def rename(stored):
        for name in list(stored):
            if name.startswith("model.language_model."):
                stored[prefix + name.removeprefix("model.language_model.")] = stored.pop(name)
        if prefix == "language_model.model.":
            stored["language_model.lm_head.weight"] = stored.pop("lm_head.weight")

    change_tensors(copy, rename)
    checkpoint = read_checkpoint(copy)
    assert_same(checkpoint.tensors, tensors)
    assert checkpoint.accounting.totals["loaded"][0] == len(tensors)


def test_vision_tower_and_rotary_frequencies_are_skipped_with_the_reason(copy, tensors):
    def add(stored):
        stored["model.visual.patch_embed.proj.weight"] = torch.ones(2, 3)
        stored["model.language_model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    change_tensors(copy, add)
    checkpoint = read_checkpoint(copy)
    assert_same(checkpoint.tensors, tensors)
    skipped = {row.stored_name: row.reason for row in checkpoint.accounting.rows if row.kind == "skipped"}
    assert "vision tower" in skipped["model.visual.patch_embed.proj.weight"]
    assert "rotary" in skipped["model.language_model.layers.3.self_attn.rotary_emb.inv_freq"]
    assert "model.visual.patch_embed.proj.weight" in error_of(copy, skip={})
    named = read_checkpoint(copy, skip={"*visual*": "mine", "*inv_freq": "mine"}).accounting
    assert named.totals["skipped"] == (2, 40)


def test_experts_of_the_head_may_be_split_while_others_are_stacked(copy, config, tensors):
    def split(stored):
        up, down = (stored.pop(f"mtp.layers.0.mlp.experts.{part}_proj") for part in ("gate_up", "down"))
        for expert in range(config.num_experts):
            gate_rows, up_rows = up[expert].chunk(2)
            for matrix, part in (("gate", gate_rows), ("up", up_rows), ("down", down[expert])):
                stored[f"mtp.layers.0.mlp.experts.{expert}.{matrix}_proj.weight"] = part.clone()

    change_tensors(copy, split)
    assert_same(read_checkpoint(copy).tensors, tensors)


def test_single_file_path_and_links(single, sharded, tensors, tmp_path):
    assert_same(read_checkpoint(single / "model.safetensors").tensors, tensors)
    for file in sharded.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert_same(read_checkpoint(tmp_path).tensors, tensors)


def test_tensors_outlive_the_file(copy, tensors):
    checkpoint = read_checkpoint(copy)
    shutil.rmtree(copy)
    assert_same(checkpoint.tensors, tensors)


def test_unaligned_tensors_are_read(copy, tensors):
    """The format allows a file whose tensors do not lie at multiples of their size."""
    file = copy / "model.safetensors"
    stored = {"odd": torch.ones(1, dtype=torch.bfloat16)} | load_file(file)
    header, data = {}, b""
    for name, tensor in stored.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    checkpoint = read_checkpoint(copy, allow_unexpected=("odd",))
    assert_same(checkpoint.tensors, tensors)
    assert all(t.data_ptr() % t.element_size() == 0 for t in checkpoint.tensors.values())


def test_tensors_of_the_35b_model_fill_its_published_size():
    """Index of the official file: 71,903,645,408 bytes at 2 per value, its 333 vision tensors included."""
    config = ModelConfig.from_hf(
        mini256(
            vocab_size=248320,
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            layer_types=None,
            rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        )
    )
    shapes = expected_tensors(config)
    vision = 446_571_248  # values in a vision tower of depth 27, width 1152, MLP 4304, output 2048
    assert sum(math.prod(shape) for shape in shapes.values()) == 71_903_645_408 // 2 - vision
    assert shapes["layers.0.linear_attn.in_proj_qkv.weight"] == (8192, 2048)
    assert shapes["layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert "layers.3.linear_attn.A_log" not in shapes


@pytest.mark.parametrize(("builder", "count"), [(mini, 19), (mini_dense, 15), (mini_next, 19)])
def test_number_of_mtp_tensors(builder, count):
    names = expected_tensors(ModelConfig.from_hf(builder()))
    assert len([name for name in names if name.startswith("mtp.")]) == count


# ---- tied embeddings, multi-token-prediction head, allowed differences


def test_tied_head_is_skipped_when_equal_and_refused_when_not(config, tmp_path):
    tied = ModelConfig.from_hf(mini(tie_word_embeddings=True))
    tensors = random_tensors(tied)
    assert "lm_head.weight" not in tensors
    write_checkpoint(tmp_path, tied, tensors)
    assert_same(read_checkpoint(tmp_path).tensors, tensors)

    change_tensors(tmp_path, lambda stored: stored.update({"lm_head.weight": tensors["embed_tokens.weight"]}))
    checkpoint = read_checkpoint(tmp_path)
    assert_same(checkpoint.tensors, tensors)
    (row,) = [row for row in checkpoint.accounting.rows if row.kind == "skipped"]
    assert row.stored_name == "lm_head.weight" and "equal to the embedding" in row.reason

    change_tensors(tmp_path, lambda stored: stored["lm_head.weight"][0].add_(1))
    message = error_of(tmp_path)
    assert (
        "lm_head.weight: expected a copy of embed_tokens.weight" in message
        and "found other values" in message
    )


def test_untied_head_missing_says_why(copy):
    change_tensors(copy, lambda stored: stored.pop("lm_head.weight"))
    assert "1 tensors missing: lm_head.weight" in error_of(copy)
    assert "tie_word_embeddings" in error_of(copy)


def without_mtp(stored):
    for name in [name for name in stored if name.startswith("mtp.")]:
        del stored[name]


def test_promised_mtp_head_missing(copy, tensors):
    change_tensors(copy, without_mtp)
    message = error_of(copy)
    assert "19 tensors missing: mtp." in message and 'allow_missing=("mtp.*",)' in message
    checkpoint = read_checkpoint(copy, allow_missing="mtp.*")  # a single pattern, not its letters
    assert checkpoint.config.mtp_num_hidden_layers == 0
    assert list(checkpoint.tensors) == list(expected_tensors(checkpoint.config))
    assert any("no mtp.* tensors" in note for note in checkpoint.accounting.notes)


def test_mtp_tensors_against_a_configuration_without_the_head(copy):
    file = copy / "config.json"
    file.write_text(file.read_text().replace('"mtp_num_hidden_layers": 1', '"mtp_num_hidden_layers": 0'))
    message = error_of(copy)
    assert "19 tensors unexpected: mtp." in message and 'allow_unexpected=("mtp.*",)' in message
    totals = read_checkpoint(copy, allow_unexpected=("mtp.*",)).accounting.totals
    assert totals["unexpected"][0] == 19


def test_mtp_head_of_a_silent_configuration_is_taken_from_the_weights(tmp_path):
    config = ModelConfig.from_hf(mini_next())
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["mtp_num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.config.mtp_num_hidden_layers == 1
    assert_same(checkpoint.tensors, tensors)
    assert any("MTP head" in note for note in checkpoint.accounting.notes)
    assert not checkpoint.config.is_assumed("mtp_num_hidden_layers")


def test_a_single_pattern_does_not_allow_more_than_it_says(copy):
    change_tensors(copy, lambda stored: stored.pop("lm_head.weight"))
    assert "lm_head.weight" in error_of(copy, allow_missing="mtp.*")


def test_part_of_the_head_missing_is_an_error_even_if_another_part_may_be(copy):
    change_tensors(copy, lambda stored: (stored.pop("mtp.fc.weight"), stored.pop("mtp.norm.weight")))
    assert "1 tensors missing: mtp.norm.weight" in error_of(copy, allow_missing=("mtp.fc.*",))
    checkpoint = read_checkpoint(copy, allow_missing=("mtp.*",))
    assert checkpoint.config.mtp_num_hidden_layers == 1
    assert {row.canonical for row in checkpoint.accounting.rows if row.kind == "missing"} == {
        "mtp.fc.weight",
        "mtp.norm.weight",
    }


# ---- bad files: one line with file, tensor, expected and found


def test_truncated_file(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    message = error_of(copy)
    assert re.search(
        r"model\.safetensors: truncated: tensor \S+ ends at byte \d+ .*expected.*found \d+", message
    )


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "truncated: expected at least 8 bytes, found 0"),
        (b"1234", "truncated: expected at least 8 bytes, found 4"),
        (
            struct.pack("<Q", 1000) + b"{}",
            "truncated or no safetensors file: expected a header of 1000 bytes",
        ),
        (struct.pack("<Q", 1 << 40), "header length: expected at most 100000000 bytes, found 1099511627776"),
        (b"PK\x03\x04" + b"1" * 100, "header length: expected at most"),
        (struct.pack("<Q", 2) + b"no", "header: expected JSON"),
        (struct.pack("<Q", 2) + b"[]", "header: expected a JSON object, found list"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "header: expected JSON"),
    ],
)
def test_damaged_header(copy, content, wanted):
    (copy / "model.safetensors").write_bytes(content)
    message = error_of(copy)
    assert "model.safetensors: " in message and wanted in message


HEADER_FAULTS = {
    "shape against bytes": (
        lambda entry: entry.update(shape=[3, 3]),
        "data_offsets: expected 18 bytes for BF16 [3, 3]",
    ),
    "negative shape": (
        lambda entry: entry.update(shape=[-96, 64]),
        "shape: expected a list of non-negative integers",
    ),
    "huge shape": (lambda entry: entry.update(shape=[1 << 62, 1 << 62]), "data_offsets: expected"),
    "unknown dtype": (lambda entry: entry.update(dtype="Q4"), "dtype: expected one of F64, F32"),
    "missing dtype": (
        lambda entry: entry.pop("dtype"),
        "header entry: expected dtype, shape and data_offsets",
    ),
    "offsets reversed": (
        lambda entry: entry["data_offsets"].reverse(),
        "data_offsets: expected begin and end",
    ),
    "offsets out of range": (
        lambda entry: entry.update(data_offsets=[o + 10**9 for o in entry["data_offsets"]]),
        "ends at byte",
    ),
    "overlap": (
        lambda entry: entry.update(data_offsets=[o - 128 for o in entry["data_offsets"]]),
        "overlaps the tensor before it: expected it to begin at byte",
    ),
    "gap": (
        lambda entry: entry.update(
            shape=[95, 64], data_offsets=[entry["data_offsets"][0] + 128, entry["data_offsets"][1]]
        ),
        "leaves a gap before it: expected it to begin at byte",
    ),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_header_entry_that_contradicts_the_file(copy, fault):
    change, wanted = HEADER_FAULTS[fault]
    change_header(copy / "model.safetensors", lambda header: change(header[Z_NAME]))
    message = error_of(copy)
    assert "model.safetensors: " in message and Z_NAME in message and wanted in message


def test_name_twice_in_one_header(copy):
    file = copy / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    text = content[8 : 8 + length].replace(b"in_proj_b.weight", b"in_proj_a.weight")
    file.write_bytes(content[:8] + text + content[8 + length :])
    assert re.search(r"header: expected each name once, found '\S+in_proj_a.weight' twice", error_of(copy))


def test_bytes_that_belong_to_no_tensor(copy):
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"xxxx")
    assert "4 bytes at the end belong to no tensor" in error_of(copy)


def test_wrong_shape(copy):
    change_tensors(copy, lambda stored: stored.update({Z_NAME: stored[Z_NAME].t().contiguous()}))
    message = error_of(copy)
    assert (
        f"model.safetensors: tensor {Z_NAME}: expected shape [96, 64]" in message
        and "found [64, 96]" in message
    )


@pytest.mark.parametrize(
    ("dtype", "found", "why"),
    [
        (torch.int64, "found I64", "integers, as in quantised checkpoints"),
        (torch.float8_e4m3fn, "found F8_E4M3", "scaled weights of 8 bits"),
        (torch.bool, "found BOOL", "integers"),
    ],
)
def test_wrong_dtype(copy, dtype, found, why):
    change_tensors(copy, lambda stored: stored.update({Z_NAME: stored[Z_NAME].to(dtype)}))
    message = error_of(copy)
    assert f"model.safetensors: tensor {Z_NAME}: expected dtype F64, F32, F16, BF16" in message
    assert found in message and why in message


def test_scales_of_a_quantisation_scheme(copy):
    change_tensors(copy, lambda stored: stored.update({Z_NAME + "_scale_inv": torch.ones(1)}))
    message = error_of(copy)
    assert f"tensor {Z_NAME}_scale_inv: expected unquantised weights" in message


@pytest.mark.parametrize("level", ["outer", "text"])
def test_quantised_configuration(copy, level):
    raw = json.loads((copy / "config.json").read_text())
    (raw if level == "outer" else raw["text_config"])["quantization_config"] = {"quant_method": "fp8"}
    (copy / "config.json").write_text(json.dumps(raw))
    message = error_of(copy)
    assert "config.json: quantization_config: expected unquantised weights, found method 'fp8'" in message


def test_experts_of_different_dtypes(config, tensors, tmp_path):
    write_checkpoint(tmp_path, config, tensors, layout="split")
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    change_tensors(tmp_path, lambda stored: stored.update({name: stored[name].float()}))
    assert f"tensor {name}: expected dtype BF16 as in" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "1 NaN and 0 Inf, first nan"), (float("inf"), "1 Inf")]
)
def test_nan_and_inf_in_weights(copy, value, text):
    change_tensors(copy, lambda stored: stored[Z_NAME][5].index_fill_(0, torch.tensor(7), value))
    message = error_of(copy)
    assert f"model.safetensors: tensor {Z_NAME}: expected finite values, found " in message
    assert text in message and "at [5, 7]" in message
    checkpoint = read_checkpoint(copy, allow_nonfinite=("*in_proj_z.weight",))
    assert not checkpoint.tensors["layers.0.linear_attn.in_proj_z.weight"].isfinite().all()


def test_large_tensors_are_checked_block_by_block(copy, monkeypatch):
    """Nothing is lost at the borders of the blocks, and the place is that in the whole tensor."""
    for module in ("read", "accounting"):
        monkeypatch.setattr(f"workbench.checkpoint.{module}.BLOCK_ELEMENTS", 7)

    def change(stored):
        stored[Z_NAME][95, 63] = 70000.0
        stored[Z_NAME][0, 0] = 1e-9

    change_tensors(copy, change)
    records = read_checkpoint(copy, dtype=torch.float16).accounting.narrowing
    (record,) = [
        record for record in records if record.name.endswith("layers.0.linear_attn.in_proj_z.weight")
    ]
    assert (record.n_overflow, record.n_flushed, record.absmax) == (1, 1, 70144.0)
    change_tensors(copy, lambda stored: stored[Z_NAME][95, 62:].fill_(float("nan")))
    assert "found 2 NaN and 0 Inf, first nan at [95, 62]" in error_of(copy)


def test_minus_infinity_in_a_log_is_named(copy):
    change_tensors(copy, lambda stored: stored[A_LOG].index_fill_(0, torch.tensor(2), float("-inf")))
    message = error_of(copy)
    assert f"tensor {A_LOG}: " in message and "first -inf at [2]" in message
    assert "A is exactly 0" in message and "never forget" in message
    assert read_checkpoint(copy, allow_nonfinite=("*.A_log",)).tensors["layers.1.linear_attn.A_log"][
        2
    ] == float("-inf")


def test_renamed_experts_are_not_only_unexpected_but_missing(copy):
    def rename(stored):
        for name in [name for name in stored if name.endswith("experts.gate_up_proj") and "layers" in name]:
            stored[name + "s"] = stored.pop(name)

    change_tensors(copy, rename)
    message = error_of(copy)
    assert "tensors missing: layers.{0-3}.mlp.experts.gate_up_proj" in message
    assert "tensors unexpected: model.language_model.layers.{0-3}.mlp.experts.gate_up_projs" in message


def test_partial_set_of_experts_names_what_is_missing(config, tensors, tmp_path):
    write_checkpoint(tmp_path, config, tensors, layout="split")

    def remove(stored):
        del stored["model.layers.2.mlp.experts.5.up_proj.weight"]
        del stored["model.layers.2.mlp.experts.6.up_proj.weight"]

    change_tensors(tmp_path, remove)
    assert "2 tensors missing: layers.2.mlp.experts.{5-6}.up_proj.weight" in error_of(tmp_path)


def test_expert_beyond_the_configured_number(config, tensors, tmp_path):
    write_checkpoint(tmp_path, config, tensors, layout="split")
    name = "model.layers.0.mlp.experts.8.up_proj.weight"
    change_tensors(tmp_path, lambda stored: stored.update({name: torch.ones(32, 64)}))
    assert f"1 tensors unexpected: {name}" in error_of(tmp_path)


def test_two_forms_of_the_same_experts(copy):
    name = "model.language_model.layers.0.mlp.experts.3.up_proj.weight"
    change_tensors(copy, lambda stored: stored.update({name: torch.ones(32, 64, dtype=torch.bfloat16)}))
    message = error_of(copy)
    assert f"tensor {name})" in message and "expected the experts of a layer in one form" in message
    assert "as one tensor per expert (" in message and "as one tensor down_proj" in message


def test_two_names_for_the_same_tensor(copy):
    change_tensors(copy, lambda stored: stored.update({"model.norm.weight": torch.ones(64)}))
    assert "expected one tensor for norm.weight, found" in error_of(copy)


def test_unexpected_tensor_may_be_allowed_by_name(copy):
    change_tensors(copy, lambda stored: stored.update({"extra.bias": torch.ones(3)}))
    assert "1 tensors unexpected: extra.bias" in error_of(copy)
    accounting = read_checkpoint(copy, allow_unexpected=("extra.*",)).accounting
    assert accounting.totals["unexpected"] == (1, 12)


# ---- bad sets of files


def edit_index(path: Path, change) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def shards_of(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def test_index_names_a_missing_file(sharded_copy):
    shards_of(sharded_copy)[1].unlink()
    message = error_of(sharded_copy)
    assert "index.json: names file model-00002-of-" in message and "expected it to hold" in message


def test_shard_missing_from_the_index(sharded_copy):
    shards = shards_of(sharded_copy)
    edit_index(
        sharded_copy,
        lambda index: index.update(
            weight_map={k: v for k, v in index["weight_map"].items() if v != shards[1].name}
        ),
    )
    assert f"{shards[1].name}: expected in model.safetensors.index.json, found no entry" in error_of(
        sharded_copy
    )


def test_tensor_missing_from_the_index(sharded_copy):
    edit_index(sharded_copy, lambda index: index["weight_map"].pop("lm_head.weight"))
    message = error_of(sharded_copy)
    assert "tensor lm_head.weight: expected model.safetensors.index.json to name" in message
    assert "found no entry" in message


def test_index_names_a_tensor_that_is_not_in_the_file(sharded_copy):
    shard = shards_of(sharded_copy)[0].name
    edit_index(sharded_copy, lambda index: index["weight_map"].update({"ghost.weight": shard}))
    assert f"{shard}: tensor ghost.weight: expected there by model.safetensors.index.json" in error_of(
        sharded_copy
    )


def test_tensor_in_two_shards(sharded_copy):
    first, second = shards_of(sharded_copy)[:2]
    name = read_header(first).tensors[0].name
    stored = load_file(second) | {name: load_file(first)[name]}
    second.unlink()
    save_file(stored, second)
    assert f"tensor {name}: expected in one file, found in {first.name} too" in error_of(sharded_copy)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "x.bin", 3]
)
def test_index_that_points_elsewhere(sharded_copy, name):
    edit_index(sharded_copy, lambda index: index["weight_map"].update({"lm_head.weight": name}))
    message = error_of(sharded_copy)
    assert "weight_map['lm_head.weight']: expected the plain name of a .safetensors file" in message


def test_index_without_a_weight_map(sharded_copy):
    edit_index(sharded_copy, lambda index: index.pop("weight_map"))
    assert "weight_map: expected an object" in error_of(sharded_copy)


def test_index_that_is_not_json(sharded_copy):
    (sharded_copy / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json: invalid JSON" in error_of(sharded_copy)


def test_shards_without_an_index(sharded_copy):
    (sharded_copy / "model.safetensors.index.json").unlink()
    assert "expected model.safetensors.index.json beside" in error_of(sharded_copy)
    for shard in shards_of(sharded_copy)[1:]:
        shard.unlink()
    assert "is shard 1 of" in error_of(sharded_copy)


def test_wrong_total_size_is_noted(sharded_copy):
    edit_index(sharded_copy, lambda index: index["metadata"].update(total_size=1))
    (note,) = read_checkpoint(sharded_copy).accounting.notes
    assert "total_size is 1 but the tensors take" in note


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "old.ckpt", "w.pkl"])
def test_pickled_weights_are_refused(copy, name):
    (copy / name).write_bytes(b"\x80\x04.")
    assert f"{name}: expected .safetensors, found pickled weights" in error_of(copy)
    (copy / "model.safetensors").unlink()
    assert "found pickled weights" in error_of(copy)


def test_pickled_file_given_by_name_is_refused(copy):
    (copy / "model.pt").write_bytes(b"\x80\x04.")
    assert "found pickled weights" in error_of(copy / "model.pt")


def test_files_of_a_training_program_are_noted(copy):
    (copy / "training_args.bin").write_bytes(b"\x80\x04.")
    (note,) = read_checkpoint(copy).accounting.notes
    assert "training_args.bin" in note


def test_code_in_the_checkpoint_is_refused(copy):
    (copy / "modeling_mine.py").write_text("raise SystemExit")
    assert "modeling_mine.py: Python code in a checkpoint" in error_of(copy)
    (copy / "modeling_mine.py").unlink()
    raw = json.loads((copy / "config.json").read_text()) | {"auto_map": {"AutoModel": "modeling_mine.M"}}
    (copy / "config.json").write_text(json.dumps(raw))
    assert "auto_map" in error_of(copy) and "never run" in error_of(copy)


def test_nothing_there(tmp_path, copy):
    assert "config.json: file not found" in error_of(tmp_path)
    assert "nowhere: not found; expected a checkpoint directory" in error_of(tmp_path / "nowhere")
    (copy / "model.safetensors").unlink()
    assert "expected model.safetensors or model.safetensors.index.json, found neither" in error_of(copy)


def test_no_data_is_read_before_every_header_is_checked(sharded_copy, monkeypatch):
    """A fault in the last file must show before the first tensor is loaded."""
    last = shards_of(sharded_copy)[-1]
    last.write_bytes(last.read_bytes()[:-1])

    def refuse(*args, **kwargs):
        raise AssertionError("data were read")

    monkeypatch.setattr("workbench.checkpoint.read.safe_open", refuse)
    assert "truncated" in error_of(sharded_copy)


# ---- narrowing


def test_fp16_overflow_and_flush_are_counted_per_tensor(config, tensors, tmp_path):
    name = "layers.0.linear_attn.in_proj_z.weight"
    changed = dict(tensors)
    changed[name] = tensors[name].clone()
    changed[name][0, :3] = 70000.0  # above 65504
    changed[name][1, :5] = 1e-9  # below half of the smallest subnormal, 2**-24
    write_checkpoint(tmp_path, config, changed)
    checkpoint = read_checkpoint(tmp_path, dtype=torch.float16)
    records = {record.name: record for record in checkpoint.accounting.narrowing}
    record = records[name]
    assert (record.from_dtype, record.to_dtype, record.numel) == ("bfloat16", "float16", 96 * 64)
    assert (record.n_overflow, record.n_flushed, record.absmax) == (3, 5, 70144.0)
    others = [r for r in records.values() if r.name != name]
    assert sum(r.n_overflow for r in others) == 0
    assert checkpoint.tensors[name].dtype == torch.float16
    assert checkpoint.tensors[name][0, :3].isinf().all() and (checkpoint.tensors[name][1, :5] == 0).all()
    assert len(checkpoint.accounting.narrowing_frame()) == len(records)


def test_bf16_flush_is_counted(config, tensors, tmp_path):
    name = "norm.weight"
    changed = {k: v.float() for k, v in tensors.items()}
    changed[name][:4] = torch.tensor([1e-41, 1e-45, -1e-45, 1e-38])  # the smallest of bf16 is 9.2e-41
    write_checkpoint(tmp_path, config, changed, dtype=torch.float32)
    checkpoint = read_checkpoint(tmp_path, dtype=torch.bfloat16)
    (record,) = [r for r in checkpoint.accounting.narrowing if r.name == name]
    assert (record.n_overflow, record.n_flushed) == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_rule(single, dtype):
    checkpoint = read_checkpoint(single, dtype=dtype)
    for name, tensor in checkpoint.tensors.items():
        keeps_float32 = name.endswith((".A_log", ".dt_bias", ".linear_attn.norm.weight"))
        assert tensor.dtype == (torch.float32 if keeps_float32 else dtype), name
    if dtype not in (torch.float16,):
        assert not checkpoint.accounting.narrowing


def test_integer_dtype_is_refused(single):
    with pytest.raises(CheckpointError, match="dtype: expected one of"):
        read_checkpoint(single, dtype=torch.int8)


# ---- writing


def test_stored_dtypes_are_the_official_ones(single):
    dtypes = {tensor.name: tensor.dtype for tensor in read_header(single / "model.safetensors").tensors}
    float32 = {name for name, dtype in dtypes.items() if dtype == "F32"}
    assert set(dtypes.values()) == {"BF16", "F32"}
    assert float32 == {name for name in dtypes if name.endswith((".A_log", ".linear_attn.norm.weight"))}
    assert json.loads((single / "config.json").read_text())["text_config"]["dtype"] == "bfloat16"


def test_dtype_none_keeps_what_it_is_given(config, tensors, tmp_path):
    given = {name: tensor.double() for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, config, given, dtype=None)
    assert {t.dtype for t in read_header(tmp_path / "model.safetensors").tensors} == {"F64"}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda t: t.pop("norm.weight"), "found 1 missing: norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "found 1 unexpected: extra"),
        (lambda t: t.update({"norm.weight": torch.ones(63)}), "norm.weight: expected shape [64]"),
        (lambda t: t.update({"norm.weight": torch.ones(64, dtype=torch.int32)}), "of floating point numbers"),
        (
            lambda t: t.update({"norm.weight": torch.full((64,), torch.nan)}),
            "norm.weight: expected finite values",
        ),
        (
            lambda t: t.update({"norm.weight": torch.full((64,), 1e39, dtype=torch.float64)}),
            "norm.weight: expected values within bfloat16, found 64 of 64 beyond it",
        ),
    ],
)
def test_writer_refuses_what_a_reader_would(config, tensors, tmp_path, change, wanted):
    changed = dict(tensors)
    change(changed)
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "c", config, changed)
    assert wanted in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_writer_refuses_layouts_and_files_that_do_not_fit(config, tensors, tmp_path):
    for options, wanted in (
        ({"layout": "gguf"}, "layout: expected one of"),
        ({"layout": "qwen3_next"}, "layout: expected one that family qwen3_5_moe has"),
        ({"dtype": torch.int8}, "dtype: expected one of"),
        ({"extra_files": {"../x": ""}}, "extra_files: expected plain file names"),
        ({"extra_files": {"config.json": ""}}, "extra_files: expected plain file names"),
        ({"extra_files": {"model.safetensors": ""}}, "extra_files: expected plain file names"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(wanted)):
            write_checkpoint(tmp_path / "c", config, tensors, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected to write a checkpoint directory"):
        write_checkpoint(tmp_path / "file", config, tensors)


def test_nonfinite_values_are_written_when_allowed(config, tensors, tmp_path):
    name = "layers.1.linear_attn.A_log"
    changed = dict(tensors) | {name: torch.full((4,), float("-inf"))}
    write_checkpoint(tmp_path, config, changed, allow_nonfinite=("*.A_log",))
    assert "A is exactly 0" in error_of(tmp_path)


def test_parts_of_shared_memory_can_be_written(config, tensors, tmp_path):
    flat = torch.zeros(128, dtype=torch.bfloat16)
    changed = dict(tensors) | {"norm.weight": flat[:64], "mtp.norm.weight": flat[64:]}
    write_checkpoint(tmp_path, config, changed)
    assert_same(read_checkpoint(tmp_path).tensors, changed)


def test_extra_files_and_permissions(config, tensors, tmp_path):
    write_checkpoint(tmp_path / "c", config, tensors, extra_files={"tokenizer.json": "{}", "note.txt": b"a"})
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "{}"
    usual = tmp_path / "usual"
    usual.write_text("")
    for file in (tmp_path / "c").iterdir():
        assert file.stat().st_mode == usual.stat().st_mode, file


def test_writing_over_a_checkpoint_leaves_no_old_weights_and_keeps_other_files(config, tensors, tmp_path):
    write_checkpoint(tmp_path, config, tensors, max_shard_bytes=100_000)
    (tmp_path / "curve.csv").write_text("mine")
    other = random_tensors(config, seed=1)
    write_checkpoint(tmp_path, config, other)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "curve.csv",
        "model.safetensors",
    ]
    assert_same(read_checkpoint(tmp_path).tensors, other)


def test_failure_while_writing_leaves_the_old_checkpoint(copy, config, tensors, monkeypatch):
    before = {file.name: file.read_bytes() for file in copy.iterdir()}

    def fail(shard, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_module, "save_file", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(copy, config, random_tensors(config, seed=1))
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(copy.parent / "new", config, tensors)
    assert sorted(file.name for file in copy.parent.iterdir()) == ["copy"]


def test_interrupted_renames_leave_old_new_or_no_checkpoint(sharded, config, tensors, tmp_path, monkeypatch):
    """Stop before the n-th change of the directory, for every n."""
    other = random_tensors(config, seed=1)
    outcomes = set()
    for stop in range(40):
        path = Path(shutil.copytree(sharded, tmp_path / f"run{stop}"))
        calls = 0

        def counted(function, path=path, stop=stop):
            def wrapper(self, *args, **kwargs):
                nonlocal calls
                if self.parent == path or any(Path(arg).parent == path for arg in args):
                    calls += 1
                    if calls > stop:
                        raise KeyboardInterrupt
                return function(self, *args, **kwargs)

            return wrapper

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            try:
                write_checkpoint(path, config, other, max_shard_bytes=150_000)
            except KeyboardInterrupt:
                interrupted = True
            else:
                interrupted = False
        try:
            found = read_checkpoint(path).tensors
        except ConfigError as fault:
            assert "config.json: file not found" in str(fault)
            outcomes.add("none")
        else:
            is_new = torch.equal(found["norm.weight"], other["norm.weight"])
            assert_same(found, other if is_new else tensors)
            outcomes.add("new" if is_new else "old")
        if not interrupted:
            break
    assert outcomes == {"old", "none", "new"} and not interrupted


# ---- transformers


def transformers_model(kind: str, dtype=torch.bfloat16):
    """A tiny model of a transformers class with random weights, built from our configuration of it."""
    transformers = pytest.importorskip("transformers")
    builder, config_class, model_class = {
        "moe": (mini, "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
        "tied": (lambda: mini(tie_word_embeddings=True), "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
        "dense": (mini_dense, "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
        "next": (mini_next, "Qwen3NextConfig", "Qwen3NextForCausalLM"),
        "multimodal": (mini, "Qwen3_5MoeTextConfig", "Qwen3_5MoeForConditionalGeneration"),
    }[kind]
    config = ModelConfig.from_hf(builder())
    peer_config = getattr(transformers, config_class).from_dict(config.to_hf(nested=False))
    if kind == "multimodal":
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
        }
        vision |= {"patch_size": 2, "num_position_embeddings": 4}
        peer_config = transformers.Qwen3_5MoeConfig(text_config=peer_config.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(peer_config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # norms too, which start as constants
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return config, model


def canonical_state(config: ModelConfig, model) -> dict[str, torch.Tensor]:
    """The peer's own parameters under canonical names; the fused projections taken apart row by row."""
    state = {
        canonical_name(name): tensor for name, tensor in model.state_dict().items() if "visual" not in name
    }
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    ratio = config.linear_num_value_heads // config.linear_num_key_heads
    for name in [name for name in state if name.endswith("in_proj_qkvz.weight")]:
        rows = iter(state.pop(name))
        parts = {"q": [], "k": [], "v": [], "z": []}
        for _ in range(config.linear_num_key_heads):
            for part, count in (("q", key), ("k", key), ("v", ratio * value), ("z", ratio * value)):
                parts[part] += [next(rows) for _ in range(count)]
        state[name.replace("qkvz", "qkv")] = torch.stack(parts["q"] + parts["k"] + parts["v"])
        state[name.replace("qkvz", "z")] = torch.stack(parts["z"])
    for name in [name for name in state if name.endswith("in_proj_ba.weight")]:
        rows = iter(state.pop(name))
        parts = {"b": [], "a": []}
        for _ in range(config.linear_num_key_heads):
            for part in ("b", "a"):
                parts[part] += [next(rows) for _ in range(ratio)]
        for part, values in parts.items():
            state[name.replace("in_proj_ba", f"in_proj_{part}")] = torch.stack(values)
    return state


@pytest.mark.parametrize("kind", ["moe", "tied", "dense", "next", "multimodal"])
def test_what_transformers_saves_reads_to_its_own_parameters(kind, tmp_path):
    config, model = transformers_model(kind)
    model.save_pretrained(tmp_path)
    assert "mtp" in error_of(tmp_path)  # its classes drop the head although the configuration has one
    checkpoint = read_checkpoint(tmp_path, allow_missing=("mtp.*",))
    wanted = canonical_state(config, model)
    assert set(checkpoint.tensors) == set(wanted)
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
    totals = checkpoint.accounting.totals
    assert (totals["merged"][0] > 0) == (kind != "dense") and (totals["skipped"][0] > 0) == (
        kind == "multimodal"
    )


@pytest.mark.parametrize("kind", ["moe", "tied", "dense", "next"])
def test_transformers_loads_what_is_written(kind, tmp_path):
    config, model = transformers_model(kind, torch.float32)
    tensors = random_tensors(config)
    layout = "qwen3_next" if kind == "next" else "split"
    write_checkpoint(tmp_path, config, tensors, layout=layout, max_shard_bytes=200_000)
    loaded, report = type(model).from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    for name, tensor in canonical_state(config, loaded).items():
        assert torch.equal(tensor, tensors[name].float()), name


@pytest.mark.parametrize(
    ("builder", "model_class"), [(mini, "Qwen3_5MoeForCausalLM"), (mini_dense, "Qwen3_5ForCausalLM")]
)
def test_transformers_loads_the_official_layout(builder, model_class, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = ModelConfig.from_hf(builder())
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors)
    loaded = getattr(transformers, model_class).from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in canonical_state(config, loaded).items():
        assert torch.equal(tensor, tensors[name].float()), name
