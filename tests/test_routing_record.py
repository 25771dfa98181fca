"""The routing recorder: choices as the router made them, tables counted by hand, flips on purpose, real width."""

import dataclasses
import itertools
import json
import math
import time

import models
import numpy as np
import pandas as pd
import pytest
import torch

import workbench
from workbench.analysis import routing
from workbench.analysis.routing import RoutingPrompt, compare, record, record_of_logits
from workbench.config import ModelConfig
from workbench.errors import BackendError, InputError, NonFiniteError
from workbench.kernels import Kernels
from workbench.model import CausalLM

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def build(fields: dict) -> CausalLM:
    return CausalLM(ModelConfig.from_hf(fields)).init_weights(3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return build(models.mini())


@pytest.fixture(scope="module")
def wide() -> CausalLM:
    return build(models.mini256())


def rows(*lengths: int) -> list[list[int]]:
    return [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def of_logits(logits, top_k: int, **settings):
    return record_of_logits(np.asarray(logits, dtype=np.float32), top_k=top_k, **settings)


def choices(*layers, experts: int = 4) -> np.ndarray:
    """Logits [L, T, E] whose routers choose the experts given for each layer and token, in that order."""
    logits = np.full((len(layers), len(layers[0]), experts), -9.0, dtype=np.float32)
    for layer, tokens in enumerate(layers):
        for token, chosen in enumerate(tokens):
            logits[layer, token, list(chosen)] = [3.0 - rank for rank in range(len(chosen))]
    return logits


# ============================================================================================================
# Recording
# ============================================================================================================


@pytest.mark.parametrize(("which", "experts", "top_k"), [("model", 8, 2), ("wide", 256, 8)])
def test_every_number_is_that_of_the_router(which, experts, top_k, request):
    net = request.getfixturevalue(which)
    texts = rows(30, 1, 7)
    seen = record(net, texts, keep_logits=True)
    assert [(part.name, part.layers, len(part.token)) for part in seen.parts] == [
        ("model", (0, 1, 2, 3), 38), ("mtp", (0,), 35),  # the head has no pair for the last token of a prompt
    ]  # fmt: skip
    main, head = seen.parts
    assert main.token.tolist() == list(itertools.chain(*texts))
    assert main.prompt.tolist() == [0] * 30 + [1] + [2] * 7
    assert main.position.tolist() == [*range(30), 0, *range(7)]
    assert head.prompt.tolist() == [0] * 29 + [2] * 6
    for number, text in enumerate(texts):
        ids = torch.tensor([text])
        with workbench.trace(net, keep=["*.moe.logits", "*.moe.topk"]) as trace:
            out = net(ids, use_cache=False)
            if len(text) > 1:
                net.mtp_logits(out.hidden[:, :-1], ids[:, 1:])
        for name, logits in trace.tensors.items():
            if not name.endswith("logits"):
                continue
            part, layer = (head, 0) if name.startswith("mtp") else (main, int(name.split(".")[1]))
            here = part.prompt == number
            best = logits.double().sort(dim=-1, descending=True)
            probabilities = logits.double().softmax(-1)
            assert part.experts[layer, here].tolist() == best.indices[:, :top_k].tolist()
            weights = trace.tensors[name.replace("logits", "topk")]
            assert part.weights[layer, here].tolist() == weights.tolist()
            expected = {
                "margin": best.values[:, top_k - 1] - best.values[:, top_k],
                "mass": probabilities.sort(-1, descending=True).values[:, :top_k].sum(-1),
                "entropy": -(probabilities * probabilities.log()).sum(-1),
                "logits": logits,
            }
            for field, value in expected.items():
                assert getattr(part, field)[layer, here] == pytest.approx(value.numpy(), rel=1e-5, abs=1e-6)
    assert seen.num_experts == experts and seen.top_k == top_k and not seen.bad_tokens


def test_recording_leaves_the_model_as_it_was_and_keeps_no_logits_unasked(model):
    kernels = model.kernels
    kernels.reset_attestation()
    calls = []
    seen = record(model, rows(20, 5), progress=lambda *args: calls.append(args), model_hash="sha256:1", seed=4)
    assert model.kernels is kernels and model.tap is None and [total for _, total in calls] == 10 * [25 * 4 + 23]
    assert [done for done, _ in calls] == [20, 40, 60, 80, 99, 104, 109, 114, 119, 123]  # within a prompt too
    assert all(part.logits is None for part in seen.parts)
    assert {row["op"]: row["calls"] for row in seen.origin.backends}["routing"] == 10
    assert (seen.origin.model_hash, seen.origin.seed, seen.dtype) == ("sha256:1", 4, "float32")
    again = record(model, rows(20, 5))  # counts of this recording alone
    assert again.origin.backends == seen.origin.backends
    kernels.reset_attestation()
    with pytest.raises(InputError, match=r"record: prompt 1 \(b\): expected token ids from 0 to 96, found 97 to 97"):
        record(model, [[5], RoutingPrompt((97,), title="b")])
    assert model.kernels is kernels and not kernels.attestation()  # told before anything ran


def test_interventions_and_forced_backends_are_seen(model):
    pulled = {"layers.02.moe.logits": lambda x: x + 100.0 * torch.eye(8)[5]}
    with workbench.intervene(model, pulled):
        seen = record(model, rows(20))
    assert (seen.part("model").experts[2, :, 0] == 5).all()
    assert not (seen.part("model").experts[1, :, 0] == 5).all()


def test_the_dtype_of_the_router_is_seen_and_kept(model, monkeypatch, tmp_path):
    plain = record(model, rows(200))
    monkeypatch.setattr(model, "kernels", Kernels(router_dtype=torch.bfloat16))
    seen = record(model, rows(200), keep_logits=True)
    seen.save(tmp_path / "run")
    assert (plain.router_dtype, seen.router_dtype) == (None, "bfloat16")
    assert routing.load_record(tmp_path / "run").router_dtype == "bfloat16"
    logits = torch.from_numpy(seen.part("model").logits)
    assert torch.equal(logits, logits.bfloat16().float())
    assert 0 < routing.flip_totals(compare(plain, seen))["set_flip_rate"].iloc[0] < 0.2


def test_a_token_without_finite_logits_is_marked_and_counts_nowhere(model):
    def spoil(logits):
        logits[3, 1], logits[4, 0], logits[5] = torch.nan, torch.inf, -torch.inf
        logits[6, 2] = -torch.inf  # an expert that is shut out: nothing bad about it
        return logits

    with workbench.intervene(model, {"layers.03.moe.logits": spoil}):
        seen = record(model, rows(20))
        with pytest.raises(NonFiniteError, match=r"part model, layer 3: expected finite .* at position 3 of row 0"):
            routing.expert_load(model, rows(20))
    main = seen.part("model")
    assert np.argwhere(main.bad).tolist() == [[3, 3], [3, 4], [3, 5]]
    assert (main.experts[3, 3:6] == -1).all() and np.isnan(main.weights[3, 3]).all()
    assert np.isnan(main.margin[3, 3:6]).all() and np.isfinite(main.mass[3, 6])
    table = routing.bad_table(seen).query("part == 'model'")
    assert table[["layer", "prompt", "position"]].values.tolist() == [[3, 0, 3], [3, 0, 4], [3, 0, 5]]
    assert table["token"].tolist() == rows(20)[0][3:6]
    load = routing.load_table(seen).query("part == 'model'")
    assert load.groupby("layer")["tokens"].sum().tolist() == [40, 40, 40, 34]
    assert load.groupby("layer")["share"].sum().tolist() == pytest.approx([1.0] * 4)
    summary = routing.summarise(seen)
    assert summary["bad"].iloc[:4].tolist() == [0, 0, 0, 3] and summary["tokens"].iloc[3] == 17
    assert seen.bad_tokens == len(routing.bad_table(seen)) >= 3  # the spoilt experts' outputs are NaN in the head


def test_a_layer_without_any_finite_token_has_no_shares(model):
    with workbench.intervene(model, {"layers.01.moe.logits": lambda x: x * torch.nan}):
        seen = record(model, rows(4))
    summary = routing.summarise(seen)
    assert summary.loc[1, ["tokens", "bad"]].tolist() == [0, 4]
    assert summary.loc[1, ["entropy", "gini", "largest_share", "topk_mass", "mean_margin"]].isna().all()
    assert summary.loc[1, ["dead", "hot", "hottest", "dead_expected"]].isna().all()  # not all dead, none the hottest
    assert summary.loc[0, "gini"] >= 0 and summary.loc[0, ["dead", "hot", "hottest"]].notna().all()


def test_a_router_that_names_an_expert_that_there_is_not_is_a_fault_told_in_one_line(model, monkeypatch):
    def broken(logits, **_):
        return torch.ones(len(logits), 2), torch.full((len(logits), 2), 8)

    monkeypatch.setattr(model.kernels, "routing", broken, raising=False)
    with pytest.raises(BackendError, match="expected experts from 0 to 7, found 8 to 8"):
        record(model, rows(5))


@pytest.mark.parametrize(
    ("fields", "texts", "message"),
    [
        (models.mini(), [], "expected at least one prompt, found none"),
        (models.mini(), [[1], []], r"prompt 1: expected 1 to 4096 tokens .* found 0"),
        (models.mini(max_position_embeddings=8), rows(9), "prompt 0: expected 1 to 8 tokens .* found 9"),
        (models.mini_dense(), rows(9), "expected a model with experts, found a dense one"),
    ],
)
def test_what_cannot_be_recorded_is_named(fields, texts, message):
    with pytest.raises(InputError, match=message):
        record(build(fields), texts)


def test_dense_layers_are_left_out_and_a_record_of_single_tokens_has_no_head(model):
    assert record(build(models.mini_next()), rows(6)).part("model").layers == (0, 2, 3)
    alone = record(model, [[3], [4]])
    assert [part.name for part in alone.parts] == ["model"]
    with pytest.raises(InputError, match=r"expected a part of \['model'\], found 'mtp'"):
        alone.part("mtp")


def test_ties_and_a_choice_of_all_have_their_margins():
    seen = of_logits([[[1.0, 1.0, 1.0, 0.0], [-np.inf, 2.0, -np.inf, -np.inf]]], 2)
    part = seen.part("model")
    assert part.experts.tolist() == [[[0, 1], [1, 0]]] and part.margin.tolist() == [[0.0, 0.0]]
    assert np.isinf(of_logits(np.zeros((1, 3, 4)), 4).part("model").margin).all()


# ============================================================================================================
# Saving
# ============================================================================================================


def test_a_record_comes_back_as_it_was(model, tmp_path):
    prompts = [RoutingPrompt(tuple(row), kind, title) for row, kind, title in zip(rows(9, 4), "ab", "xy", strict=True)]
    for keep in (False, True):
        seen = record(model, prompts, keep_logits=keep, model_hash="sha256:1", seed=7)
        seen.save(tmp_path / "run")
        found = routing.load_record(tmp_path / "run")
        for field in dataclasses.fields(seen):
            if field.name != "parts":
                assert getattr(found, field.name) == getattr(seen, field.name)
        for one, other in zip(seen.parts, found.parts, strict=True):
            assert (one.name, one.layers, list(one.arrays())) == (other.name, other.layers, list(other.arrays()))
            for name, array in one.arrays().items():
                np.testing.assert_array_equal(getattr(other, name), array)
                assert getattr(other, name).dtype == array.dtype


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("top_k",), 3, r"part model: experts: expected int16 \(4, 9, 3\), found int16 \(4, 9, 2\)"),
        (("num_experts",), 2, "experts: expected -1 to 1, found"),
        (("parts",), [], r"content.parts: expected a list of objects, at least one, found \[\]"),
        (("parts", 0, "name"), "other", "part other: token: expected int64 .*, found none"),
        (("parts", 0, "name"), "mtp", "content.parts: expected each name once"),
        (("parts", 0, "name"), None, r"content.parts\[0\].name: expected text, found null"),
        (("parts", 0, "layers"), 4, r"content.parts\[0\].layers: expected different whole numbers from 0 on, found 4"),
        (("parts", 0, "layers"), ["0"], "expected different whole numbers from 0 on"),
        (("parts", 0, "layers"), [1, 1, 2, 3], "expected different whole numbers from 0 on"),
        (("parts", 0), 1, "content.parts: expected a list of objects"),
        (("num_experts",), "16", 'content.num_experts: expected 1 to 32767, found "16"'),
        (("num_experts",), True, "content.num_experts: expected 1 to 32767, found true"),
        (("num_experts",), 10**30, "content.num_experts: expected 1 to 32767, found 1000"),
        (("top_k",), 9, "content.top_k: expected 1 to 8, found 9"),
        (("normalise",), "yes", "content.normalise: expected true or false"),
        (("dtype",), 3, "content.dtype: expected text, found 3"),
        (("router_dtype",), 3, "content.router_dtype: expected text or null, found 3"),
        (("prompts",), 5, "content.prompts: expected a list of objects, at least one, found 5"),
        (("prompts", 0, "tokens"), 2.5, r"content.prompts\[0\].tokens: expected a whole number from 1 on, found 2.5"),
        (("prompts", 0, "tokens"), 8, r"prompts.ids: expected int64 \(8,\), found \(9,\)"),
        (("prompts", 0, "title"), {}, r"content.prompts\[0\].title: expected text"),
        (("parts", 0, "layers"), [0], r"experts: expected int16 \(1, 9, 2\)"),
        (("prompts",), [{"kind": "a"}], r"content.prompts\[0\].title: expected text, found nothing"),
    ],
)
def test_a_record_whose_content_does_not_fit_is_refused(model, tmp_path, path, value, message):
    record(model, rows(9)).save(tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    manifest = json.loads(file.read_text())
    place = manifest["content"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=message) as caught:
        routing.load_record(tmp_path / "run")
    assert str(caught.value).startswith(f"bundle {tmp_path / 'run'}: ")


# ============================================================================================================
# Tables, counted by hand
# ============================================================================================================

#: One layer, four experts, top 2: expert 0 serves all four tokens, 1 two, 2 and 3 one each... and no load is even.
BY_HAND = choices([(0, 1), (0, 2), (0, 1), (3, 0)], [(0, 1), (0, 1), (0, 1), (0, 1)])


def test_load_entropy_gini_dead_and_hot():
    seen = of_logits(BY_HAND, 2)
    load = routing.load_table(seen)
    assert load["tokens"].tolist() == [4, 2, 1, 1, 4, 4, 0, 0]
    assert load["share"].tolist() == [0.5, 0.25, 0.125, 0.125, 0.5, 0.5, 0.0, 0.0]
    assert load["token_share"].tolist() == [1.0, 0.5, 0.25, 0.25, 1.0, 1.0, 0.0, 0.0]
    summary = routing.load_summary(load)
    entropy = 0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(8)
    assert summary["entropy"].tolist() == pytest.approx([entropy, math.log(2)])
    assert summary["effective_experts"].tolist() == pytest.approx([math.exp(entropy), 2.0])
    # mean absolute difference over twice the mean
    gini = [np.abs(np.subtract.outer(s, s)).mean() / (2 * 0.25) for s in load["share"].to_numpy().reshape(2, 4)]
    assert summary["gini"].tolist() == pytest.approx(gini) and gini[1] == 0.5
    assert summary["dead"].tolist() == [0, 2] and summary["hot"].tolist() == [1, 2]
    assert summary["hottest"].tolist() == [0, 0]
    assert routing.load_summary(load, hot=1.0)["hot"].tolist() == [2, 2]
    hot = routing.hot_experts(load, 1.0)
    assert hot[["layer", "expert", "times_even"]].values.tolist() == [[0, 0, 2], [0, 1, 1], [1, 0, 2], [1, 1, 2]]
    assert routing.dead_experts(load)["expert"].tolist() == [2, 3]
    assert routing.summarise(seen)["dead_expected"].tolist() == pytest.approx([4 * 0.5**4] * 2)


def test_load_by_kind_and_by_prompt():
    prompts = [RoutingPrompt((1,), "a"), RoutingPrompt((2, 3), "b"), RoutingPrompt((4,), "a")]
    seen = of_logits(BY_HAND, 2, prompts=prompts)
    by_kind = routing.load_table(seen, "kind")
    assert list(by_kind.columns) == ["kind", *routing.LOAD_COLUMNS]
    assert by_kind.query("kind == 'a' and layer == 0")["tokens"].tolist() == [2, 1, 0, 1]
    assert by_kind.query("kind == 'b' and layer == 0")["tokens"].tolist() == [2, 1, 1, 0]
    by_prompt = routing.load_table(seen, "prompt")
    assert by_prompt.query("prompt == 2 and layer == 0")["tokens"].tolist() == [1, 0, 0, 1]
    assert len(routing.load_summary(by_kind)) == 4 and len(routing.load_summary(by_prompt)) == 6
    with pytest.raises(InputError, match="by: expected None, kind or prompt, found 'layer'"):
        routing.load_table(seen, "layer")


def test_confidence_is_the_mean_over_tokens():
    logits = np.array([[[2.0, 1.0, 0.0], [1.0, 0.0, 0.0 - 5e-6]]], dtype=np.float32)
    seen = of_logits(logits, 2)
    row = routing.confidence_table(seen).iloc[0]
    p = np.exp(logits[0].astype(float)) / np.exp(logits[0].astype(float)).sum(-1, keepdims=True)
    assert row["mean_margin"] == pytest.approx((1.0 + 5e-6) / 2) and row["near_ties"] == 1
    assert row["topk_mass"] == pytest.approx(p[:, :2].sum(-1).mean(), rel=1e-6)
    assert row["router_entropy"] == pytest.approx(-(p * np.log(p)).sum(-1).mean(), rel=1e-6)


def test_coactivation_counts_pairs_and_lift():
    seen = of_logits(BY_HAND, 2)
    together = routing.coactivation(seen)
    assert together.frame(0).values.tolist() == [[4, 2, 1, 1], [2, 2, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert together.lift[0, 0, 1] == 2 * 4 / (4 * 2) and together.lift[0, 1, 2] == 0.0
    assert np.isnan(together.lift[0, 0, 0]) and np.isnan(together.lift[1, 2, 0])
    pairs = together.pairs()
    assert pairs[["layer", "expert", "other", "tokens"]].values.tolist() == [
        [0, 0, 1, 2], [0, 0, 2, 1], [0, 0, 3, 1], [1, 0, 1, 4],
    ]  # fmt: skip
    assert len(together.pairs(top=1, least=2)) == 2
    with pytest.raises(InputError, match=r"layer: expected one of \[0, 1\], found 2"):
        together.frame(2)


def test_an_even_choice_has_the_lift_that_is_promised():
    logits = np.random.default_rng(1).standard_normal((1, 20_000, 16))
    lift = routing.coactivation(of_logits(logits, 4, keep_logits=False)).lift[0]
    assert np.nanmean(lift) == pytest.approx(3 * 16 / (4 * 15), rel=0.01)


def test_drift_is_the_distance_between_the_loads_of_two_ranges():
    seen = of_logits(choices([(0, 1), (0, 1), (0, 2), (0, 2), (2, 3), (2, 3)]), 2)
    drift = routing.position_drift(seen, [0, 2, 4, 6, 9])
    assert drift["tokens"].tolist() == [2, 2, 2, 0]
    assert drift["distance"].iloc[1:3].tolist() == [0.5, 0.5] and drift["from_first"].iloc[2] == 1.0
    assert drift["distance"].iloc[[0, 3]].isna().all() and drift["noise"].iloc[[0, 3]].isna().all()
    assert routing.position_edges(seen, 3) == [0, 2, 4, 6]
    for edges in ([0], [0, 2, 2], [0, 1.5]):
        with pytest.raises(InputError, match="edges: expected at least two rising whole numbers"):
            routing.position_drift(seen, edges)


def test_the_noise_of_drift_is_what_equal_loads_show():
    logits = np.random.default_rng(2).standard_normal((30, 1000, 32))
    drift = routing.position_drift(of_logits(logits, 4, keep_logits=False), [0, 500, 1000]).query("bin == 1")
    assert drift["distance"].mean() == pytest.approx(drift["noise"].mean(), rel=0.05)


def test_rerouting_kept_logits_changes_top_k_and_temperature(model):
    seen = record(model, rows(20), keep_logits=True)
    same = routing.rerouted(seen)
    np.testing.assert_array_equal(same.part("model").experts, seen.part("model").experts)
    hotter = routing.rerouted(seen, top_k=5, temperature=4.0)
    assert hotter.top_k == 5 and (hotter.part("model").entropy > seen.part("model").entropy).all()
    np.testing.assert_array_equal(hotter.part("model").experts[..., :2], seen.part("model").experts)
    wrong = (0.0, -1.0, 1e-40, 1e39, np.nan, np.inf, "1", None, True)
    changes = [({"temperature": value}, "temperature: expected a number from") for value in wrong]
    for change, message in [*changes, ({"top_k": 9}, "from 1 to 8, found 9")]:
        with pytest.raises(InputError, match=message):
            routing.rerouted(seen, **change)
    with pytest.raises(InputError, match="record with keep_logits=True"):
        routing.rerouted(record(model, rows(3)))


@pytest.mark.parametrize("temperature", [1e-37, 1e-6, 0.01, 100.0, 1e6, 3e38])
def test_no_temperature_changes_a_choice(temperature):
    logits = np.random.default_rng(4).standard_normal((2, 300, 32)).astype(np.float32)
    logits[0, 0], logits[1, 1, 3], logits[1, 2] = 0.0, np.nan, -np.inf
    seen = record_of_logits(logits, top_k=4)
    moved = routing.rerouted(seen, temperature=temperature).part("model")
    part = seen.part("model")
    np.testing.assert_array_equal(moved.experts, part.experts)
    np.testing.assert_array_equal(moved.bad, part.bad)
    good = ~part.bad
    weights = moved.weights[good].astype(np.float64)
    assert weights.sum(-1) == pytest.approx(1.0) and (np.diff(weights) <= 0).all()
    if temperature < 1e-4:
        assert moved.entropy[good][1:] == pytest.approx(0.0, abs=1e-3)
        assert weights[1:, 0] == pytest.approx(1.0, abs=1e-3)
    if temperature > 1e4:
        assert moved.entropy[good] == pytest.approx(np.log(32), rel=1e-3)
        assert moved.mass[good] == pytest.approx(4 / 32, rel=1e-3)


def test_a_temperature_is_that_of_the_softmax():
    logits = np.random.default_rng(5).standard_normal((1, 20, 8)).astype(np.float32)
    moved = routing.rerouted(record_of_logits(logits, top_k=3), temperature=2.5)
    direct = record_of_logits(logits / np.float32(2.5), top_k=3).part("model")
    for name in ("experts", "weights", "margin", "mass", "entropy"):
        np.testing.assert_allclose(getattr(moved.part("model"), name), getattr(direct, name), rtol=1e-4, atol=1e-6)
    twice = routing.rerouted(moved, temperature=2.0).part("model")
    once = routing.rerouted(record_of_logits(logits, top_k=3), temperature=5.0).part("model")
    np.testing.assert_allclose(twice.weights, once.weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("logits", "settings", "message"),
    [
        (np.zeros((2, 3)), {"top_k": 1}, r"expected logits \[layers, tokens, experts\], found \(2, 3\)"),
        (np.zeros((2, 3, 4)), {"top_k": 0}, "top_k: expected a whole number from 1 to 4, found 0"),
        (np.zeros((2, 3, 4)), {"top_k": 1, "prompts": [RoutingPrompt((1, 2))]}, "prompts of 3 tokens .* found 2"),
    ],
)
def test_logits_that_are_no_record_are_refused(logits, settings, message):
    with pytest.raises(InputError, match=message):
        record_of_logits(logits, **settings)


# ============================================================================================================
# Two runs
# ============================================================================================================


def test_set_flips_and_order_flips_are_told_apart_and_placed():
    first = choices([(0, 1), (0, 1), (0, 1)], [(2, 3), (2, 3), (2, 3)], [(0, 3), (0, 3), (0, 3)])
    second = choices([(0, 1), (1, 0), (0, 2)], [(2, 3), (0, 1), (2, 3)], [(0, 3), (0, 3), (0, 1)])
    first[1, 1] = [0.0, -1.0, 0.5, 0.25]  # 2 and 3 by a margin of 0.25
    flips = compare(of_logits(first, 2), of_logits(second, 2))
    (part,) = flips.parts
    assert part.set_flip.tolist() == [[False, False, True], [False, True, False], [False, False, True]]
    assert np.argwhere(part.order_flip).tolist() == [[0, 1]]
    assert part.replaced[part.set_flip].tolist() == [1, 2, 1]
    layers = routing.flips_by_layer(flips)
    assert layers["set_flips"].tolist() == [1, 1, 1] and layers["order_flips"].tolist() == [1, 0, 0]
    assert layers["first_flips"].tolist() == [1, 1, 0]
    assert layers["set_flip_rate"].tolist() == pytest.approx([1 / 3] * 3)
    assert layers["flip_margin"].iloc[1] == 0.25 and layers["replaced"].tolist() == [1.0, 2.0, 1.0]
    tokens = routing.flips_by_token(flips)
    assert tokens["first_layer"].tolist() == [pd.NA, 1, 0]
    assert tokens["set_flip_rate"].tolist() == pytest.approx([0.0, 1 / 3, 2 / 3])
    assert math.isnan(tokens["margin"].iloc[0]) and tokens["margin"].iloc[1:].tolist() == [0.25, 11.0]
    total = routing.flip_totals(flips).iloc[0]
    assert total[["pairs", "set_flips", "order_flips", "tokens", "tokens_flipped"]].tolist() == [9, 3, 1, 3, 2]


def test_a_near_tie_is_counted_apart():
    first, second = choices([(0, 1)] * 2), choices([(0, 2)] * 2)
    first[0, 0] = [3.0, 1.0, 1.0 - 5e-6, -9.0]
    row = routing.flips_by_layer(compare(of_logits(first, 2), of_logits(second, 2))).iloc[0]
    assert row["set_flips"] == 2 and row["near_ties"] == 1


def test_tokens_without_finite_logits_are_not_compared():
    first, second = choices([(0, 1), (0, 1)]), choices([(0, 2), (0, 2)])
    second[0, 0, 3] = np.nan
    flips = compare(of_logits(first, 2), of_logits(second, 2))
    row = routing.flips_by_layer(flips).iloc[0]
    assert (row["tokens"], row["uncompared"], row["set_flips"]) == (1, 1, 1)
    assert routing.flips_by_token(flips)["layers"].tolist() == [0, 1]


def test_a_run_equals_itself_and_a_narrowed_one_flips(model):
    texts = rows(200)
    seen = record(model, texts, model_hash="a")
    same = compare(seen, record(model, texts, model_hash="a"))
    assert not any(part.set_flip.any() or part.order_flip.any() for part in same.parts) and same.is_one_checkpoint
    narrowed = build(models.mini()).bfloat16()
    flips = compare(seen, record(narrowed, texts))
    assert flips.is_one_checkpoint is None
    main = flips.parts[0]
    assert 0 < main.set_flip.mean() < 0.2
    assert np.median(main.first.margin[main.set_flip]) < np.median(main.first.margin)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 1}, "top_k: expected two records of one, found 2 and 1"),
        ({"layers": (3, 4)}, r"expected the same parts and layers, found .*\(0, 1\).*\(3, 4\)"),
        ({"prompts": [RoutingPrompt((0, 1)), RoutingPrompt((2, 3))]}, "expected the same prompts, found 1 and 2"),
        ({"prompts": [RoutingPrompt((0, 1, 5, 3))]}, "prompt 0: expected the same tokens, .* from position 2 on"),
    ],
)
def test_records_of_other_tokens_or_models_are_not_compared(change, message):
    settings = {"top_k": 2} | change
    with pytest.raises(InputError, match=message):
        compare(of_logits(BY_HAND, 2), record_of_logits(BY_HAND, **settings))
    with pytest.raises(InputError, match="num_experts: expected two records of one, found 4 and 5"):
        compare(of_logits(BY_HAND, 2), of_logits(np.zeros((2, 4, 5)), 2))


