"""Layouts of experts: built by hand, found by shape, turned into each other bit by bit, read from files."""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import mini, mini_next
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import workbench
from workbench.checkpoint import (
    LAYOUTS,
    ExpertSizes,
    convert,
    detect_layout,
    expected_tensors,
    expert_assumptions,
    from_canonical,
    read_checkpoint,
    to_canonical,
    write_checkpoint,
)
from workbench.cli.options import EXPERT_LAYOUTS
from workbench.config import ModelConfig
from workbench.errors import CheckpointError

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
)  # fmt: skip
TOLD_ONLY = [name for name in LAYOUTS if name.endswith("_interleaved")]
SHOWN = [name for name in LAYOUTS if name not in TOLD_ONLY]


def matrices(sizes, dtype=torch.float32, seed=0):
    """Per expert (gate [I, D], up [I, D], down [D, I]) of random bits, NaN among them."""
    experts, hidden, width = sizes.num_experts, sizes.hidden_size, sizes.moe_intermediate_size
    generator = torch.Generator().manual_seed(seed)

    def bits(*shape):
        n_bytes = dtype.itemsize
        values = torch.randint(0, 256, (*shape[:-1], shape[-1] * n_bytes), generator=generator, dtype=torch.uint8)
        return values.view(dtype)

    return [(bits(width, hidden), bits(width, hidden), bits(hidden, width)) for _ in range(experts)]


def raw_bytes(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def laid_out(name, experts):
    """The tensors of a layout, written down a second time, without the code that is tested."""

    def stack(parts):
        raw = torch.stack([raw_bytes(part) for part in parts])
        return raw.view(parts[0].dtype)

    def both(gate, up):
        rows = zip(gate, up, strict=True) if "interleaved" in name else ((*gate, *up),)
        return stack([row for pair in rows for row in pair])

    if name.startswith("per_expert"):
        leaves = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}
        return {f"{n}.{leaf}.weight": expert[i] for n, expert in enumerate(experts) for leaf, i in leaves.items()}
    if name.startswith("w1_w2_w3"):
        leaves = {"w1": 0, "w2": 2, "w3": 1}
        if "per_expert" in name:
            return {f"{n}.{leaf}.weight": expert[i] for n, expert in enumerate(experts) for leaf, i in leaves.items()}
        return {leaf: stack([expert[i] for expert in experts]) for leaf, i in leaves.items()}
    first, second = ("w13", "w2") if name.startswith("w13") else ("gate_up_proj", "down_proj")
    merged = [both(gate, up) for gate, up, _ in experts]
    down = [down for _, _, down in experts]
    if "per_expert" in name:
        return {f"{n}.{first}.weight": t for n, t in enumerate(merged)} | {
            f"{n}.{second}.weight": t for n, t in enumerate(down)
        }
    if name.startswith("transposed"):
        merged, down = [t.T for t in merged], [t.T for t in down]
    return {first: stack(merged), second: stack(down)}


def assert_same_bits(found, wanted):
    assert set(found) == set(wanted)
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert found[key].is_contiguous(), key
        raw = [raw_bytes(t) for t in (found[key], tensor)]
        assert torch.equal(*raw), key


def refusal(call, *arguments, **options):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SIZES = ExpertSizes(4, 10, 3)


# ---- conversion


@settings(max_examples=150)
@given(
    st.builds(ExpertSizes, st.integers(1, 5), st.integers(1, 9), st.integers(1, 7)),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(DTYPES),
)
def test_every_layout_becomes_every_other_bit_by_bit(sizes, source, target, dtype):
    experts = matrices(sizes, dtype)
    tensors = laid_out(source, experts)
    canonical = laid_out("stacked", experts)
    assert_same_bits(convert(tensors, sizes, target, layout=source), laid_out(target, experts))
    found = to_canonical(tensors, sizes, source)
    assert_same_bits(found, {"gate_up": canonical["gate_up_proj"], "down": canonical["down_proj"]})
    assert_same_bits(from_canonical(found, sizes, source), tensors)


