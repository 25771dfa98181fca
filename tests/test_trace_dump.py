"""Tensors on disk and in the flight recorder: what was selected comes back, caps hold, nothing is dropped unsaid."""

import json
import math

import models
import pytest
import torch
from safetensors.torch import load_file

import workbench
from workbench import taps
from workbench.analysis.compare.saved import read_side
from workbench.analysis.memory import peak_tensor_bytes
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.model import CausalLM
from workbench.tracing import Selection
from workbench.tracing import dump as dump_module
from workbench.tracing.dump import dump, pieces, read_trace
from workbench.tracing.ring import flight_recorder


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(ModelConfig.from_hf(models.mini())).init_weights(3).eval()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def ids(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def test_every_tensor_of_every_pass_comes_back_as_a_trace_keeps_it(model, tmp_path):
    with workbench.trace(model, keep="*") as seen, dump(model, tmp_path / "run") as writer:
        cache = model(ids(130)).cache
        model(ids(1), cache=cache)
    found = read_trace(tmp_path / "run")
    kept = {(name, step): tensor for name, pairs in seen.history.items() for step, tensor in pairs}
    assert set(kept) == {(tap, step) for tap, step, _ in found.tensors} and len(kept) > 150
    for (name, step), tensor in kept.items():
        assert torch.equal(found.tensor(name, step), tensor), (name, step)
    sizes = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    assert writer.written_bytes == found.content["written_bytes"] == sizes and found.content["steps"] == 2
    assert found.content["left_out"] == [] and found.origin.policy["chunk"] == 64
    assert {row["op"] for row in found.content["backends_run"]} >= {"gated_delta_rule", "attention"}
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "manifest.json", "step-000000-000.safetensors", "step-000001-000.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
                                   torch.int64, torch.bool])  # fmt: skip
