"""Checkpoints whose experts are written in another layout: every bit kept, every byte told, nothing half done."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import mini, mini_dense, mini_next
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from workbench.checkpoint import LAYOUTS, convert_experts, expected_tensors, read_checkpoint, rewrite, write_checkpoint
from workbench.cli import main
from workbench.config import ModelConfig
from workbench.errors import CheckpointError

SMALL = {"vocab_size": 7, "hidden_size": 12, "num_experts": 3, "moe_intermediate_size": 5, "num_attention_heads": 2,
         "shared_expert_intermediate_size": 4, "num_key_value_heads": 1}  # fmt: skip


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_hf(mini(dtype="bfloat16", **SMALL))


def weights_of(config):
    """Random bits, NaN among them, in bfloat16; what files hold in float32 is random numbers."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in expected_tensors(config).items()
    }


def write(folder, config, layout, **options):
    weights = weights_of(config)
    write_checkpoint(folder, config, weights, expert_layout=layout, dtype=None, allow_nonfinite="*", **options)
    return folder


def stored(folder):
    """Name -> (dtype, shape, bytes) of all tensors in all files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = (tensor.dtype, tuple(tensor.shape), bytes(tensor.flatten().view(torch.uint8).numpy()))
    return found


def refusal(call, *arguments, **options):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def written(config, tmp_path_factory):
    """Layout -> the checkpoint written in it from the start, and its tensors."""
    folders = {layout: write(tmp_path_factory.mktemp("written") / layout, config, layout) for layout in LAYOUTS}
    return {layout: (folder, stored(folder)) for layout, folder in folders.items()}


@pytest.mark.parametrize("shard", [None, 2_000], ids=["one file", "shards"])
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_becomes_every_other_as_if_written_so(source, shard, config, written, tmp_path):
    before = write(tmp_path / "before", config, source, max_shard_bytes=shard)
    for target in LAYOUTS:
        calls = []
        after, (wanted, tensors) = tmp_path / target, written[target]
        conversion = convert_experts(before, after, target, progress=lambda *args, calls=calls: calls.append(args))
        assert stored(after) == tensors
        assert json.loads((after / "config.json").read_text()) == json.loads((wanted / "config.json").read_text())
        assert calls == [(n, 5) for n in range(6)]
        files = sorted(after.glob("*.safetensors"))
        assert conversion.file_bytes == sum(file.stat().st_size for file in files)
        assert conversion.file_bytes == conversion.header_bytes + conversion.expert_bytes + conversion.other_bytes
        assert tuple(file.name for file in files) == conversion.files
        experts = [len(LAYOUTS[name].keys(config)) * 5 for name in (source, target)]
        assert list(conversion.n_expert_tensors) == experts
        assert conversion.n_expert_tensors[1] + conversion.n_other_tensors == len(tensors)
        found = read_checkpoint(after, allow_nonfinite="*").accounting
        assert {layout for _, layout in found.expert_layouts} == {target} and not found.notes


def test_there_and_back_is_the_same(config, tmp_path):
    first = write(tmp_path / "first", config, "stacked")
    convert_experts(first, tmp_path / "second", "w13_w2_per_expert_interleaved")
    convert_experts(tmp_path / "second", tmp_path / "third", "stacked")
    assert stored(first) == stored(tmp_path / "third")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_and_prefixes_of_others_are_kept(dtype, tmp_path):
    config = ModelConfig.from_hf(mini_next(**SMALL))
    folder = write(tmp_path / "a", config, "w1_w2_w3")
    tensors = {
        name.replace(".mlp.experts.", ".block_sparse_moe.experts."): tensor.to(dtype) if ".experts." in name else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    tensors["model.visual.x"] = torch.arange(5, dtype=torch.uint8)  # of a part that the model does not use
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "made_by": "someone"})
    convert_experts(folder, tmp_path / "b", "per_expert")
    found = load_file(tmp_path / "b" / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.1.down_proj.weight"
    assert found[name].dtype == dtype
    w2 = tensors["model.layers.0.block_sparse_moe.experts.w2"][1]
    assert torch.equal(found[name].view(torch.uint8), w2.contiguous().view(torch.uint8))
    assert torch.equal(found["model.visual.x"], tensors["model.visual.x"])
    with safe_open(tmp_path / "b" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "made_by": "someone", "expert_layout": "per_expert"}


def test_all_tensors_lie_aligned(config, tmp_path):
    """Odd sizes in 8 and 16 bits come after the wide ones, so that no reader has to copy."""
    folder = write(tmp_path / "a", config, "stacked")
    convert_experts(folder, tmp_path / "b", "per_expert")
    for tensor in load_file(tmp_path / "b" / "model.safetensors").values():
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_no_more_than_one_layer_is_in_memory(config, tmp_path, monkeypatch):
    """Each part is written before the next is fetched, and no stack is fetched twice."""
    folder = write(tmp_path / "a", config, "stacked")
    events = []
    fetch, bytes_of = rewrite._fetch, rewrite._bytes_of
    monkeypatch.setattr(rewrite, "_fetch", lambda *arguments: (events.append("read"), fetch(*arguments))[1])
    monkeypatch.setattr(rewrite, "_bytes_of", lambda tensor: (events.append("write"), bytes_of(tensor))[1])
    convert_experts(folder, tmp_path / "b", "w1_w2_w3")
    assert events == ["read", "write", "read", "write", "write"] * 5  # down as w2, gate and up as w1 and w3


# ---- refusals: one line, and nothing is left


def test_nothing_is_overwritten(config, tmp_path):
    folder = write(tmp_path / "a", config, "stacked")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    for name, found in (("file", "a file"), ("empty", "a directory"), ("link", "a link"), ("a", "a directory")):
        message = refusal(convert_experts, folder, tmp_path / name, "w13_w2")
        assert f"{tmp_path / name}: expected a name that is free, found {found}; nothing is overwritten" in message
    assert contents(tmp_path) == before and not list((tmp_path / "empty").iterdir())


def test_a_conversion_that_fails_leaves_nothing(config, tmp_path, monkeypatch):
    folder = write(tmp_path / "a", config, "stacked")

    def full(*_):
        raise OSError(28, "No space left on device")

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_experts(folder, tmp_path / "b", "w13_w2", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "_copy_bytes", full)
        assert "No space left on device" in refusal(convert_experts, folder, tmp_path / "b", "w13_w2")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "B of room for a copy of" in refusal(convert_experts, folder, tmp_path / "new" / "b", "w13_w2")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("when", [0, 2], ids=["other tensors", "experts"])
def test_a_source_that_shrinks_meanwhile_is_named(when, config, tmp_path):
    folder = write(tmp_path / "a", config, "stacked")

    def cut(done, total):
        if done == when:
            with open(folder / "model.safetensors", "r+b") as file:
                file.truncate(file.seek(0, 2) // 2 if when else 20)

    message = refusal(convert_experts, folder, tmp_path / "b", "per_expert", progress=cut)
    assert "model.safetensors: tensor " in message and "found the file's end" in message
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_parts_of_different_dtypes_are_refused(config, tmp_path):
    folder = write(tmp_path / "a", config, "per_expert")
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, folder / "model.safetensors")
    assert f"tensor {name}: expected dtype BF16" in refusal(convert_experts, folder, tmp_path / "b", "stacked")


def test_a_result_that_does_not_add_up_is_refused(config, tmp_path, monkeypatch):
    folder = write(tmp_path / "a", config, "stacked")
    whole = rewrite._write_header
    wrong = {"expert_layout": "w13_w2_interleaved"}
    monkeypatch.setattr(rewrite, "_write_header", lambda out, tensors, metadata: whole(out, tensors, metadata | wrong))
    message = refusal(convert_experts, folder, tmp_path / "b", "w13_w2")
    assert "B of experts in the layout w13_w2 and all else as it was, found" in message
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_sources_that_cannot_be_converted(config, tmp_path):
    folder = write(tmp_path / "a", config, "stacked")
    target = tmp_path / "b"
    assert "expected a checkpoint directory, found a file" in refusal(
        convert_experts, folder / "model.safetensors", target, "w13_w2"
    )
    assert "expected a checkpoint directory, found nothing there" in refusal(
        convert_experts, tmp_path / "none", target, "w13_w2"
    )
    assert "expert layout: expected one of stacked" in refusal(convert_experts, folder, target, "gguf")
    assert "leave the option out" in refusal(
        convert_experts, folder, target, "w13_w2", expert_layout="stacked_interleaved"
    )
    dense = ModelConfig.from_hf(mini_dense(dtype="bfloat16"))
    write_checkpoint(tmp_path / "dense", dense, weights_of(dense), dtype=None, allow_nonfinite="*")
    assert "expected experts to convert, found none" in refusal(convert_experts, tmp_path / "dense", target, "w13_w2")
    assert not target.exists()


# ---- command line


def test_the_command_tells_what_it_wrote(config, tmp_path, capsys):
    folder = write(tmp_path / "a", config, "stacked")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_text("x")
    (folder / "runs").mkdir()
    assert main(["convert-experts", str(folder), str(tmp_path / "b"), "--to", "per_expert"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["convert-experts: 0 of 5 layers", "convert-experts: 5 of 5 layers"]
    lines = captured.out.splitlines()
    assert lines[0] == f"{tmp_path / 'b'}: experts of 5 layers in the layout per_expert"
    assert "45 tensors" in lines[1] and "from 10 in the layout stacked" in lines[1]
    size = (tmp_path / "b" / "model.safetensors").stat().st_size
    assert f"{size:,} B = size of the files" in captured.out
    assert lines[-3:-1] == ["note: training_args.bin: state of a training program, left alone",
                            "note: runs: no file, left alone"]  # fmt: skip
    assert lines[-1] == "copied: config.json, tokenizer.json"
    assert sorted(file.name for file in (tmp_path / "b").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert main(["convert-experts", str(folder), str(tmp_path / "b"), "--to", "per_expert"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["convert-experts", str(tmp_path / "none"), str(tmp_path / "c"), "--to", "stacked"]) == 2
    assert main(["convert-experts", str(folder), str(tmp_path / "c")]) == 2
    assert main(["convert-experts", str(folder), str(tmp_path / "c"), "--to", "gguf"]) == 2
    arguments = ["convert-experts", str(folder), str(tmp_path / "c"), "--to", "w13_w2", "--from", "stacked_interleaved"]
    assert main(arguments) == 2
    assert not (tmp_path / "c").exists()
    assert main(["convert-experts", "--help"]) == 0
    assert "example:\n  workbench convert-experts data/miniature" in capsys.readouterr().out


def test_the_miniature_gets_a_record_of_its_layout(tmp_path):
    source = Path(__file__).resolve().parent.parent / "data" / "miniature"
    conversion = convert_experts(source, tmp_path / "b", "stacked")
    assert "taken as stacked, as published checkpoints of qwen3_5_moe have it" in conversion.notes[0]
    assert stored(source) == stored(tmp_path / "b")
    assert not read_checkpoint(tmp_path / "b").accounting.assumptions
