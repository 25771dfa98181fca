"""Figures of traces and comparisons: what they show is what their tables hold, and no value is left out silently."""

import math
import xml.etree.ElementTree as ElementTree

import models
import pandas as pd
import pytest
import torch

import workbench
from workbench import plots
from workbench.analysis.compare import compare
from workbench.analysis.spread import bad_spread, exponent_table, exponents_of, layer_exponents
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.report.comparison import comparison_page, comparison_view

NAN, INF = math.nan, math.inf


def texts(plate: plots.Plate) -> str:
    root = ElementTree.fromstring(plate.svg())
    return " | ".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))


def hatched(plate: plots.Plate) -> bool:
    return "<pattern" in plate.svg()


def model_of(decay: str = "class_default") -> CausalLM:
    return CausalLM(ModelConfig.from_hf(models.mini())).init_weights(3, decay).eval()


def ids(tokens: int = 70) -> torch.Tensor:
    return torch.randint(0, 97, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def stage_rows(**errors: float) -> pd.DataFrame:
    """`Comparison.stages` of one pass: tap point without dots -> roundings."""
    rows = []
    for name, roundings in errors.items():
        layer, _, tap = name.partition("__")
        full = f"layers.{int(layer[1:]):02d}.{tap.replace('_', '.', 1)}"
        rows.append((0, int(layer[1:]), full, roundings * 6e-8, roundings))
    return pd.DataFrame(rows, columns=["step", "layer", "tap", "error", "roundings"]).astype({"layer": "Int64"})


def test_stage_map_says_where_it_begins_and_frames_the_fault():
    table = stage_rows(l0__gdn_q=0.0, l0__gdn_decay=INF, l1__gdn_q=3.5, l1__gdn_decay=INF)
    plate = plots.stage_map(table, "layers.00.gdn.decay", (":factored", ":safe"))
    assert hatched(plate) and "first op at fault" in texts(plate) and "gdn.decay" in texts(plate)
    assert "the first tensor that differs is layers.00.gdn.decay" in plate.caption
    assert "3.5 roundings, at layers.01.gdn.q" in plate.caption
    same = plots.stage_map(stage_rows(l0__gdn_q=0.0), None, ("a", "b"))
    assert same.caption == "b beside a: all 1 tensors hold the same values."
    assert plate.svg() == plots.stage_map(table, "layers.00.gdn.decay", (":factored", ":safe")).svg()


def test_many_layers_have_readable_labels():
    table = pd.concat([stage_rows(**{f"l{layer}__gdn_q": float(layer)}) for layer in range(48)], ignore_index=True)
    labels = texts(plots.stage_map(table)).split(" | ")
    numbers = [label for label in labels if label.isdigit() and int(label) < 48]
    assert 8 <= len(numbers) <= 14


def test_depth_ranges_show_limits_and_what_is_not_finite():
    rows = [
        (layer, f"layers.{layer:02d}.residual", 0, "bfloat16", absmax, absmax / 9, bad, 0.0, 0.0)
        for layer, (absmax, bad) in enumerate([(3.0, 0.0), (90000.0, 0.0), (NAN, 1.0)])
    ]
    columns = ["layer", "tap", "step", "dtype", "absmax", "rms", "frac_nan", "frac_pinf", "frac_ninf"]
    table = pd.DataFrame(rows, columns=columns).astype({"layer": "Int64"})
    plate = plots.depth_ranges(table)
    assert "limit 65504" in texts(plate)
    assert "9e+04, at layers.01.residual (bfloat16)" in plate.caption
    assert "1 of the tensors shown hold values that are not finite (crosses)" in plate.caption
    fine = plots.depth_ranges(table[:2])
    assert "1 of 2 tensors would overflow float16" in fine.caption


def test_exponents_are_counted():
    x = torch.tensor([1.0, 1.5, 2.0, 0.0, 2.0**-20, NAN, INF, -0.5])
    table = exponent_table({"layers.00.gdn.q": x})
    assert dict(zip(table["exponent"], table["share"], strict=True)) == {-20: 1 / 8, -1: 1 / 8, 0: 2 / 8, 1: 1 / 8}
    plate = plots.exponent_histograms(table)
    assert "at gdn.q, layer 0 12 % of the values lie outside" in plate.caption and hatched(plate)
    inside = plots.exponent_histograms(exponent_table({"layers.00.gdn.q": torch.ones(4)}))
    assert "all lie inside" in inside.caption


def test_exponents_of_a_trace_are_those_of_its_tensors():
    model = model_of()
    names = ["layers.00.gdn.k", "layers.03.attn.out"]
    with torch.inference_mode(), workbench.trace(model, keep=names, histogram=True) as seen:
        model(ids())
    found = exponents_of(seen.table, names)
    pd.testing.assert_frame_equal(found, exponent_table({name: seen.tensors[name] for name in names}))
    with pytest.raises(InputError, match="histogram=True"):
        exponents_of(seen.table.drop(columns="exponents"), names)
    with pytest.raises(InputError, match="in pass 7"):
        exponents_of(seen.table, names, step=7)


def test_exponents_of_one_layer():
    tensors = {"layers.02.gdn.q": torch.ones(3), "layers.02.gdn.k": 2 * torch.ones(3), "layers.05.gdn.q": torch.ones(3)}
    found = layer_exponents(tensors)
    assert set(found["tap"]) == {"layers.02.gdn.q", "layers.02.gdn.k"} and set(found["exponent"]) == {0, 1}
    assert set(layer_exponents(tensors, 5)["tap"]) == {"layers.05.gdn.q"}
    for bad in (({}, None), (tensors, 3)):
        with pytest.raises(InputError, match="expected tensors of layer"):
            layer_exponents(*bad)


def test_the_spread_of_a_nan_is_by_token_and_head():
    chunked = torch.zeros(2, 4, 64, 3)  # [N, V, C, W]
    chunked[1, 2, 5] = NAN
    flat = torch.zeros(1, 70, 4, 3)
    flat[0, 69, 2, 0] = INF
    spread = bad_spread(
        {"layers.00.gdn.u": chunked, "layers.00.gdn.out": flat, "layers.00.residual": torch.ones(1, 70, 8)}
    )
    bad = spread[spread["share"] > 0]
    assert bad.to_numpy().tolist() == [["layers.00.gdn.u", 69, 2, 1.0], ["layers.00.gdn.out", 69, 2, 1 / 3]]
    assert spread.groupby("tap")["token"].nunique().eq(70).all()
    assert spread.groupby("tap")["head"].nunique().to_dict() == {
        "layers.00.gdn.out": 4, "layers.00.gdn.u": 4, "layers.00.residual": 1,
    }  # fmt: skip
    plate = plots.nan_spread(spread, 64)
    assert "layers.00.gdn.u is the first with values that are not finite, in 1 tokens, from 69 on, of 1 of 4 heads" in (
        plate.caption
    )
    assert (
        "All values of the 1 tensors"
        in plots.nan_spread(bad_spread({"layers.00.residual": torch.ones(1, 3, 2)})).caption
    )
    with pytest.raises(InputError, match="one sequence"):
        bad_spread({"layers.00.gdn.out": torch.zeros(2, 3, 4, 5)})
    with pytest.raises(InputError, match="with tokens"):
        bad_spread({"layers.00.gdn.state": torch.zeros(1, 4, 5, 6)})


def test_the_spread_in_a_model_begins_at_the_decay():
    model = model_of()
    model.kernels = Kernels(policy="factored")
    names = [f"layers.00.{tap}" for tap in ("gdn.log_decay", "gdn.cumsum", "gdn.decay", "gdn.out", "residual")]
    with torch.inference_mode(), workbench.trace(model, keep=names) as seen:
        model(ids())
    share = bad_spread({name: seen.tensors[name] for name in names}).groupby("tap", sort=False)["share"].mean()
    assert share.iloc[:2].eq(0).all() and share.iloc[2:].gt(0).all()


def test_a_timeline_marks_zeros_and_what_is_not_finite():
    rows = [(step, "logits", value) for step, value in enumerate([2.0, 0.0, INF])]
    plate = plots.step_timeline(pd.DataFrame(rows, columns=["step", "tap", "error"]), ["logits"], "error")
    assert plate.caption == (
        "The relative error is highest at logits in pass 0: 2; hollow marks are zero; crosses are not finite."
    )


def test_the_page_of_a_comparison_holds_what_was_found():
    a, b = model_of(), model_of()
    b.kernels = Kernels(policy="factored")
    result = compare(None, a, b, prompt=ids(), decode=1)
    view = comparison_view(result)
    assert "different at gated_delta_rule" in view.page and "layers.00.gdn.decay" in view.page
    page = comparison_page(result, "<x>", "workbench compare")
    assert "&lt;x&gt;" in page and "<x>" not in page and 'src="http' not in page
    fine = comparison_page(compare(None, a, a, prompt=ids()), None, "workbench compare")
    assert "No tensor differs" in fine