def test_a_streamed_file_is_what_safetensors_reads(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(dump_module, "BLOCK_BYTES", 64)
    base = torch.randint(0, 2, (7, 6, 10)).to(dtype)
    tensors = {"whole": base, "view": base[:, 1:4], "turned": base.transpose(0, 2), "empty": base[:0],
               "scalar": base[0, 0, 0]}  # fmt: skip
    stream = dump_module.SafetensorsStream(tmp_path / "x.safetensors", room=8)
    for name, tensor in tensors.items():
        stream.add(name, tensor)
    stream.close()
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype and torch.equal(found[name].double(), tensor.double()), name


def test_pieces_are_the_values_in_order_and_small():
    x = torch.arange(24 * 50.0).view(24, 50)
    for tensor in (x, x[:, 3:40], x.T, x.T[:, ::2], x[:, 0]):
        found = list(pieces(tensor, 100))
        assert torch.equal(torch.cat(found), tensor.reshape(-1)) and max(p.numel() for p in found) <= 25


def test_a_pass_with_more_tensors_than_a_header_has_room_for_takes_further_files(tmp_path):
    from workbench.bundle import Origin, open_bundle

    with open_bundle(tmp_path / "run", "trace", Origin()) as unfinished:
        writer = dump_module.TraceWriter(unfinished, 1 << 20, room=3)
        for number in range(10):
            writer.add("layers.00.attn.scores", 4, torch.full((2,), float(number)), None, number)
        writer.close()
        unfinished.content.update(writer.content(Selection(), 5))
    found = read_trace(tmp_path / "run")
    assert [float(found.tensor("layers.00.attn.scores", 4, n)[0]) for n in range(10)] == list(map(float, range(10)))
    assert len(list((tmp_path / "run").glob("step-000004-*.safetensors"))) > 1


def test_what_does_not_fit_is_listed_and_smaller_ones_still_fit(model, tmp_path):
    with dump(model, tmp_path / "all") as writer:
        model(ids(70))
    everything = writer.entries
    cap = 100_000
    with dump(model, tmp_path / "run", cap_bytes=cap) as writer:
        model(ids(70))
    found = read_trace(tmp_path / "run")
    assert found.content["written_bytes"] <= cap and found.content["cap_bytes"] == cap
    listed = [(e["tap"], e["step"]) for e in found.content["tensors"] + found.content["left_out"]]
    assert sorted(listed) == sorted((e["tap"], e["step"]) for e in everything)
    left = {e["tap"]: e for e in found.content["left_out"]}
    assert left and all(e["why"] == "cap" and e["bytes"] > 0 for e in left.values())
    order = [e["tap"] for e in everything]
    last_kept = max(order.index(e["tap"]) for e in found.content["tensors"])
    assert min(order.index(tap) for tap in left) < last_kept
    with pytest.raises(InputError, match="it did not fit under the cap"):
        found.tensor(next(iter(left)))
    with pytest.raises(InputError, match="it was not selected or not computed"):
        found.tensor("logits", 7)


def test_a_dump_needs_memory_for_a_piece_however_long_the_prompt(tmp_path, monkeypatch):
    """Of the layer's own tensors at their peak, the dump adds one piece; a trace that keeps the tensors adds them."""
    monkeypatch.setattr(dump_module, "BLOCK_BYTES", 1 << 14)
    model = CausalLM(ModelConfig.from_hf(models.mini(num_hidden_layers=1, layer_types=["linear_attention"]))).eval()
    model.init_weights(0)
    prompt, select = ids(4096), Selection(("*.gdn.q", "*.gdn.k", "*.gdn.v", "*.gdn.out", "*.gdn.conv", "*.residual"))

    def dumped() -> None:
        with dump(model, tmp_path / "run", select=select, cap_bytes=1 << 30):
            model(prompt, use_cache=False, last_only=True)

    def kept() -> None:
        with workbench.trace(model, keep=select.taps, select=select, check="sampled"):
            model(prompt, use_cache=False, last_only=True)

    plain = peak_tensor_bytes(lambda: model(prompt, use_cache=False, last_only=True))
    saved = read_trace_bytes(dumped, tmp_path)
    assert peak_tensor_bytes(dumped) - plain <= 4 * (1 << 14) < saved / 50
    assert peak_tensor_bytes(kept) - plain > saved / 4


def read_trace_bytes(call, tmp_path) -> int:
    call()
    return read_trace(tmp_path / "run").content["written_bytes"]


@pytest.mark.parametrize(("first", "end"), [(0, 1), (60, 70), (64, 128), (100, 999)])
def test_a_range_of_tokens_is_cut_along_each_tensors_own_axis(model, tmp_path, first, end):
    with workbench.trace(model, keep="*") as seen, dump(model, tmp_path / "run", select=Selection(tokens=(first, end))):
        model(ids(130))
    found, stop = read_trace(tmp_path / "run"), min(end, 130)
    tokens = {e["tap"]: e["tokens"] for e in found.content["tensors"]}
    low, high = first // 64, math.ceil(stop / 64)
    for name, axis in {"embed": 1, "layers.00.gdn.q": 1, "layers.00.moe.logits": 0, "layers.03.attn.scores": 2,
                       "logits": 1}.items():  # fmt: skip
        assert torch.equal(found.tensor(name), seen.tensors[name].narrow(axis, first, stop - first)), name
        assert tokens[name] == [first, stop]
    for name in ("layers.00.gdn.kkt", "layers.01.gdn.state", "layers.01.gdn.cumsum"):
        assert torch.equal(found.tensor(name), seen.tensors[name][low:high]), name
        assert tokens[name] == [64 * low, min(64 * high, 130)]


def test_a_range_cuts_no_tensor_whose_tokens_cannot_be_told(model, tmp_path):
    with dump(model, tmp_path / "run", select=Selection(("*.moe.logits", "*.gdn.q"), tokens=(2, 5))):
        model(ids(20, rows=2))
    entries = {e["tap"]: e for e in read_trace(tmp_path / "run").content["tensors"]}
    assert entries["layers.00.gdn.q"]["shape"][1] == 3 and entries["layers.00.gdn.q"]["tokens"] == [2, 5]
    assert entries["layers.00.moe.logits"]["shape"] == [40, 8] and entries["layers.00.moe.logits"]["tokens"] is None


def test_layers_passes_and_names_are_selected_in_traces_too(model, tmp_path):
    select = Selection(("*.gdn.out", "*.attn.out", "logits"), layers=(1, 3), steps=(1, 3))

    def run() -> None:
        cache = model(ids(20)).cache
        for _ in range(4):
            model(ids(1), cache=cache)

    with dump(model, tmp_path / "run", select=select), workbench.trace(model, select=select, check="exact") as seen:
        run()
    expected = [(name, step) for step in (1, 2) for name in ("layers.01.gdn.out", "layers.03.attn.out")]
    assert list(seen.table[["tap", "step"]].itertuples(index=False, name=None)) == expected
    assert [(e["tap"], e["step"]) for e in read_trace(tmp_path / "run").content["tensors"]] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taps": ("*.nothing",)}, "matches no tap point"),
        ({"layers": (9,)}, "layers: expected 0 to 3, found 9"),
        ({"taps": ("logits",), "layers": (0,)}, "that matches logits, found none"),
        ({"tokens": (3, 3)}, "tokens: expected .first, end."),
        ({"steps": (-1, 3)}, "steps: expected .first, end."),
    ],
)
def test_a_selection_of_nothing_is_refused(model, tmp_path, options, message):
    with pytest.raises(InputError, match=message), dump(model, tmp_path / "run", select=Selection(**options)):
        pass
    assert not (tmp_path / "run" / "manifest.json").exists() and model.tap is None