# ============================================================================================================
# Real width
# ============================================================================================================


@pytest.fixture(scope="module")
def real_width():
    """Two runs of 40 layers; each layer's tokens are those of one layer, moved on."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, 4096, 256), dtype=np.float32)
    moved = logits + 0.02 * rng.standard_normal(logits.shape, dtype=np.float32)
    prompts = [RoutingPrompt(tuple(range(512)), f"kind {n % 4}") for n in range(8)]
    return [deepened(of_logits(x, 8, prompts=prompts, keep_logits=False), 40) for x in (logits, moved)]


def deepened(seen, depth: int):
    (part,) = seen.parts
    deep = {
        name: np.concatenate([np.roll(getattr(part, name), 97 * layer, axis=1) for layer in range(depth)])
        for name in ("experts", "weights", "margin", "mass", "entropy")
    }
    return dataclasses.replace(seen, parts=(dataclasses.replace(part, layers=tuple(range(depth)), **deep),))


@pytest.mark.parametrize(
    ("name", "read", "length"),
    [
        ("load", lambda a, b: routing.load_table(a), 40 * 256),
        ("load by kind", lambda a, b: routing.load_table(a, "kind"), 4 * 40 * 256),
        ("hot", lambda a, b: routing.hot_experts(routing.load_table(a), 1.2), None),
        ("summary", lambda a, b: routing.summarise(a), 40),
        ("coactivation", lambda a, b: routing.coactivation(a).pairs(10), 400),
        ("drift", lambda a, b: routing.position_drift(a), 320),
        ("flips by layer", lambda a, b: routing.flips_by_layer(compare(a, b)), 40),
        ("flips by token", lambda a, b: routing.flips_by_token(compare(a, b)), 4096),
        ("bad", lambda a, b: routing.bad_table(a), 0),
    ],
)
def test_40_layers_of_256_experts_and_4096_tokens_take_under_two_seconds(real_width, name, read, length):
    started = time.process_time()  # of this process: another's load is not ours
    table = read(*real_width)
    assert time.process_time() - started < 2.0
    assert length is None or len(table) == length


def test_real_width_has_the_load_of_an_even_router(real_width):
    first, second = real_width
    summary = routing.summarise(first)
    assert (summary["effective_experts"] > 250).all() and (summary["dead"] == 0).all()
    assert (summary["gini"] < 0.1).all()
    rate = routing.flip_totals(compare(first, second))["set_flip_rate"].item()
    assert 0.1 < rate < 0.5


# ============================================================================================================
# Prompts
# ============================================================================================================


class Letters:
    """Stands for a tokenizer: an id a letter."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, *, tools, enable_thinking):
        if messages[0].get("role") not in ("user", "system"):
            raise InputError("chat template: does not accept these messages: no role")
        return f"{len(tools or [])}{enable_thinking}{messages[-1]['content']}"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "ab\n", [("text", "a.txt", "ab\n")]),
        ("a.md", "\ufeffab", [("text", "a.md", "ab")]),
        ("a.jsonl", '[1, 2]\n\n{"text": "x"}\n', [("ids", "a.jsonl line 1", [1, 2]), ("text", "a.jsonl line 3", "x")]),
        ("a.jsonl", json.dumps({"kind": "code", "title": "t", "text": "x"}), [("code", "t", "x")]),
        ("a.jsonl", json.dumps(CHAT), [("chat", "a.jsonl line 1", "0NoneHello")]),
        ("a.jsonl", json.dumps({**CHAT, "tools": [{}], "thinking": False, "id": "c"}), [("chat", "c", "1FalseHello")]),
        ("a.json", "[1, 2]", [("ids", "a.json [0]", [1, 2])]),
        ("a.json", "[[1], [2]]", [("ids", "a.json [0]", [1]), ("ids", "a.json [1]", [2])]),
        ("a.json", json.dumps(CHAT["messages"]), [("chat", "a.json [0]", "0NoneHello")]),
        ("a.json", json.dumps(CHAT), [("chat", "a.json [0]", "0NoneHello")]),
    ],
)
def test_prompts_of_every_form(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content, encoding="utf-8")
    found = routing.read_prompts(tmp_path / name, Letters)
    texts = [(kind, title, tuple(map(ord, x)) if isinstance(x, str) else tuple(x)) for kind, title, x in expected]
    assert [(p.kind, p.title, p.ids) for p in found] == texts


