"""What notebook 02 shows of a record, against records whose content is known, and the ways to compute experts."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest
import torch
from small_checkpoint import PROMPT, write_small_checkpoint

import workbench
from workbench import bench, plots
from workbench.analysis import expert_paths, runs
from workbench.analysis.routing import RoutingPrompt, findings, narrowing, record, record_of_logits, synthetic, views
from workbench.analysis.wording import counted, ranged
from workbench.controls import ExpertTimings, RoutingControls
from workbench.controls.routing import RECORDED_TEMPERATURES
from workbench.errors import InputError, NonFiniteError
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.registry import OPERATIONS
from workbench.report.session import FINDINGS_FOLDER
from workbench.report.tokens import routed_text
from workbench.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = write_small_checkpoint(tmp_path_factory.mktemp("views") / "checkpoint")
    return workbench.load(folder, dtype="float32"), Tokenizer.from_directory(folder)


@pytest.fixture(scope="module")
def seen(loaded):
    model, tokenizer = loaded
    ids = tokenizer.encode(PROMPT)
    return record(model, [RoutingPrompt(tuple(ids[:40]), "prose", "a"), RoutingPrompt(tuple(ids[40:60]), "code", "b")],
                  keep_logits=True)  # fmt: skip


def chosen(*sets: tuple[int, ...], experts: int = 4, kinds: str = ""):
    """A record of one layer in which token t takes the experts of sets[t], the first of them first."""
    logits = np.zeros((1, len(sets), experts), dtype=np.float32)
    for token, numbers in enumerate(sets):
        for rank, number in enumerate(numbers):
            logits[0, token, number] = 9.0 - rank
    prompts = [RoutingPrompt((place,), kind, "") for place, kind in enumerate(kinds)] if kinds else None
    return record_of_logits(logits, top_k=len(sets[0]), prompts=prompts)


# ============================================================================================================
# Tables and readings
# ============================================================================================================


def test_load_distances_and_hottest_are_those_of_a_known_choice():
    given = chosen((0, 1), (0, 2), (0, 1), (3, 2), kinds="aabb")
    load = views.main_load(given)
    assert views.load_grid(load).loc[0].tolist() == [1.5, 1.0, 1.0, 0.5]
    assert views.load_grid(load, "a").loc[0].tolist() == [2.0, 1.0, 1.0, 0.0]
    distances = views.kind_distances(load)
    assert distances[["kind", "other"]].values.tolist() == [["a", "b"]]
    assert distances["distance"].tolist() == pytest.approx([0.25])  # half of |2-1| + |1-1| + |1-1| + |0-1|, over 4
    reading = views.load_reading(load)
    assert "Expert 0 of layer 0 does 1.50 times" in reading and "0 serve no token" in reading
    assert views.most_telling_layer(load) == 0
    table, caption = views.layer_table(given)
    assert table[["hottest", "times", "tokens", "dead"]].values.tolist() == [[0, 1.5, 0.75, 0]]
    assert caption.startswith("0 hot and 0 dead")


def test_one_kind_has_nothing_to_compare():
    load = views.main_load(chosen((0, 1), (0, 2)))
    assert views.kind_distances(load).empty and "nothing to compare" in views.kind_reading(load)
    assert views.most_telling_layer(load) == 0


def test_of_equals_the_lowest_layer_and_expert_is_named_wherever_one_is(loaded):
    seen = record(loaded[0], [RoutingPrompt((7,), "text", "one")])  # each layer's two experts do 4 times their share
    load, first = views.main_load(seen), int(seen.part("model").experts[0].min())
    reading = views.load_reading(load)
    assert f"Expert {first} of layer 0 does 4.00 times its even share, like 7 others, the most of all" in reading
    assert "would keep 2 of 8" in reading  # not 2 to 2
    flips = narrowing.flip_summary(narrowing.router_flips(loaded[0], seen.prompts))
    counts = pd.DataFrame({"path": ["torch_grouped"], "syncs": [0]})
    wide = synthetic.planted(layers=2, experts=16, top_k=2, tokens=16)
    found = findings.routing_findings(seen=seen, flips=flips, counts=counts, recorded=None, wide=wide)
    assert f"over 1 token; expert {first} of layer 0 does 4.00 times" in found["verdict"][0]
    assert (found["load"]["hottest_layer"], found["load"]["hottest_expert"]) == (0, first)
    assert found["numbers"][0]["value"] == "2" and "layer 0" in found["numbers"][1]["note"]
    table, _ = views.layer_table(seen)
    assert table["hottest"].tolist() == seen.part("model").experts[:, 0].min(-1).tolist()


def test_readings_of_equals_and_of_one_say_so():
    one = views.depth_table(chosen((0, 1), (0, 1), kinds="ab"))
    reading = views.depth_reading(one, 2, 4)
    assert reading.startswith("In layer 0 a token's entropy is") and "Each kind of text uses 2 of 4 experts" in reading
    assert "hold 100 % of" in reading and "expert holds" in views.depth_reading(one, 1, 4)
    assert views.kind_reading(views.main_load(chosen((0, 1), (2, 3), kinds="ab"))) == (
        "A and b send 100 % of their work to different experts of layer 0."
    )
    assert "serve 1 token together" in views.pair_reading(views.pair_view(chosen((0, 1))))
    assert "no pair exceeds" not in views.pair_reading(views.pair_view(chosen((0, 1))))
    assert [counted(n, "token") for n in (0, 1, 4096)] == ["0 tokens", "1 token", "4,096 tokens"]
    assert (ranged(4.0, 4.001), ranged(4.0, 4.5)) == ("4", "4 to 4.5")


def test_a_layer_without_a_finite_token_has_no_dead_experts():
    seen = chosen((0, 1), (2, 3))
    part = seen.parts[0]
    bad = dataclasses.replace(seen, parts=(dataclasses.replace(part, experts=np.full_like(part.experts, -1)),))
    table, caption = views.layer_table(bad)
    assert table[["hottest", "hot", "dead", "chance"]].isna().all(axis=None)
    assert caption.startswith("0 hot and 0 dead experts in 1 layer;")


def test_a_text_of_each_kind_at_least_is_compared():
    with pytest.raises(InputError, match="flip_texts: expected at least 1, found 0"):
        views.some_of_each_kind([RoutingPrompt((1,))], 0)


def test_depth_is_the_mean_over_the_tokens_of_a_kind(seen):
    depth = views.depth_table(seen)
    part = seen.part("model")
    code = depth[(depth["kind"] == "code") & (depth["layer"] == 2)].iloc[0]
    assert code["entropy"] == pytest.approx(part.entropy[2][40:].mean(dtype=np.float64))
    assert code["mass"] == pytest.approx(part.mass[2][40:].mean(dtype=np.float64))
    whole = depth[depth["kind"] == views.ALL]
    assert len(whole) == 4 and whole["effective"].between(1.0, 8.0).all()


def test_pairs_are_counted_against_independent_choice_and_put_beside_each_other():
    view = views.pair_view(chosen(*[(0, 2)] * 6, *[(1, 3)] * 6))
    assert view.counts[0][0, 2] == 6 and view.counts[0][0, 1] == 0
    level = (2 - 1) * 4 / (2 * 3)  # of two among four
    assert view.ratio[0][0, 2] == pytest.approx(7 / (6 * 6 / 12 * level + 1))
    assert np.isnan(np.diagonal(view.ratio[0])).all()
    order = view.order(0)
    assert sorted(order) == [0, 1, 2, 3] and abs(order.index(0) - order.index(2)) == 1
    strongest = view.strongest().iloc[0]
    assert {strongest["expert"], strongest["other"]} in ({0, 2}, {1, 3}) and strongest["tokens"] == 6


def test_one_expert_per_token_has_no_pairs():
    view = views.pair_view(chosen((0,), (1,)))
    assert view.layers == () and view.strongest().empty


def test_the_views_find_what_is_planted_and_the_construction_is_repeatable():
    planted = synthetic.planted(layers=6, experts=64, top_k=4, tokens=128)
    found = findings.planted_check(planted)
    assert found["dead_found"] == found["dead_planted"] == 18 and found["bonds_found"] >= 5
    again = synthetic.planted(layers=6, experts=64, top_k=4, tokens=128)
    assert np.array_equal(planted.record.parts[0].experts, again.record.parts[0].experts)
    depth = views.depth_table(planted.record).query("kind == 'all'")
    assert depth["entropy"].is_monotonic_decreasing  # deeper layers choose more clearly
    distances = views.kind_distances(views.main_load(planted.record)).groupby("layer")["distance"].mean()
    assert distances.iloc[-1] > 1.5 * distances.iloc[0]
    with pytest.raises(InputError, match="expected a multiple of 8 experts"):
        synthetic.planted(experts=12)


def test_pieces_of_a_text_are_the_text_and_carry_their_experts(loaded, seen):
    tokenizer = loaded[1]
    view = views.text_view(seen, tokenizer, 3, prompt=1)
    assert "".join(view.pieces) == tokenizer.decode(seen.prompts[1].ids)
    assert view.experts == tuple(map(tuple, seen.part("model").experts[3][40:].tolist()))
    with pytest.raises(InputError, match="expected a layer of"):
        views.text_view(seen, tokenizer, 9)


def test_texts_are_cut_alike_and_layers_without_finite_logits_are_named(loaded, tmp_path):
    model, tokenizer = loaded
    path = tmp_path / "texts.txt"
    path.write_text(PROMPT, encoding="utf-8")
    (prompt,) = views.texts(model, tokenizer, path, 12)
    assert len(prompt.ids) == 12 and len(views.some_of_each_kind([prompt, prompt], 1)) == 1
    with pytest.raises(InputError, match="max_tokens: expected at least 2"):
        views.texts(model, tokenizer, path, 1)
    with workbench.intervene(model, {"layers.01.moe.logits": lambda x: x * float("nan")}):
        with pytest.raises(NonFiniteError, match="none for any of 12 tokens in layer 1"):
            views.record_texts(model, [prompt])


# ============================================================================================================
# Dtype of the router
# ============================================================================================================


def test_a_narrow_softmax_ties_what_differs_in_its_last_bits():
    # Probabilities of expert 1 above expert 0 by less than bfloat16 tells: of equals the lowest number is taken.
    logits = np.array([[[0.0, 1e-4, -9.0], [0.0, 1.0, -9.0]]], dtype=np.float32)
    given = record_of_logits(logits, top_k=1)
    narrow = narrowing.softmax_in(given, torch.bfloat16)
    assert given.parts[0].experts[0, :, 0].tolist() == [1, 1]
    assert narrow.parts[0].experts[0, :, 0].tolist() == [0, 1] and narrow.router_dtype == "bfloat16"
    with pytest.raises(InputError, match="expected a record with logits"):
        narrowing.softmax_in(record_of_logits(logits, top_k=1, keep_logits=False), torch.float16)


def test_flips_of_every_setting_are_summed_and_the_model_is_left_as_it_was(loaded, seen):
    model = loaded[0]
    kernels = model.kernels
    flips = narrowing.router_flips(model, seen.prompts)
    assert model.kernels is kernels and len(flips) == 4
    rates, summary = narrowing.flip_rates(flips), narrowing.flip_summary(flips)
    assert len(rates) == 4 * 4 and (summary["pairs"] == 4 * 60).all()
    for row in summary.itertuples():
        assert rates[rates["setting"] == row.setting]["set_flips"].sum() == row.set_flips
        assert len(narrowing.margins(flips)[row.setting]) == row.set_flips
    assert "Against a router in fp32: in bfloat16" in narrowing.flip_reading(summary)


# ============================================================================================================
# Ways to compute the experts
# ============================================================================================================


def result() -> dict:
    def row(case: str, backend: str, ms: float, share: float | None, unit: str = "ms") -> dict:
        return {"case": case, "backend": backend, "unit": unit, "median": ms, "iqr": 0.1, "share_of_limit": share}

    rows = []
    for dtype, scale in (("float32", 1.0), ("bfloat16", 0.5)):
        for tokens, least in ((1, 6.0), (64, 60.0), (512, 200.0)):
            case = f"{dtype}, {tokens} tokens, even"
            rows += [row(case, "torch_sorted", scale * 2 * least, 0.5),
                     row(case, "torch_pairs", scale * 3 * least, 0.33),
                     row(case, "transformers (eager)", scale * 2.5 * least, 0.4),
                     row(case, "limit: experts hit, read once", scale * least, None),
                     row(case, "torch_sorted", 3, None, "host syncs")]  # fmt: skip
        rows += [row(f"{dtype}, 512 tokens, zipf", "torch_sorted", scale * 300.0, 0.2),
                 row(f"{dtype}, 512 tokens, zipf", "limit: experts hit, read once", scale * 60.0, None)]  # fmt: skip
    return {
        "rows": rows, "command": "python b.py", "commit": "0123456789abc", "dirty": False, "versions": {"torch": "2"},
        "hardware": {"model": "CPU", "instructions": "AVX", "threads": 1, "shape": {"hidden": 2048, "experts": 256}},
    }  # fmt: skip


def test_recorded_times_are_read_with_their_limit():
    times, reading = expert_paths.figures(result())
    limit = times[(times["path"] == expert_paths.LIMIT) & (times["dtype"] == "float32")]
    assert limit[limit["load"] == "even"]["ms"].tolist() == [6.0, 60.0, 200.0]
    assert len(times) == 2 * (3 * 4 + 2)
    assert set(expert_paths.fastest(times)["path"]) == {"torch_sorted"}
    assert "float32: torch_sorted is fastest for 1 token (12 ms, 50 % of the memory limit)" in reading
    assert "zipf 0.75" in reading
    assert "by `python b.py` at commit 0123456789" in reading and "hidden size 2048" in reading
    with pytest.raises(InputError, match="expected cases like"):
        expert_paths.path_times(result() | {"rows": []})


def test_the_ways_are_named_and_size_classes_pay_where_the_result_says():
    def row(tokens: int, load: str, backend: str, ms: float) -> dict:
        return {"case": f"bfloat16, {tokens} tokens, {load}", "backend": backend, "unit": "ms", "median": ms, "iqr": 0,
                "share_of_limit": None}  # fmt: skip

    cases = ((64, "even", 9.0, 6.0), (128, "even", 9.0, 4.5), (512, "even", 4.0, 5.0), (512, "equal", 20.0, 2.0),
             (512, "zipf", 7.0, 7.0))  # fmt: skip
    rows = [row(n, load, path, ms) for n, load, *both in cases
            for path, ms in zip(("torch_sorted", "torch_sized"), both, strict=True)]  # fmt: skip
    shape = {"hidden": 8, "experts": 256, "width": 8, "top_k": 8}
    accelerated = {"rows": rows, "hardware": {"model": "A card", "shape": shape}}
    assert expert_paths.size_reading(accelerated) == (
        "Size classes on A card, bfloat16: against torch_sorted, torch_sized is 10 times as fast with equal segments "
        "(512 tokens), 1.5 to 2 times as fast with segments of 4 rows or fewer on average (64 to 128 tokens), 0.8 "
        "times as fast with segments of more than 4 rows on average (512 tokens)."
    )
    assert expert_paths.size_reading(None) == ""
    assert expert_paths.size_reading({**accelerated, "rows": rows[::2]}) == ""  # one way alone
    caption = expert_paths.figures(result(), accelerated)[1]
    assert "sorted is torch_sorted, or torch_onednn" in caption and "decode is torch_pairs or torch_gathered" in caption
    assert caption.endswith("(512 tokens).") and not expert_paths.figures(result())[1].endswith(" ")
    for name in re.findall(r"torch_\w+", expert_paths.WAYS):
        assert name in OPERATIONS["experts"].backends


def test_what_a_call_adds_is_read_from_its_benchmark():
    row = {"case": "one call", "backend": "added by Kernels.linear", "unit": "us", "median": 0.7312, "iqr": 0.1}
    reading = expert_paths.overhead_reading({**result(), "rows": [row, {**row, "backend": "Kernels.linear"}]})
    assert reading.startswith("The workbench adds 0.73 µs to Kernels.linear (one call), median of many calls. Measured")
    with pytest.raises(InputError, match="dispatch_overhead: expected rows that begin with 'added by '"):
        expert_paths.overhead_reading({**result(), "rows": []})
    assert "µs to Kernels.routing" in expert_paths.overhead_reading(bench.recorded_result(expert_paths.OVERHEAD))


@pytest.fixture(scope="module")
def given(loaded) -> expert_paths.LayerInput:
    model, tokenizer = loaded
    return expert_paths.layer_input(model, runs.as_input(model, tokenizer.encode(PROMPT)[:48], 64), 1)


def test_the_layer_s_own_input_is_what_its_router_gets(loaded, given):
    model, tokenizer = loaded
    direct = record(model, [tokenizer.encode(PROMPT)[:48]])
    assert np.array_equal(given.experts.numpy(), direct.part("model").experts[1])
    assert given.weights.numpy() == pytest.approx(direct.part("model").weights[1], abs=1e-6)


def test_counts_tell_which_ways_depend_on_the_load(given):
    counts = expert_paths.count_paths(given).set_index("path")
    assert counts.loc["torch_grouped", "syncs"] == 0 and counts.loc["torch_sorted", "syncs"] == 1
    assert counts.loc["torch_grouped", "kernels"] == counts.loc["torch_grouped", "kernels_one"]
    assert counts.loc["torch_loop", "kernels"] > counts.loc["torch_loop", "kernels_one"]
    assert expert_paths.count_paths(given).equals(expert_paths.count_paths(given))
    assert "Without a host sync: " in expert_paths.count_reading(expert_paths.count_paths(given), given)


def test_large_experts_are_given_fewer_tokens(loaded, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setattr(expert_paths, "MOST_BYTES", 100_000)
    ids = runs.as_input(model, tokenizer.encode(PROMPT)[:48], 64)
    assert len(expert_paths.layer_input(model, ids, 1).x) == 100_000 // (2 * 3 * 32 * 64 * 4)


def test_loads_are_named_and_one_set_is_one(given):
    assert expert_paths.LayerInput.under(given, expert_paths.ONE_SET)[2].unique().tolist() == [0, 1]
    with pytest.raises(InputError, match="load: expected"):
        given.under("none")


def test_times_are_measured_in_a_notebook_and_not_kept_in_a_page(given, monkeypatch, tmp_path):
    monkeypatch.delenv(FINDINGS_FOLDER, raising=False)
    timings = ExpertTimings(given)
    assert not timings.table.value
    timings._repr_mimebundle_()
    assert "torch_sorted" in timings.table.value and "48 tokens" in timings.table.value
    timings.tokens.value = 4
    assert "4 tokens" in timings.table.value and "Taken where none is named" in timings.table.value
    monkeypatch.setenv(FINDINGS_FOLDER, str(tmp_path))
    assert "A page holds none" in ExpertTimings(given)._repr_mimebundle_()["text/html"]


# ============================================================================================================
# Figures, text and controls
# ============================================================================================================

PLATES = {
    "load": lambda: plots.load_maps(views.main_load(WIDE.record), "A reading."),
    "kinds": lambda: plots.load_maps(views.main_load(WIDE.record), "A reading.", views.kinds(WIDE.record)),
    "depth": lambda: plots.depth_lines(views.depth_table(WIDE.record), 4, 64, "A reading."),
    "pairs": lambda: plots.pair_maps(views.pair_view(WIDE.record)),
    "few": lambda: plots.pair_maps(views.pair_view(chosen((0, 1), (0, 2), (1, 3)))),
    "paths": lambda: plots.path_times(*expert_paths.figures(result())),
    "probe": lambda: plots.routing_probe(np.array([2.5, 0.0, 0.5, 1.0]), views.depth_table(chosen((0, 1))), 0, 4, "A."),
}
WIDE = synthetic.planted(layers=3, experts=64, top_k=4, tokens=16)


@pytest.mark.parametrize("name", PLATES)
def test_a_figure_is_the_same_at_every_run_and_carries_its_reading(name):
    first, second = PLATES[name](), PLATES[name]()
    assert first.svg() == first.svg() == second.svg()
    assert first.caption in first.alt and len(first.alt) > len(first.caption)


def test_a_load_that_is_no_number_is_hatched_and_named():
    load = views.main_load(chosen((0, 1), (2, 3)))
    clean = plots.load_maps(load, "A reading.").svg()
    marred = plots.load_maps(load.assign(times_even=load["times_even"].where(load["expert"] != 2)), "A reading.").svg()
    assert "no finite token" in marred and "no finite token" not in clean and marred.count("<pattern") > 0


def test_tokens_carry_number_mark_and_tooltip_and_are_escaped():
    view = views.TextView(3, ("<b>", " x\n", "", "y"), ((5, 1), (5, 2), (0, 1), (-1, -1)),
                          ((0.7, 0.3), (0.6, 0.4), (0.9, 0.1), (0.0, 0.0)))  # fmt: skip
    page = routed_text(view, 8).page
    assert 'title="experts 5: 0.70, 1: 0.30">&lt;b&gt;' in page and "<b>" not in page
    assert page.index("<sup>5</sup></span>\n") > 0 and "<i>·</i>" in page  # the number before the line break
    assert 'title="no finite probabilities">y' in page and "expert 5&nbsp;</span> 2 of 4" in page
    lines = re.findall(r"text-decoration-style:(\w+)", page)
    assert len(set(lines)) == 2  # not by colour alone
    gone = routed_text(views.TextView(0, ("a",), ((-1,),), ((0.0,),)), 8)
    assert "no token has finite probabilities" in gone.page


@pytest.fixture
def controls(loaded, seen):
    return RoutingControls(*loaded, PROMPT, seen.prompts, layer=2)


@pytest.mark.parametrize("layer", [99, -1, "1", 1.5])
def test_a_layer_that_there_is_not_is_refused(loaded, layer):
    with pytest.raises(InputError, match=r"layer: expected one with experts, of \[0, 1, 2, 3\], found"):
        RoutingControls(*loaded, PROMPT, layer=layer)


@pytest.mark.parametrize(
    ("name", "value", "is_text_new"),
    [("layer", 0, True), ("top_k", 1, False), ("temperature", 0.5, True), ("choice", "code: b", True),
     ("prompt", "And the king said", True)],
)  # fmt: skip
def test_a_control_redraws(controls, name, value, is_text_new):
    figure, text = controls.figure.value, controls.text.value
    getattr(controls, name).value = value
    assert controls.figure.value != figure and "refused" not in controls.status.value
    assert not is_text_new or controls.text.value != text


def test_a_setting_without_text_is_refused_in_place_of_the_figure(controls):
    controls.prompt.value = ""
    assert "expected some text" in controls.status.value and not controls.figure.value
    controls.prompt.value = "And the king said"
    assert controls.figure.value


def test_a_text_can_be_edited_only_where_it_is_the_one_shown(controls):
    assert not controls.prompt.disabled
    controls.choice.value = "code: b"
    assert controls.prompt.disabled
    controls.choice.value = controls.choice.options[0]
    assert not controls.prompt.disabled


def test_temperature_moves_the_weights_and_not_the_choice(controls):
    lab = controls.lab
    cold, warm = (lab.probe(PROMPT, layer=1, top_k=2, temperature=t) for t in (0.25, 4.0))
    assert cold.text.experts == warm.text.experts
    assert cold.depth["mass"].mean() > warm.depth["mass"].mean()
    assert cold.depth["entropy"].mean() < warm.depth["entropy"].mean()


def test_a_page_gets_recorded_settings_and_a_notebook_does_not(controls, monkeypatch, tmp_path):
    monkeypatch.delenv(FINDINGS_FOLDER, raising=False)
    assert "text/html" not in controls._repr_mimebundle_()
    monkeypatch.setenv(FINDINGS_FOLDER, str(tmp_path))
    page = controls._repr_mimebundle_()["text/html"]
    settings = re.findall(r'<p class="setting">([^<]*)</p>', page)
    assert len(settings) == 3 * len(RECORDED_TEMPERATURES) + 4 * 2 and "layer: 3, text: code" in settings
    assert len(set(re.findall(r'<svg[^>]*viewBox="[^"]*"', page))) <= 1


def test_tables_of_a_page_have_their_headings():
    table, _ = views.layer_table(WIDE.record, rows=2)
    assert len(table) == 2 and set(views.LAYER_HEADINGS) < set(table.columns)
    assert set(expert_paths.COUNT_HEADINGS) == {"path", "syncs", "kernels", "kernels_one", "megabytes", "megabytes_one"}
    assert isinstance(table, pd.DataFrame)


def test_ways_that_this_machine_cannot_run_are_left_out():
    given = expert_paths.LayerInput(3, **experts_spec.example(tokens=5))
    refusals = expert_paths.serving_paths(given, 5)
    assert refusals["torch_sorted"] is None and refusals["corex_moe"] == "serves cuda, not cpu"
    assert set(expert_paths.count_paths(given)["path"]) == {name for name, why in refusals.items() if why is None}