def test_a_dump_that_fails_leaves_what_was_there(model, tmp_path):
    with dump(model, tmp_path / "run", select=Selection(("logits",))):
        model(ids(5))
    before = (tmp_path / "run" / "manifest.json").read_text()
    with pytest.raises(ZeroDivisionError), dump(model, tmp_path / "run"):
        model(ids(6))
        raise ZeroDivisionError
    assert (tmp_path / "run" / "manifest.json").read_text() == before and len(list((tmp_path / "run").iterdir())) == 2
    assert read_trace(tmp_path / "run").tensor("logits").shape == (1, 5, 97) and model.tap is None
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"), dump(model, tmp_path / "run"):
        pytest.fail("entered")


def test_stages_inside_an_op_are_computed_for_a_dump_only_where_they_are_selected(model, tmp_path):
    kernels = model.kernels
    asked: list[bool] = []

    class Watching(Kernels):
        def gated_delta_rule(self, *arguments, tap=None, **options):
            asked.append(tap is not None)
            return super().gated_delta_rule(*arguments, tap=tap, **options)

    model.kernels = Watching()
    try:
        with dump(model, tmp_path / "a", select=Selection(("*.gdn.state", "*.gdn.out"))):
            model(ids(70))
        with dump(model, tmp_path / "b", select=Selection(("layers.01.gdn.kkt",))):
            model(ids(70))
    finally:
        model.kernels = kernels
    assert asked == [False, False, False, False, True, False]
    state = read_trace(tmp_path / "a").tensor("layers.00.gdn.state")
    assert state.shape == (1, 4, 16, 24)  # what is handed on


# ---- flight recorder


def decode(model: CausalLM, steps: int, bad: dict[int, float], point: str = "layers.02.gdn.out") -> None:
    """A prompt and `steps` decoded tokens; in the passes of `bad` one value of a tap point is replaced."""
    cache = None
    for step in range(steps + 1):
        changes = {}
        if step in bad:

            def change(x: torch.Tensor, value: float = bad[step]) -> torch.Tensor:
                x.view(-1)[1] = value
                return x

            changes = {point: change}
        with workbench.intervene(model, changes):
            cache = model(ids(9 if cache is None else 1), cache=cache).cache


