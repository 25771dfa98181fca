"""Tests of workbench.plots: what a figure shows is what its table holds, and it is the same at every run."""

import base64
import math
import re
import xml.etree.ElementTree as ElementTree

import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from workbench import plots
from workbench.analysis import gates
from workbench.analysis.overflow import COMPARED
from workbench.numerics import PRESETS

NAN = math.nan


def gate_table(**spans: float) -> pd.DataFrame:
    """One head per name `layerN_headM`, of the given span."""
    rows = []
    for name, span in spans.items():
        layer, head = (int(part[5:] if part.startswith("layer") else part[4:]) for part in name.split("_"))
        rows.append(
            (
                layer,
                head,
                -span / 30,
                -span / 60,
                -span / 90,
                1.0,
                span / 2,
                span,
                0,
                3,
                span > 11.1,
                span > 88.8,
            )
        )
    return pd.DataFrame(rows, columns=list(gates.GATE_COLUMNS))


def texts(plate: plots.Plate) -> str:
    root = ElementTree.fromstring(plate.svg())
    return " | ".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))


def share_table() -> pd.DataFrame:
    columns = ["gdn.cumsum", "gdn.decay", "attn.out", "residual"]
    return pd.DataFrame([[0.0, 0.25, NAN, 1.0], [NAN, NAN, 1.0, 1.0]], index=[0, 1], columns=columns)


def error_table() -> pd.DataFrame:
    rows = [(layer, policy, error, error / 2) for layer in (0, 2) for policy, error in ERRORS.items()]
    return pd.DataFrame(rows, columns=["layer", "policy", "error_out", "error_state"])


ERRORS = {"safe": 2e-7, "fp32_cumsum": 4e-6, "factored": NAN}

PLATES = {
    "ranges": lambda: plots.gate_ranges(gate_table(layer0_head0=0.5, layer0_head1=20.0, layer4_head0=300.0)),
    "paths": lambda: plots.cumsum_paths(paths()),
    "shares": lambda: plots.share_maps([("safe", share_table() * 0), ("factored", share_table())]),
    "errors": lambda: plots.policy_errors(error_table()),
    "drift": lambda: plots.state_drift(drift_table(), 5),
    "triggers": lambda: plots.triggers(trigger_table(), "factored", 88.7),
    "curve": lambda: plots.training_curve(curve_table()),
    "rows": lambda: plots.row_spread(row_table(), 2, 1, chunk=2),
    "sampled": lambda: plots.sampled_map(word_table(), "factored", "3 of 6 tensors are bad."),
}


def drift_table() -> pd.DataFrame:
    rows = [(name, 100 * n, 3.0, error * n) for name, error in (("safe, float32", 1e-7), ("b", 0.2)) for n in (1, 2)]
    return pd.DataFrame(rows, columns=["setting", "tokens", "norm", "error"])


def row_table() -> pd.DataFrame:
    shares = {"gdn.decay": [0.0, 0.5, 0.5, 0.0], "gdn.kkt": [0.0] * 4, "gdn.u": [0.0, 0.25, 1.0, 0.0],
              "gdn.out": [0.0, 1.0, 1.0, 1.0]}  # fmt: skip
    return pd.DataFrame.from_dict(shares, orient="index")


def word_table() -> pd.DataFrame:
    columns = ["gdn.cumsum", "gdn.decay", "attn.out", "residual"]
    return pd.DataFrame([["finite", "missed", None, "seen"], [None, None, "seen", "seen"]], columns=columns)


def trigger_table(observed: tuple[bool, ...] = (True, False, True)) -> pd.DataFrame:
    spans = (120.0, 3.0, 90.0)
    return pd.DataFrame({"span": spans, "predicted": [span > 88.7 for span in spans], "observed": observed})


def curve_table() -> pd.DataFrame:
    rows = [(1, 100, 5.0, 5.1, 0.2), (1, 200, 4.0, 4.2, 0.5), (2, 250, 3.9, 4.05, 0.975)]
    return pd.DataFrame(rows, columns=["run", "total_step", "next", "heldout", "validation_exact"])


