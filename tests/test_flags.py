"""Flags: exact in every dtype, no host sync, the same under joins, compilation and graph capture."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from models import mini

import workbench
from workbench import taps
from workbench.analysis.launches import count_launches
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.model import CausalLM
from workbench.tracing.flags import INFINITY_BITS, UNWRITTEN, Flags, FlagTap
from workbench.tracing.observer import tap_names
from workbench.tracing.statistics import NEAR_LIMIT_SHARE

INF, NAN = math.inf, math.nan
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(ModelConfig.from_hf(mini())).init_weights(3).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (1, 70), generator=torch.Generator().manual_seed(1))


def flagged(x: torch.Tensor) -> tuple[bool, object, object, bool]:
    flags = Flags(["a", "b"], steps=2)
    flags.write("b", x)
    flags.end_step()
    (row,) = flags.table.itertuples()
    assert (row.tap, row.step, row.shape) == ("b", 0, tuple(x.shape))
    return row.has_nan, row.has_pinf, row.has_ninf, row.is_near_limit


@pytest.mark.parametrize("layout", ["one piece", "strided", "narrow"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_kind_of_value_is_found_at_every_place_and_nothing_else(dtype, layout):
    shape = (3, 70) if layout != "narrow" else (70, 3)
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)  # float64 is judged by float32's
    for place in (0, 104, 209):
        for value, expected in {
            NAN: (True, None, None, False), INF: (False, True, False, False), -INF: (False, False, True, False),
            limit * 0.75: (False, False, False, True), -limit: (False, False, False, True),
            limit * NEAR_LIMIT_SHARE: (False, False, False, False), 3.0: (False, False, False, False),
        }.items():  # fmt: skip
            x = torch.full(shape, -1.0, dtype=torch.float64)
            x.view(-1)[place] = value
            if layout != "one piece":
                x = torch.cat([x, x.new_zeros(shape[0], 5)], 1)
            x = x.to(dtype)[:, : shape[1]]
            assert x.is_contiguous() == (layout == "one piece")
            assert flagged(x) == expected, (dtype, layout, place, value)


def test_a_float64_beyond_float32_is_near_the_limit_and_no_infinity():
    assert flagged(torch.tensor([1.0, 1e300], dtype=torch.float64)) == (False, False, False, True)
    flags = Flags(["a"])
    flags.write("a", torch.tensor([1e300], dtype=torch.float64))
    flags.end_step()
    assert flags.magnitudes()["high"].iloc[0] == torch.finfo(torch.float32).max


def test_squares_that_overflow_are_no_fault():
    assert flagged(torch.full((400,), 1e30)) == (False, False, False, False)
    assert flagged(torch.full((400,), 1e30).bfloat16()) == (False, False, False, False)
    assert flagged(torch.full((5000,), 600.0).half()) == (False, False, False, False)  # their norm is near the limit


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
def test_views_of_one_product_are_told_apart(value):
    """A view is proven by the memory around it or by the view before it; what is bad there spoils the proof alone."""
    names = ("left", "right", "far", "own")
    for place, bad in ((3, "left"), (500, "right"), (700, None)):
        product = torch.ones(512, 776)
        product[100, place] = value
        far = torch.full((512, 776), value)
        flags = Flags(names)
        for name, x in zip(names, (product[:, :400], product[:, 400:656], far[:, :256], far[:, 5:9]), strict=True):
            flags.write(name, x)
            del x
        flags.end_step()
        found = {tap for _, tap in flags.tripped(near_limit=True)}
        assert found == {"far", "own"} | ({bad} if bad else set()), place


def test_memory_that_was_proven_and_given_back_proves_nothing():
    flags = Flags(["a", "b"])
    flags.write("a", torch.ones(512, 776)[:, :400])
    flags.write("b", torch.full((512, 776), NAN)[:, :400])  # may come to lie where the first was
    flags.end_step()
    assert flags.tripped() == [(0, "b")]


def test_two_tensors_at_one_point_of_a_pass_are_joined_and_passes_are_not():
    flags = Flags(["a", "b"], steps=4)
    for values in ([1.0], [NAN], [2.0]):
        flags.write("a", torch.tensor(values))
    flags.end_step()
    flags.write("a", torch.ones(3))
    flags.end_step()
    assert flags.tripped() == [(0, "a")] and not flags.last_is_bad()
    assert flags.ring[0, 1].tolist() == [UNWRITTEN, UNWRITTEN]


def test_the_ring_holds_the_last_passes():
    flags = Flags(["a"], steps=3)
    for step in range(7):
        flags.write("a", torch.tensor([INF if step in (1, 5) else 1.0]))
        flags.end_step()
        assert flags.last_is_bad() == (step in (1, 5))
    assert flags.tripped() == [(5, "a")] and flags.table["step"].tolist() == [4, 5, 6] and flags.steps_seen == 7


def test_a_kernel_that_writes_the_words_is_read_like_torch():
    """The layout as a kernel sees it: the address of two int32 words, raised by a maximum of bits without a sign."""
    flags = Flags(["a", "b", "c"], steps=2)
    words = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int32 * 2).from_address(flags.pointer("b")))
    for value in (-3.0, 2.0, -INF):
        bits = np.array([value, -value], dtype=np.float32)
        bits = np.where(bits > 0, bits, np.float32(0)).view(np.int32) & 0x7FFFFFFF
        words[:] = np.maximum(words, bits)
    flags.write("c", torch.tensor([1.0, -5.0]))
    flags.end_step()
    table = flags.table.set_index("tap")
    assert table.loc["b", ["has_nan", "has_pinf", "has_ninf"]].tolist() == [False, False, True]
    assert list(table.index) == ["b", "c"] and pd.isna(table.loc["b", "dtype"])
    assert flags.magnitudes().set_index("tap").loc["b"].tolist()[1:] == [2.0, INF]


def test_nan_of_either_sign_is_above_infinity():
    for nan in (0x7FC00000, 0xFFC00000, 0x7F800001):
        x = torch.tensor(np.array([nan], dtype=np.uint32).view(np.float32))
        flags = Flags(["a"])
        flags.write("a", x)
        flags.end_step()
        assert int(flags.ring[0].min()) > INFINITY_BITS


@pytest.mark.parametrize("policy", ["safe", "factored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_flags_name_what_the_exact_check_names_and_change_no_bit(ids, dtype, policy):
    model = CausalLM(ModelConfig.from_hf(mini())).init_weights(3, "class_default").eval().to(dtype)
    model.kernels = workbench.kernels.Kernels(policy=policy)
    plain = model(ids).logits
    with workbench.trace(model, check="exact") as exact:
        model(ids)
    with workbench.trace(model, check="flags", inside=True) as seen:
        assert torch.equal(model(ids).logits, plain) or policy == "factored"
    bad = exact.table[exact.table[["frac_nan", "frac_pinf", "frac_ninf"]].sum(axis=1) > 0]
    assert {tap for _, tap in seen.flags.tripped()} == set(bad["tap"]) and (policy == "factored") == bool(len(bad))
    assert set(seen.table["tap"]) == set(exact.table["tap"])
    assert (seen.table["shape"] == seen.table["tap"].map(exact.table.set_index("tap")["shape"])).all()
    with workbench.trace(model, check="flags") as outer:
        model(ids)
    hidden = [tap for tap in exact.table["tap"] if tap.split(".", 2)[-1] in taps.STAGES]
    assert set(outer.table["tap"]) == set(exact.table["tap"]) - set(hidden)
    if policy == "factored":
        assert "layers.00.gdn.out" in {tap for _, tap in outer.flags.tripped()}


@torch.no_grad()
def test_flags_never_wait_for_the_device_and_launch_little(model, ids):
    flags = Flags(tap_names(model))
    model.tap = None
    plain = count_launches(lambda: model(ids, use_cache=False))
    model.tap = FlagTap(flags, None)
    try:
        found = count_launches(lambda: model(ids, use_cache=False))
    finally:
        model.tap = None
    assert found.syncs == plain.syncs
    points = len(flags.table[flags.table["step"] == 0])
    assert 0 < found.kernels - plain.kernels <= 2 * points + 30


def test_passes_are_counted_with_those_that_end_early(model, ids):
    with torch.inference_mode(), workbench.trace(model, check="flags") as seen:
        cache = model(ids).cache
        with pytest.raises(ZeroDivisionError), workbench.intervene(model, {"layers.02.gdn.out": lambda x: 1 // 0}):
            model(ids)
        model(ids[:, :1], cache=cache)
    table = seen.table
    assert sorted(set(table["step"])) == [0, 1, 2] and seen.steps == 3
    assert "logits" not in set(table.loc[table["step"] == 1, "tap"])
    assert table.loc[(table["step"] == 2) & (table["tap"] == "embed"), "shape"].item() == (1, 1, 64)


def test_a_selection_leaves_points_out_and_what_flags_cannot_do_is_refused(model, ids):
    select = workbench.tracing.Selection(("*.gdn.out", "logits"), layers=(0, 2))
    with torch.inference_mode(), workbench.trace(model, check="flags", select=select) as seen:
        model(ids)
    assert seen.table["tap"].tolist() == ["layers.00.gdn.out", "layers.02.gdn.out"]
    for options in ({"keep": "logits"}, {"casts": True}, {"histogram": True}):
        with pytest.raises(InputError, match="check flags"), workbench.trace(model, check="flags", **options):
            pass
    with workbench.trace(model) as plain, pytest.raises(InputError, match="expected check 'flags'"):
        assert plain.flags


def test_gradients_flow_through_a_flagged_pass(model, ids):
    with workbench.trace(model, check="flags") as seen:
        model(ids, use_cache=False).logits.sum().backward()
    assert model.embed_tokens.weight.grad is not None and seen.flags.tripped() == []
    model.zero_grad()


def test_a_compiled_function_with_taps_is_one_graph_and_finds_the_same():
    flags = Flags(["a", "b"])

    def call(x):
        flags.write("a", x)
        y = torch.exp(x)
        flags.write("b", y)
        flags.end_step()
        return y

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    compiled(torch.tensor([1.0, 2.0]))
    compiled(torch.tensor([1.0, 200.0]))
    compiled(torch.tensor([1.0, -NAN]))
    assert flags.tripped() == [(1, "b"), (2, "a"), (2, "b")] and flags.steps_seen == 3