def test_stages_of_a_long_pass_come_in_blocks_that_make_the_whole(model, tmp_path, monkeypatch):
    """A dump bounds what an op holds for it; a trace, which wants each stage as one tensor, gets it as before."""
    monkeypatch.setattr(torch_chunk, "OBSERVED_BYTES_AT_ONCE", 1 << 17)  # two chunks or so
    prompt = ids(500)
    with workbench.trace(model, keep="*.gdn.*") as seen:
        expected = model(prompt, use_cache=False).logits
    with dump(model, tmp_path / "run", select=Selection(("*.gdn.*",))) as writer:
        found = model(prompt, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    saved = read_trace(tmp_path / "run")
    for name in ("cumsum", "decay", "kkt", "inverse", "u", "w", "intra", "state", "inter"):
        tap = f"layers.01.gdn.{name}"
        count = sum(entry["tap"] == tap for entry in writer.entries)
        assert count >= 3, name
        parts = [saved.tensor(tap, occurrence=number) for number in range(count)]
        torch.testing.assert_close(torch.cat(parts), seen.tensors[tap], rtol=1e-4, atol=1e-5)
    with dump(model, tmp_path / "range", select=Selection(("*.gdn.*",), tokens=(0, 64))) as writer:
        model(prompt, use_cache=False)
    assert all(entry["occurrence"] == 0 for entry in writer.entries)
    side = read_side(tmp_path / "run")
    assert side.passes[0].tensors["layers.01.gdn.decay"].shape == seen.tensors["layers.01.gdn.decay"].shape


def test_the_passes_before_a_bad_one_are_written_with_it(model, tmp_path):
    with flight_recorder(model, tmp_path / "crash", steps=3) as recorder:
        decode(model, 8, {6: math.nan})
    assert recorder.tripped[0] == (6, "layers.02.gdn.out") and recorder.path == tmp_path / "crash"
    found = read_trace(tmp_path / "crash")
    assert sorted({e["step"] for e in found.content["tensors"]}) == [4, 5, 6]
    assert found.tensor("layers.02.gdn.out", 6).isnan().sum() == 1
    assert all(found.tensor(*at).isfinite().all() for at in (("layers.02.gdn.out", 5), ("layers.01.residual", 6)))
    assert found.content["tripped"][0] == {"step": 6, "tap": "layers.02.gdn.out"}
    assert not any(name.split(".", 2)[-1] in taps.STAGES for name, _, _ in found.tensors)


def test_a_sound_run_writes_nothing_but_on_demand(model, tmp_path):
    with flight_recorder(model, tmp_path / "crash", steps=4) as recorder:
        decode(model, 6, {})
        assert not (tmp_path / "crash").exists() and recorder.passes == (3, 4, 5, 6)
        recorder.dump(tmp_path / "asked")
    assert recorder.tripped == [] and recorder.path == tmp_path / "asked"
    assert read_trace(tmp_path / "asked").content["tripped"] == []


def test_the_recorder_stays_under_its_cap_and_lists_what_did_not_fit(model, tmp_path):
    with flight_recorder(model, tmp_path / "crash", steps=50, cap_bytes=60_000) as recorder:
        cache = None
        for step in range(12):
            cache = model(ids(9 if step == 0 else 1), cache=cache).cache
            assert recorder.bytes <= 60_000
            held = sum(t.numel() * t.element_size() for p in recorder._ring for _, t, _, _ in p.tensors)
            assert held == recorder.bytes
    assert 1 <= len(recorder.passes) < 12 and recorder.passes[-1] == 11
    with flight_recorder(model, steps=2, cap_bytes=5_000) as recorder:
        model(ids(9))
        recorder.dump(tmp_path / "small")
    content = read_trace(tmp_path / "small").content
    assert content["tensors"] and content["left_out"] and content["written_bytes"] <= 5_000


def test_a_pass_that_an_exception_ends_is_looked_at(model, tmp_path):
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), flight_recorder(model, tmp_path / "crash", steps=3) as recorder:
        cache = model(ids(9)).cache
        changes = {"layers.00.gdn.out": lambda x: x.fill_(math.inf), "layers.03.attn.out": fail}
        with workbench.intervene(model, changes):
            model(ids(1), cache=cache)
    assert recorder.tripped[0] == (1, "layers.00.gdn.out") and model.tap is None
    assert sorted({step for _, step, _ in read_trace(tmp_path / "crash").tensors}) == [0, 1]


def test_the_manifest_is_plain_json_of_version_1(model, tmp_path):
    with dump(model, tmp_path / "run", select=Selection(("logits",), steps=(0, 1))):
        model(ids(5))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["kind"]) == ("workbench-bundle", 1, "trace")
    assert manifest["content"]["tensors"] == [
        {"tap": "logits", "step": 0, "occurrence": 0, "dtype": "float32", "shape": [1, 5, 97], "tokens": None,
         "file": "step-000000-000.safetensors", "key": "logits"}
    ]  # fmt: skip
    assert manifest["content"]["selection"] == {"taps": ["logits"], "layers": None, "steps": [0, 1], "tokens": None}
