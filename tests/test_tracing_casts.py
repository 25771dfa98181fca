"""Checked casts: values that overflow, flush or lose half of their bits are counted at the tap point they reach."""

import math
from fractions import Fraction

import pytest
import torch
from models import mini
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import workbench
from workbench import taps
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.tracing.casts import AFTER_THE_LAST, CAST_COLUMNS, CAST_OPERATORS, Casts, count_cast, is_narrowing

SIGNIFICANT_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}


def model_in(dtype: torch.dtype, policy: str = "safe") -> CausalLM:
    model = CausalLM(ModelConfig.from_hf(mini()), Kernels(None, policy)).init_weights(3)
    return model.to(dtype).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (1, 70), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("values", "target", "expected"),
    [
        # 65519.996 is the last fp32 number that rounds to 65504, 65520 the first that does not.
        ([65504.0, 65519.996, 65520.0, -1e6, math.inf, math.nan], torch.float16, (6, 2, 0, 0)),
        # 2^-25 is half of the smallest fp16 number and ties to zero; anything above is rounded up to it.
        ([0.0, -0.0, 2.0**-25, -(2.0**-26), 2.0**-24, 1.0], torch.float16, (6, 0, 2, 0)),
        # 1.5 x 2^-24 becomes 2 x 2^-24: a third of it is lost. 2^-24 itself loses nothing.
        ([1.5 * 2.0**-24, 2.0**-24, 1.0 + 2.0**-12], torch.float16, (3, 0, 0, 1)),
        # bf16 ends at 3.39e38, and below at 2^-133 = 9.2e-41: 1e-40 is rounded to that, half of that ties to zero.
        ([3.4e38, 3.38e38, 1e-40, 1e-41, 2.0**-134], torch.bfloat16, (5, 1, 2, 1)),
        ([1.0 + 2.0**-9] * 3, torch.bfloat16, (3, 0, 0, 0)),
    ],
)
def test_known_values_are_counted(values, target, expected):
    source = torch.tensor(values, dtype=torch.float32)
    found = count_cast(source, source.to(target))
    assert (found.values, found.overflowed, found.flushed, found.halved) == expected


def test_float64_to_float32():
    source = torch.tensor([1e39, 1e-46, 1e-45, 1.0 / 3.0, 2.0**-149], dtype=torch.float64)
    found = count_cast(source, source.float())
    assert (found.overflowed, found.flushed, found.halved) == (1, 1, 1)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_counts_agree_with_exact_arithmetic_value_by_value(target, monkeypatch):
    monkeypatch.setattr("workbench.tracing.casts.BLOCK_VALUES", 100)  # more than one block
    generator = torch.Generator().manual_seed(5)
    exponents = torch.empty(700).uniform_(-44, 20, generator=generator)
    if target == torch.bfloat16:
        exponents = exponents * 0.2 - 126
    source = torch.exp2(exponents).view(7, 100).T * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0])
    result = source.to(target)
    overflowed = flushed = halved = 0
    for before, after in zip(source.flatten().tolist(), result.double().flatten().tolist(), strict=True):
        if math.isinf(after):
            overflowed += 1
        elif after == 0:
            flushed += before != 0
        else:
            error = abs(Fraction(before) - Fraction(after)) / abs(Fraction(before))
            halved += error**2 * 2 ** SIGNIFICANT_BITS[target] > 1  # error > 2^(-p/2), squared
    found = count_cast(source, result)
    assert (found.overflowed, found.flushed, found.halved) == (overflowed, flushed, halved)
    assert flushed and halved and (overflowed or target == torch.bfloat16)