def paths(scale: float = 2.0) -> pd.DataFrame:
    frames = [
        pd.DataFrame({"row": range(64), "cumsum": [-rate * (i + 1) for i in range(64)]}).assign(
            role=role, layer=layer, head=1, chunk=0
        )
        for role, layer, rate in (("strongest", 2, scale), ("median", 0, 0.1), ("weakest", 1, 0.01))
    ]
    return pd.concat(frames, ignore_index=True)


@pytest.mark.parametrize("name", PLATES)
def test_a_figure_is_the_same_at_every_run_and_every_save(name):
    first, second = PLATES[name](), PLATES[name]()
    assert first.svg() == first.svg() == second.svg()
    assert "1970" not in first.svg() and "<dc:date>" not in first.svg()


@pytest.mark.parametrize("name", PLATES)
def test_a_figure_carries_its_reading_and_its_text_for_those_who_cannot_see_it(name):
    plate = PLATES[name]()
    page = plate._repr_html_()
    assert plate.caption in plate.alt and len(plate.alt) > len(plate.caption)
    assert page.startswith('<figure class="plate"><img alt="') and "<figcaption>" in page
    svg = base64.b64decode(re.search(r"base64,([^\"]+)\"", page).group(1)).decode()
    assert svg == plate.svg() and "http" not in re.sub(
        r"http://(www\.w3\.org|purl\.org|creativecommons\.org)", "", svg
    )


def test_words_of_a_figure_are_escaped():
    plate = plots.share_maps([("<b>&", share_table())])
    assert "<b>" not in plate._repr_html_() and "&lt;b&gt;&amp;" in plate._repr_html_()


def test_every_policy_that_a_report_compares_has_a_look_of_its_own():
    assert set(plots.POLICY_STYLE) == set(COMPARED) <= set(PRESETS)
    colors, markers, _ = zip(*plots.POLICY_STYLE.values(), strict=True)
    assert len(set(colors)) == len(set(markers)) == len(COMPARED)


def test_gate_ranges_label_the_limits_and_count_the_heads_beyond_them():
    plate = PLATES["ranges"]()
    assert "float32 88.7" in texts(plate) and "float16 11.1" in texts(plate)
    assert plate.caption.startswith("1 of 3 heads decay by more in one chunk")
    assert "head 0 of layer 4, reaches 300 nats" in plate.caption
    assert [label in texts(plate) for label in ("layer 0", "layer 4", "layer 1")] == [True, True, False]


def test_gate_ranges_put_each_head_at_its_span():
    figure = PLATES["ranges"]().figure
    marks = [
        line.get_xdata()[0]
        for line in figure.axes[1].lines
        if line.get_marker() in "osX" and len(line.get_xdata()) == 1
    ]
    assert marks == [0.5, 20.0, 300.0]
    assert figure.axes[1].get_xscale() == "symlog"


def test_gate_ranges_of_a_mild_prompt_claim_no_overflow():
    caption = plots.gate_ranges(gate_table(layer0_head0=0.5)).caption
    assert caption.startswith("No chunk of this prompt reaches a limit of exp in any of the 1 heads")


def test_paths_name_the_row_from_which_exp_is_infinite():
    assert "from row 44 of its chunk on for the strongest: layer 2, head 1" in PLATES["paths"]().caption
    assert "No head shown passes" in plots.cumsum_paths(paths(0.5)).caption


def test_share_maps_hatch_what_is_not_finite_and_frame_the_first_bad_op():
    plate = PLATES["shares"]()
    cells = list(plate.figure.axes[1].patches)
    by_place = {(round(p.get_x(), 1), round(p.get_y(), 1)): p for p in cells if p.get_fill()}
    assert by_place[(0.0, 0.0)].get_hatch() is None
    assert by_place[(1.0, 0.0)].get_hatch() == "////" and by_place[(3.0, 0.0)].get_hatch() == "xxxx"
    assert by_place[(0.0, 1.0)].get_facecolor()[:3] == to_rgb(plots.CARD)  # no such op in this layer
    (frame,) = [patch for patch in cells if not patch.get_fill()]
    assert (frame.get_x(), frame.get_y()) == (1, 0)
    assert all(patch.get_fill() for patch in plate.figure.axes[0].patches)  # nothing bad in the safe run
    assert "gdn.decay of layer 0 (25 % of its values); 2 of 2 layers" in plate.caption