def test_a_call_without_content_is_a_message(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    rows = [{"role": "user", "content": "x"}, call, {"role": "tool", "content": "y"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": rows}))
    assert routing.read_prompts(tmp_path / "a.jsonl", Letters)[0].ids == tuple(map(ord, "0Noney"))


def test_ids_outside_the_vocabulary_name_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("[1]\n\n[2, 97]")
    with pytest.raises(InputError, match=r"a.jsonl line 3: expected token ids from 0 to 96, found 2 to 97"):
        routing.read_prompts(tmp_path / "a.jsonl", Letters, vocabulary=97)
    assert len(routing.read_prompts(tmp_path / "a.jsonl", Letters, vocabulary=98)) == 2


def test_token_ids_need_no_tokenizer(tmp_path):
    def none():
        raise AssertionError("asked for")

    (tmp_path / "a.jsonl").write_text("[1]\n[2, 3]")
    assert [p.ids for p in routing.read_prompts(tmp_path / "a.jsonl", none)] == [(1,), (2, 3)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n", "a.txt: expected some text, found none"),
        ("a.txt", b"a\0", "found a zero byte at position 1"),
        ("a.txt", b"\xff", "expected a text in UTF-8, found: .*invalid start byte"),
        ("a.jsonl", b"", "expected at least one prompt, found none"),
        ("a.jsonl", b"[1]\n{", "a.jsonl line 2: expected JSON"),
        ("a.jsonl", b"[1]\n[]", r"a.jsonl line 2: expected token ids, .* found \[\]"),
        ("a.jsonl", b"[1, -2]", "expected token ids from 0 on, found -2 to 1"),
        ("a.jsonl", b"[1, true]", "expected token ids, "),
        ("a.jsonl", b'{"text": 5}', "expected token ids, .* found {.text.: 5}"),
        ("a.jsonl", b'{"messages": [{}]}', r"line 1: messages\[0\]: role: expected one of system, .* found null"),
        ("a.jsonl", b'{"messages": [{"role": "wizard", "content": "x"}]}', 'role: expected one of .*, found "wizard"'),
        ("a.jsonl", b'{"messages": [{"role": ["user"], "content": "x"}]}', "role: expected one of .*, found "),
        ("a.jsonl", b'{"messages": [1]}', r"messages\[0\]: expected an object, found 1"),
        ("a.jsonl", b'{"messages": []}', "messages: expected at least one, found none"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": null}]}', "content: expected text, found null"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "content: expected text, found null"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": 5}]}', "content: expected text, found 5"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": null}]}', "content: expected text, found null"),
        ("a.jsonl", b'{"text": "x", "messages": []}', "line 1: expected messages or text, found both"),
        ("a.jsonl", b'{"messages": [], "thinking": 3}', "line 1: thinking: expected true or false, found 3"),
        ("a.jsonl", b'{"messages": [], "tools": [1]}', r"tools: expected a list of objects, found \[1\]"),
        ("a.jsonl", b'{"messages": [], "tools": "x"}', "tools: expected a list of objects, found "),
        ("a.json", b"[[1], 2]", "a.json: expected token ids, "),
        ("a.json", b"[" * 100_000, "a.json: expected JSON"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        routing.read_prompts(tmp_path / name, Letters)
    assert "\n" not in str(caught.value)