def test_which_casts_are_narrowing():
    narrowing = [
        (torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float8_e5m2),
    ]  # fmt: skip
    assert all(is_narrowing(*pair) for pair in narrowing)
    for pair in [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float32, torch.int64)]:
        assert not is_narrowing(*pair)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.float16), lambda x: x.half(), lambda x: x.type_as(torch.zeros(1, dtype=torch.float16)),
        lambda x: torch.zeros(3, dtype=torch.float16).copy_(x), lambda x: x.to(torch.zeros(1, dtype=torch.float16)),
        lambda x: torch.zeros(2, 3, dtype=torch.float16)[1].copy_(x),
    ],
)  # fmt: skip
def test_every_way_to_cast_is_seen_once(cast, inference):
    x = torch.tensor([1e6, 1e-9, 1.0])
    with torch.inference_mode(inference), torch.no_grad(), Casts() as casts:
        cast(x)
        x.double(), x.half, x.clone()
    (row,) = casts.table.to_dict("records")
    assert list(row) == list(CAST_COLUMNS)
    assert row == {"tap": AFTER_THE_LAST, "from": "float32", "to": "float16", "values": 3, "overflowed": 1,
                   "flushed": 1, "halved": 0}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_half_precision_pass_casts_at_the_points_where_it_computes_wider(ids, dtype, context):
    model = model_in(dtype)
    with context(), workbench.trace(model, casts=True) as trace:
        model(ids)
    table = trace.casts
    to_model = table[table["to"] == str(dtype).removeprefix("torch.")].set_index("tap")
    tokens, config = ids.numel(), model.config
    value_dim = config.value_dim
    expected = {
        "embed": 2 * tokens * config.rotary_dim // 2,  # cos and sin
        "layers.00.input_norm": tokens * config.hidden_size,
        "layers.00.gdn.conv": tokens * config.conv_dim,
        "layers.00.gdn.out": tokens * value_dim,
        "layers.00.gdn.norm": 2 * tokens * value_dim,  # before the gate and after
        "layers.00.moe.topk": tokens * config.num_experts_per_tok,
        "final_norm": tokens * config.hidden_size,
    }
    assert {tap: to_model.loc[tap, "values"] for tap in expected} == expected
    assert (table["from"] != table["to"]).all() and not table["tap"].eq(AFTER_THE_LAST).any()
    assert table["overflowed"].sum() == 0
    assert not table.duplicated(["tap", "from", "to"]).any()


class _Hidden(TorchDispatchMode):
    """Operators that take a wider float tensor than they give, other than those that the counter knows."""

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func._schema.name not in CAST_OPERATORS:
            wide = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor) and x.dim()]
            if any(is_narrowing(x.dtype, result.dtype) for x in wide):
                self.found.add(func._schema.name)
        return result


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tokens", [1, 70])
def test_no_operator_of_a_pass_narrows_besides_the_casts(ids, context, tokens):
    model = model_in(torch.bfloat16)
    with context(), _Hidden() as mode:
        model(ids[:, :tokens])
    assert mode.found == set()


def test_overflow_is_reported_where_it_happens(ids):
    model = model_in(torch.float16)
    with torch.no_grad():
        model.layers[1].input_layernorm.weight.fill_(60000.0)  # normalised rows times this leave float16 behind
        with workbench.trace(model, casts=True) as trace:
            model(ids, use_cache=False)
    found = trace.casts.set_index("tap")
    bad = found[found["overflowed"] > 0]
    assert bad.index[0] == "layers.01.input_norm"
    seen = trace.table.set_index("tap").loc["layers.01.input_norm"]
    infinite = (seen["frac_pinf"] + seen["frac_ninf"]) * math.prod(seen["shape"])
    assert bad.iloc[0]["overflowed"] == round(infinite) > 0


def test_a_float32_pass_narrows_only_its_float64_exponents(ids):
    model = model_in(torch.float32)
    with torch.no_grad(), workbench.trace(model, casts=True) as trace:
        model(ids)
    assert set(zip(trace.casts["from"], trace.casts["to"], strict=True)) == {("float64", "float32")}
    assert {name.split(".", 2)[2] for name in trace.casts["tap"]} <= {taps.GDN_DECAY, taps.GDN_KKT}


def test_counting_changes_no_bit_and_sums_over_passes(ids):
    model = model_in(torch.bfloat16)
    with torch.no_grad():
        plain = model(ids).logits
        with workbench.trace(model, casts=True) as once:
            counted = model(ids).logits
        with workbench.trace(model, casts=True) as twice:
            model(ids)
            model(ids)
    assert torch.equal(plain.view(torch.int16), counted.view(torch.int16))
    assert (twice.casts["values"] == 2 * once.casts["values"]).all() and len(once.casts) == len(twice.casts)


def test_off_by_default_and_gone_afterwards(ids):
    model = model_in(torch.bfloat16)
    with torch.no_grad(), workbench.trace(model) as trace:
        assert _get_current_dispatch_mode() is None  # nothing between the model and torch
        model(ids)
    with pytest.raises(InputError, match="casts=True"):
        _ = trace.casts
    with pytest.raises(ZeroDivisionError), workbench.trace(model, casts=True):
        assert _get_current_dispatch_mode() is not None
        raise ZeroDivisionError
    assert _get_current_dispatch_mode() is None and model.tap is None