def test_policy_errors_put_what_is_not_finite_into_the_hatched_strip():
    plate = PLATES["errors"]()
    axes = plate.figure.axes[0]
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert lines["safe"] == [2e-7, 2e-7] and lines["fp32_cumsum"] == [4e-6, 4e-6]
    (strip,) = [patch for patch in axes.patches if patch.get_hatch()]
    left, right = strip.get_x(), strip.get_x() + strip.get_width()
    assert all(left < x < right for x in lines["factored"]) and left > 4e-6
    assert "safe stays within 2.0e-07" in plate.caption and "factored is not finite" in plate.caption
    assert "bound 3e-06" in texts(plate) and "not finite" in texts(plate)


def test_policy_errors_without_any_finite_or_with_exact_results():
    errors = error_table().assign(error_out=NAN, error_state=NAN)
    assert "safe is not finite" in plots.policy_errors(errors).caption
    assert (
        "safe stays within 0.0e+00"
        in plots.policy_errors(errors.assign(error_out=0.0, error_state=0.0)).caption
    )


def test_a_training_curve_states_where_it_ends_and_leaves_out_what_was_not_followed():
    plate = plots.training_curve(curve_table())
    assert plate.caption == (
        "Held-out text ends at 4.050 nats a token, with 97.5 % of the validation dialogues exact, after 250 steps "
        "in 2 runs (dashed lines)."
    )
    text_only = plots.training_curve(curve_table().drop(columns="validation_exact")[:2])
    assert text_only.caption == "Held-out text ends at 4.200 nats a token, after 200 steps."
    assert "dialogues" not in texts(text_only) and "held-out text" in texts(text_only)


def test_the_trigger_plot_counts_false_alarms_and_misses():
    def caption(table: pd.DataFrame, limit: float | None = 88.7) -> str:
        return plots.triggers(table, "factored", limit, "A note.").caption

    assert caption(trigger_table()) == (
        "Under factored, 2 of 3 chunks are not finite. The limit of 88.7 nats predicts it for 2. "
        "No false alarm and no miss. A note."
    )
    assert "False alarms, finite beyond the limit: 0; misses, not finite without it: 1." in caption(
        trigger_table((True, True, True))
    )
    assert "False alarms, finite beyond the limit: 2; misses, not finite without it: 0." in caption(
        trigger_table((False, False, False))
    )
    free = trigger_table((False, False, False)).assign(predicted=False)
    plate = plots.triggers(free, "safe", None)
    assert plate.caption == "Under safe, 0 of 3 chunks are not finite. No false alarm and no miss."
    assert "this form has no limit" in texts(plate) and "this form overflows: 177.4" in texts(
        plots.triggers(free, "midpoint", 177.4)
    )


def test_the_drift_is_stated_at_the_end():
    caption = plots.state_drift(drift_table(), 5).caption
    assert caption == "After 200 tokens: safe, float32 is off by 2e-07; b is off by 0.4."


def test_the_map_of_a_sampled_check_tells_missed_from_seen_by_hatch():
    axes = PLATES["sampled"]().figure.axes[0]
    by_place = {(round(p.get_x(), 1), round(p.get_y(), 1)): p.get_hatch() for p in axes.patches}
    assert [by_place[x, 0.0] for x in (0.0, 1.0, 3.0)] == [None, "xxxx", "...."]
    assert by_place[(2.0, 0.0)] is None and by_place[(2.0, 1.0)] == "...."
    assert "not finite, called clean" in texts(PLATES["sampled"]())


def test_the_spread_over_rows_hatches_each_run_and_groups_stages_that_are_alike():
    plate = PLATES["rows"]()
    runs = [
        (patch.get_x(), patch.get_y(), patch.get_width(), patch.get_hatch()) for patch in plate.figure.axes[0].patches
    ]
    assert runs == [(1, 0, 2, "////"), (1, 2, 1, "////"), (2, 2, 1, "xxxx"), (1, 3, 3, "xxxx")]
    assert plate.caption == (
        "Rows that are not finite in head 1 of layer 2: gdn.decay, gdn.u: 2 of 4 rows, from token 1 on; gdn.kkt: none; "
        "gdn.out: 3 of 4 rows, from token 1 on."
    )