class NewMemory(TorchDispatchMode):
    """Bytes of memory that operations bring into being, leaving out views."""

    def __init__(self):
        super().__init__()
        self.known: set[int] = set()
        self.n_bytes = 0
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in before | self.known:
                    self.known.add(storage.data_ptr())
                    self.n_bytes += storage.nbytes()
                    self.kept.append(tensor)  # an address is not given out twice
        return result


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_conversion_makes_no_more_than_one_copy(source, target):
    tensors = laid_out(source, matrices(SIZES))
    size = sum(tensor.nbytes for tensor in tensors.values())
    with NewMemory() as new:
        convert(tensors, SIZES, target, layout=source)
    assert new.n_bytes <= size
    if source == target:
        assert new.n_bytes == 0


def test_parts_of_a_stack_are_views_of_it():
    tensors = laid_out("stacked", matrices(SIZES))
    with NewMemory() as new:
        convert(tensors, SIZES, "per_expert")
    assert new.n_bytes == 0


# ---- detection


@pytest.mark.parametrize("name", SHOWN)
def test_layout_is_found_by_names_and_shapes(name):
    assert detect_layout(laid_out(name, matrices(SIZES)), SIZES).name == name


@pytest.mark.parametrize("name", TOLD_ONLY)
def test_order_of_rows_is_never_detected(name):
    found = detect_layout(laid_out(name, matrices(SIZES)), SIZES).name
    assert found == name.removesuffix("_interleaved")


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("prefix", ["model.layers.3.mlp.experts.", "experts.", "layers.0.block_sparse_moe.experts."])
@pytest.mark.parametrize("suffix", [".weight", "_weight"])
def test_prefixes_and_suffixes_of_names(name, prefix, suffix):
    tensors = laid_out(name, matrices(SIZES))
    renamed = {prefix + key.removesuffix(".weight") + suffix: tensor for key, tensor in tensors.items()}
    assert detect_layout(renamed, SIZES).name == name
    assert_same_bits(convert(renamed, SIZES, name), tensors)


OPEN = {
    (6, 3): {"stacked", "transposed", "w13_w2"},
    (4, 4): {"stacked", "transposed", "w13_w2", "w1_w2_w3", "w1_w2_w3_per_expert"},
}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("widths", OPEN)
def test_shapes_that_leave_the_layout_open_are_refused_unless_it_is_named(widths, name):
    sizes = ExpertSizes(5, *widths)
    experts = matrices(sizes)
    tensors = laid_out(name, experts)
    if name not in OPEN[widths]:
        assert detect_layout(tensors, sizes).name == name
        return
    message = refusal(detect_layout, tensors, sizes)
    assert f"equals hidden_size ({widths[0]})" in message and name in message and "--expert-layout" in message
    assert message == refusal(to_canonical, tensors, sizes)
    assert_same_bits(convert(tensors, sizes, "per_expert", layout=name), laid_out("per_expert", experts))


def swapped(tensors, first, second):
    return tensors | {first: tensors[second], second: tensors[first]}


W123 = laid_out("w1_w2_w3", matrices(SIZES))
W13 = laid_out("w13_w2", matrices(SIZES))
STACK = laid_out("stacked", matrices(SIZES))


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        (swapped(W123, "w1", "w2"),
         r"w1: expected shape \[4, 3, 10\] of w1 \(gate\), found \[4, 10, 3\], the shape of w2 \(down\); "
         "w2 has that of w1: exchange the two"),
        (swapped(W123, "w2", "w3"), r"w2: .*the shape of w1 \(gate\) or w3 \(up\); w3 has that of w2: exchange"),
        (W123 | {"w2": W123["w1"]}, r"w2: .*the shape of w1 \(gate\) or w3 \(up\); it lies in the wrong slot"),
        (swapped(W13, "w13", "w2"), r"w13: .*the shape of w2 \(down\); w2 has that of w13: exchange"),
        ({"w1": W13["w13"], "w2": W13["w2"]}, r"w1: .*found \[4, 6, 10\], the shape of gate and up rows in one"),
        (swapped(laid_out("w1_w2_w3_per_expert", matrices(SIZES)), "2.w1.weight", "2.w2.weight"),
         r"2\.w1\.weight: .*the shape of w2 \(down\); 2\.w2\.weight has that of w1: exchange"),
        (swapped(laid_out("per_expert", matrices(SIZES)), "0.up_proj.weight", "0.down_proj.weight"),
         r"0\.up_proj\.weight: .*the shape of down_proj \(down\); 0\.down_proj\.weight has that of up_proj"),
        ({key: tensor.transpose(1, 2) for key, tensor in W123.items()}, "all 3 tensors are the transposes"),
        (STACK | {"gate_up_proj": STACK["gate_up_proj"].transpose(1, 2)},
         "gate_up_proj: .*its transpose, and not all tensors are transposed"),
        (STACK | {"down_proj": STACK["down_proj"][:3]},
         r"down_proj: .*found \[3, 10, 3\]; check num_experts 4, hidden_size 10 and moe_intermediate_size 3"),
    ],
    ids=["w1-w2", "w2-w3", "w1-twice", "w13-w2", "w13-as-w1", "one-expert", "up-down", "all-turned", "one-turned",
         "too-few-experts"],
)  # fmt: skip
def test_tensors_in_the_wrong_slot_are_named(tensors, wanted):
    assert re.search(wanted, refusal(detect_layout, tensors, SIZES))


@given(
    st.builds(ExpertSizes, st.integers(1, 4), st.integers(1, 9), st.integers(1, 7)),
    st.sampled_from(SHOWN),
    st.data(),
)
def test_any_exchange_of_different_shapes_is_refused(sizes, name, data):
    tensors = laid_out(name, matrices(sizes))
    pairs = [(a, b) for a in tensors for b in tensors if a < b and tensors[a].shape != tensors[b].shape]
    if pairs:
        refusal(detect_layout, swapped(tensors, *data.draw(st.sampled_from(pairs))), sizes)


def test_names_that_do_not_fit():
    per_expert = laid_out("per_expert", matrices(SIZES))
    for tensors, wanted in (
        ({}, "found none"),
        ({"w4": torch.ones(1)}, "found 'w4'"),
        ({"4.w1.weight": torch.ones(3, 10)}, "of 4 experts, found '4.w1.weight'"),
        (W123 | W13, "expected the experts of a layer in one form"),
        (per_expert | STACK, "found them as one tensor per expert (0.gate_proj.weight) and as one tensor gate_up_proj"),
        ({"w1": W123["w1"], "w2": W123["w2"]}, "w1_w2_w3: expected 3 tensors, found 1 of them missing, first w3"),
        (W13 | {"w2.weight": W13["w2"]}, "expected one tensor for w2, found 'w2.weight' as a second one"),
        ({"a.experts.w13": W13["w13"], "b.experts.w2": W13["w2"]}, "the tensors of one layer"),
        (dict(list(per_expert.items())[:-1]), "12 tensors, found 1 of them missing, first 3.down_proj.weight"),
    ):
        assert wanted in refusal(detect_layout, tensors, SIZES)
    assert "layout w13_w2: expected the names w13, w2, found 'w1'" in refusal(to_canonical, W123, SIZES, "w13_w2")
    assert "expected one of stacked," in refusal(to_canonical, W123, SIZES, "gguf")
    assert "expected gate_up and down, found down" in refusal(from_canonical, {"down": W13["w2"]}, SIZES, "stacked")
    assert "w3: expected torch.float32 on cpu as w1, found torch.float64" in refusal(
        to_canonical, W123 | {"w3": W123["w3"].double()}, SIZES
    )


def test_a_told_layout_is_checked_against_the_shapes():
    message = refusal(to_canonical, STACK, SIZES, "transposed")
    assert "gate_up_proj: expected shape [4, 10, 6]" in message and "found [4, 6, 10], its transpose" in message


# ---- files


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_hf(mini(dtype="bfloat16", hidden_size=48))  # 2I != D and I != D


@pytest.fixture(scope="module")
def weights(config):
    return random_weights(config)


def random_weights(config):
    generator = torch.Generator().manual_seed(0)
    shapes = expected_tensors(config).items()
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes}


def rewrite(path, rename=str, metadata=None):
    """Store the tensors under other names, by default without the metadata."""
    file = path / "model.safetensors"
    stored = {rename(name): tensor.contiguous() for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(stored, file, metadata=metadata)


def assert_read(checkpoint, wanted, layout):
    assert list(checkpoint.tensors) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(checkpoint.tensors[name].float(), tensor.float()), name
    blocks = [f"layers.{n}.mlp.experts" for n in range(4)] + ["mtp.layers.0.mlp.experts"]
    assert checkpoint.accounting.expert_layouts == tuple((block, layout) for block in blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_in_any_layout_reads_to_the_same_tensors(layout, config, weights, tmp_path):
    write_checkpoint(tmp_path, config, weights, expert_layout=layout, max_shard_bytes=60_000)
    checkpoint = read_checkpoint(tmp_path)
    assert_read(checkpoint, weights, layout)
    rows = [row for row in checkpoint.accounting.rows if ".mlp.experts." in (row.canonical or "")]
    assert len(rows) == 5 * len(LAYOUTS[layout].keys(config))
    assert {row.reason for row in rows} == {"" if layout == "stacked" else f"experts in the layout {layout}"}
    assert not checkpoint.accounting.notes


@pytest.mark.parametrize("layout", SHOWN)
def test_files_of_others_are_read_by_names_and_shapes(layout, config, weights, tmp_path):
    write_checkpoint(tmp_path, config, weights, expert_layout=layout)

    def mixtral(name):
        name = name.replace(".mlp.", ".block_sparse_moe.")
        return name if name.endswith(".weight") or ".experts." not in name else name + ".weight"

    rewrite(tmp_path, mixtral)
    assert_read(read_checkpoint(tmp_path), weights, layout)


OPEN_WIDTHS = pytest.mark.parametrize("hidden", [64, 32], ids=["2I=D", "I=D"])


@OPEN_WIDTHS
def test_open_shapes_in_files(hidden, tmp_path):
    """What the family publishes is read, with a note; all else has to be named, or be named by the file."""
    config = ModelConfig.from_hf(mini(dtype="bfloat16", hidden_size=hidden))
    weights = random_weights(config)
    for layout in ("transposed", "w13_w2", "stacked"):
        write_checkpoint(tmp_path, config, weights, expert_layout=layout)
        assert_read(read_checkpoint(tmp_path), weights, layout)
        rewrite(tmp_path)
        told = read_checkpoint(tmp_path, expert_layout=layout)
        assert_read(told, weights, layout)
        assert not told.accounting.assumptions
        if layout != "stacked":
            message = refusal(read_checkpoint, tmp_path)
            assert f"equals hidden_size ({hidden})" in message and str(tmp_path) in message
            assert f"{layout}" in message and "--expert-layout" in message
    checkpoint = read_checkpoint(tmp_path)
    assert_read(checkpoint, weights, "stacked")
    (note,) = checkpoint.accounting.notes
    assert "may be its transpose; taken as stacked, as published checkpoints of qwen3_5_moe have it" in note
    assert (note,) == checkpoint.accounting.assumptions == expert_assumptions(tmp_path)
    assert "expected shape" in refusal(read_checkpoint, tmp_path, expert_layout="transposed")


OTHER_NAMES = {
    "other block": lambda name: name.replace(".mlp.experts.", ".block_sparse_moe.experts."),
    ".weight": lambda name: name + ".weight" if ".experts." in name else name,
    "_weight": lambda name: name + "_weight" if ".experts." in name else name,
    "one of two": lambda name: name + ".weight" if name.endswith("experts.down_proj") else name,
}


@OPEN_WIDTHS
@pytest.mark.parametrize("rename", OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_open_shapes_under_names_that_the_family_does_not_publish(rename, hidden, tmp_path):
    config = ModelConfig.from_hf(mini(dtype="bfloat16", hidden_size=hidden))
    weights = random_weights(config)
    write_checkpoint(tmp_path, config, weights)
    rewrite(tmp_path, rename)
    message = refusal(read_checkpoint, tmp_path)
    assert f"equals hidden_size ({hidden})" in message and "--expert-layout" in message
    assert message == refusal(workbench.load, tmp_path) == refusal(expert_assumptions, tmp_path)
    assert_read(read_checkpoint(tmp_path, expert_layout="stacked"), weights, "stacked")


@OPEN_WIDTHS
def test_open_shapes_in_a_family_that_publishes_no_stack(hidden, tmp_path):
    config = ModelConfig.from_hf(mini_next(dtype="bfloat16", hidden_size=hidden))
    weights = random_weights(config)
    write_checkpoint(tmp_path, config, weights, expert_layout="stacked")
    assert not read_checkpoint(tmp_path).accounting.assumptions  # the metadata says it
    rewrite(tmp_path)
    assert f"equals hidden_size ({hidden})" in refusal(read_checkpoint, tmp_path)
    write_checkpoint(tmp_path, config, weights)
    rewrite(tmp_path)
    assert not read_checkpoint(tmp_path).accounting.notes


@pytest.mark.parametrize("recorded", LAYOUTS)
def test_a_layout_told_against_the_metadata_is_refused(recorded, config, weights, tmp_path):
    write_checkpoint(tmp_path, config, weights, expert_layout=recorded)
    for told in LAYOUTS:
        if told == recorded:
            assert_read(read_checkpoint(tmp_path, expert_layout=told), weights, told)
            continue
        message = refusal(read_checkpoint, tmp_path, expert_layout=told)
        assert f"model.safetensors: metadata expert_layout: expected {told} as told" in message
        assert f"found that it says {recorded}; leave the option out" in message
        assert message == refusal(workbench.load, tmp_path, expert_layout=told)


@pytest.mark.parametrize("recorded", [*LAYOUTS, "gguf", ""])
def test_metadata_against_the_names_is_refused(recorded, config, weights, tmp_path):
    """Names of one tensor or several show more than what was written beside them."""
    write_checkpoint(tmp_path, config, weights)
    rewrite(tmp_path, metadata={"expert_layout": recorded})
    if recorded in ("stacked", "stacked_interleaved"):
        found = read_checkpoint(tmp_path).accounting.expert_layouts
        assert {layout for _, layout in found} == {recorded}
        return
    message = refusal(read_checkpoint, tmp_path)
    if recorded.startswith("transposed"):  # the same names
        assert "expected shape" in message
    else:
        assert "metadata expert_layout: expected stacked or transposed or" in message and f"{recorded!r}" in message


def test_layouts_that_no_file_has(config, weights, tmp_path):
    write_checkpoint(tmp_path, config, weights)
    rewrite(tmp_path)
    message = refusal(read_checkpoint, tmp_path, expert_layout="w13_w2")
    assert "expected experts in the layout w13_w2, which was named, found stacked" in message
    assert "expert layout: expected one of" in refusal(read_checkpoint, tmp_path, expert_layout="gguf")
    assert "expert layout: expected one of" in refusal(write_checkpoint, tmp_path, config, weights, expert_layout="x")


def test_shards_whose_metadata_differ(config, weights, tmp_path):
    write_checkpoint(tmp_path, config, weights, expert_layout="w1_w2_w3", max_shard_bytes=20_000)
    for shard in sorted(tmp_path.glob("model-*.safetensors"))[::2]:
        tensors = load_file(shard)
        shard.unlink()
        save_file(tensors, shard, metadata={"expert_layout": "w1_w2_w3_per_expert"})
    for told in (None, *LAYOUTS):
        assert "metadata expert_layout: expected " in refusal(read_checkpoint, tmp_path, expert_layout=told)


def test_wrong_slots_and_gaps_in_files(config, weights, tmp_path):
    write_checkpoint(tmp_path, config, weights, expert_layout="w1_w2_w3_per_expert")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    one, two = (f"model.language_model.layers.2.mlp.experts.5.{leaf}.weight" for leaf in ("w1", "w2"))
    save_file(swapped(stored, one, two), file)
    message = refusal(read_checkpoint, tmp_path)
    assert f"model.safetensors: tensor {one}: expected shape [32, 48] of w1 (gate), found [48, 32]" in message
    assert f"tensor {two} has that of w1: exchange the two" in message
    save_file({name: tensor for name, tensor in stored.items() if name != two}, file)
    assert "1 tensors missing: layers.2.mlp.experts.5.w2.weight" in refusal(read_checkpoint, tmp_path)
    save_file(stored | {one.replace("5.w1", "8.w1"): stored[one].clone()}, file)
    assert "1 tensors unexpected: model.language_model.layers.2.mlp.experts.8.w1" in refusal(read_checkpoint, tmp_path)
    save_file(stored | {one.replace("5.w1", "5.w1") + "s": stored[one].clone()}, file)
    assert "1 tensors unexpected" in refusal(read_checkpoint, tmp_path)


def test_the_model_is_the_same_from_every_layout(tmp_path):
    config = ModelConfig.from_hf(mini(dtype="bfloat16"))
    weights = random_weights(config)
    ids = torch.tensor([[1, 5, 9, 2]])
    logits = []
    for layout in ("stacked", "transposed"):
        write_checkpoint(tmp_path, config, weights, expert_layout=layout)
        rewrite(tmp_path)
        with torch.inference_mode():
            logits.append(workbench.load(tmp_path, "float32", expert_layout=layout)(ids).logits)
    assert torch.equal(*logits)


# ---- command line


def test_help_names_every_layout():
    assert list(EXPERT_LAYOUTS) == list(LAYOUTS)


def test_inspect_names_the_layout(tmp_path, capsys):
    from workbench.cli import main

    config = ModelConfig.from_hf(mini(dtype="bfloat16"))
    write_checkpoint(tmp_path, config, random_weights(config), expert_layout="transposed")
    rewrite(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "--expert-layout" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--expert-layout", "transposed"]) == 0
    assert "expert layout: transposed (layers.{0-3}.mlp.experts, mtp.layers.0.mlp.experts)" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--expert-layout", "transposed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expert_layouts"]["layers.0.mlp.experts"] == "transposed"
    assert main(["inspect", str(tmp_path), "--expert-layout", "gguf"]) == 2


def test_commands_say_what_they_took_on_the_familys_word(tmp_path, capsys):
    from workbench.cli import main

    config = ModelConfig.from_hf(mini(dtype="bfloat16"))  # 2I == D
    write_checkpoint(tmp_path, config, random_weights(config))
    said = "2 x moe_intermediate_size equals hidden_size (64): gate_up_proj may be its transpose; taken as"

    def notes(*arguments):
        assert main([str(argument) for argument in arguments]) == 0
        captured = capsys.readouterr()
        return [line for line in (captured.out + captured.err).splitlines() if said in line]

    commands = [
        ("inspect", tmp_path),
        ("generate", tmp_path, "--ids", "1,2,3", "--max-new-tokens", "1"),
        ("trace", tmp_path, "--ids", "1,2,3"),
        ("sweep", tmp_path, "--ids", "1,2,3", "--metric", "finite"),
    ]
    for command in commands:
        assert notes(*command) == []  # the metadata says it
    rewrite(tmp_path)
    for command in commands:
        (note,) = notes(*command)
        assert note.endswith("taken as stacked, as published checkpoints of qwen3_5_moe have it"), command
        if command[0] != "sweep":
            assert notes(*command, "--expert-layout", "stacked") == []
