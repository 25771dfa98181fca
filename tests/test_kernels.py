"""Every backend of every op against its arbiter in float64; the gated delta rule has a file of its own.

The backends are those that the registry knows, so that a new one is held to the same cases without a word
here. A call goes through `Kernels`, as the model's does: a backend that refuses it is left out of that case,
and must serve another.
"""

import functools
import itertools
import math
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from workbench import taps
from workbench.errors import BackendError
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.registry import OPERATIONS, Call, resolve
from workbench.numerics import NumericsPolicy

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
EPS = 1e-6


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bounds_of(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


# ---- cases: op -> name -> arguments in fp32


def conv_case(lengths, width, channels=20, window=False, rows=1, packed=False) -> dict:
    tokens = sum(lengths)
    sequences = len(lengths) if packed else rows
    return {
        "x": normal(1, rows, tokens, channels),
        "weight": normal(2, channels, width),
        "window": normal(3, sequences, width - 1, channels) if window else None,
        "cu_seqlens": bounds_of(*lengths) if packed else None,
    }


CONV = {
    "one token": conv_case([1], 4),
    "one token of three sequences, with a window": conv_case([1], 4, window=True, rows=3),
    "shorter than the window": conv_case([2], 4, window=True),
    "31": conv_case([31], 4, rows=2, window=True),
    "33": conv_case([33], 4, channels=7, rows=2),
    "130, with a window": conv_case([130], 4, rows=2, window=True),
    "width 1": conv_case([40], 1, channels=3, window=True),
    "width 2": conv_case([40], 2, channels=1),
    "width 5": conv_case([40], 5, channels=33, window=True),
    "packed": conv_case([5, 60, 1, 2, 40], 4, packed=True),
    "packed, with windows": conv_case([5, 60, 1, 2, 40], 4, window=True, packed=True),
    "packed with empty ones": conv_case([0, 1, 0, 36, 0], 4, window=True, packed=True),
    "packed of one": conv_case([64], 3, packed=True),
    "packed single tokens": conv_case([1, 1, 1], 4, window=True, packed=True),
}

NORM_SHAPES = {
    "2 x 5 x 33": (2, 5, 33),
    "one token": (1, 1, 64),
    "one channel": (3, 1, 1),
    "heads": (2, 3, 4, 24),
    "130": (1, 130, 2),
}
RMS_NORM = {
    name: {"x": normal(1, *shape), "weight": 0.3 * normal(2, shape[-1]), "eps": EPS}
    for name, shape in NORM_SHAPES.items()
}
RMS_NORM |= {
    # Below sqrt(eps) and far above it, and a row of zeros.
    "tiny": {"x": 1e-4 * normal(1, 2, 3, 16), "weight": normal(2, 16), "eps": EPS},
    "large": {"x": 100.0 * normal(1, 2, 3, 16), "weight": normal(2, 16), "eps": EPS},
    "a large eps": {"x": normal(1, 2, 3, 16), "weight": normal(2, 16), "eps": 0.5},
    "zeros": {"x": torch.zeros(1, 2, 16), "weight": normal(2, 16), "eps": EPS},
    "a weight of -1": {"x": normal(1, 1, 3, 16), "weight": normal(2, 16).clamp(max=-1.0), "eps": EPS},
}  # fmt: skip
GATED_RMS_NORM = {name: {**case, "gate": 3.0 * normal(4, *case["x"].shape)} for name, case in RMS_NORM.items()}

LINEAR = {
    "one row": {"x": normal(1, 1, 1, 33), "weight": normal(2, 7, 33)},
    "a vector": {"x": normal(1, 9), "weight": normal(2, 5, 9)},
    "31 rows": {"x": normal(1, 31, 20), "weight": normal(2, 3, 20)},
    "33 rows": {"x": normal(1, 1, 33, 20), "weight": normal(2, 41, 20)},
    "two batches": {"x": normal(1, 2, 65, 64), "weight": normal(2, 96, 64)},
    "one output": {"x": normal(1, 2, 40, 17), "weight": normal(2, 1, 17)},
    "one input": {"x": normal(1, 40, 1), "weight": normal(2, 6, 1)},
    "strided": {"x": normal(1, 20, 3, 40).transpose(0, 2), "weight": normal(2, 20, 9).T},
}


def attention_case(tokens, keys=None, rows=1, heads=4, kv_heads=2, head_dim=16, lengths=None, packed=None) -> dict:
    keys = tokens if keys is None else keys
    sequences = rows if packed is None else len(packed)
    return {
        "q": normal(1, rows, sum(packed) if packed else tokens, heads, head_dim),
        "k": normal(2, sequences, keys, kv_heads, head_dim),
        "v": normal(3, sequences, keys, kv_heads, head_dim),
        "scale": head_dim**-0.5,
        "key_lengths": lengths,
        "cu_seqlens": bounds_of(*packed) if packed else None,
    }  # fmt: skip


ATTENTION = {
    "one token": attention_case(1),
    "one token, a past": attention_case(1, keys=70, rows=2),
    "one token, uneven pasts": attention_case(1, keys=70, rows=3, lengths=[70, 1, 33]),
    "prefill": attention_case(37, rows=2),
    "prefill without groups": attention_case(37, heads=3, kv_heads=3),
    "prefill, one key head": attention_case(19, heads=6, kv_heads=1, head_dim=8),
    "prefill onto a past": attention_case(9, keys=40, rows=2),
    "uneven pasts": attention_case(5, keys=40, rows=3, lengths=[40, 5, 17]),
    "spare rows": attention_case(12, keys=64, rows=2, lengths=[12, 12]),
    "sharp": {**attention_case(40, heads=4, kv_heads=4), "scale": 4.0},
    "packed": attention_case(0, keys=30, packed=[30, 1, 7], lengths=[30, 1, 7]),
    "packed onto pasts": attention_case(0, keys=50, packed=[3, 20, 1], lengths=[50, 20, 31]),
    "512": attention_case(512, rows=2, heads=4, kv_heads=2, head_dim=8),
    "700 onto a past": attention_case(700, keys=790, heads=2, kv_heads=1, head_dim=8),
    "530, uneven pasts": attention_case(
        530, keys=600, rows=2, heads=3, kv_heads=3, head_dim=8, lengths=[600, 531]
    ),
}  # fmt: skip


def distinct_logits(tokens: int, experts: int, seed: int = 1) -> Tensor:
    """Logits that bf16 too keeps apart, in an order of its own for each token."""
    order = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order.float() * (8.0 / experts) - 4.0


ROUTING = {
    f"{tokens} tokens, top {top_k} of {count}{'' if normalise else ', as they are'}": {
        "logits": distinct_logits(tokens, count), "top_k": top_k, "normalise": normalise,
    }
    for tokens, count, top_k, normalise in [
        (1, 8, 2, True), (1, 8, 8, True), (7, 16, 1, True), (255, 16, 4, True), (256, 16, 4, False),
        (300, 64, 8, True), (31, 128, 8, False), (3, 1, 1, True), (5, 3, 3, False),
    ]
}  # fmt: skip

EXPERTS = {
    f"{tokens} tokens, top {top_k} of {count}": experts_spec.example(
        tokens=tokens, experts=count, top_k=top_k, hidden=20, width=12
    )
    for tokens, count, top_k in [
        (1, 8, 2), (3, 8, 3), (4, 8, 2), (5, 8, 2), (31, 8, 8), (31, 5, 1), (512, 8, 2),
        (700, 16, 4), (513, 64, 1),
    ]
}  # fmt: skip


def with_experts(tokens: int, chosen: list[int], **sizes) -> dict:
    """Every token goes to the same experts."""
    case = experts_spec.example(tokens=tokens, top_k=len(chosen), hidden=20, width=12, **sizes)
    return {**case, "experts": torch.tensor(chosen).expand(tokens, -1).clone()}


for _tokens in (1, 4, 5, 600):
    EXPERTS[f"{_tokens} tokens, all on the last expert"] = with_experts(_tokens, [7])
    EXPERTS[f"{_tokens} tokens, all on two, the higher first"] = with_experts(_tokens, [6, 1])
EXPERTS["a weight of zero"] = {**with_experts(6, [6, 1]), "weights": torch.tensor([[1.0, 0.0]]).expand(6, 2)}
for _tokens in (1, 40):  # what torch's grouped product asks for in half precision
    EXPERTS[f"{_tokens} tokens, rows of whole 16 bytes"] = experts_spec.example(tokens=_tokens, width=16)
EXPERTS["an empty tail"] = with_experts(33, [0, 2], experts=100)

CASES: dict[str, dict[str, dict]] = {
    "causal_conv": CONV,
    "rms_norm": RMS_NORM,
    "gated_rms_norm": GATED_RMS_NORM,
    "linear": LINEAR,
    "attention": ATTENTION,
    "routing": ROUTING,
    "experts": EXPERTS,
}
BACKENDS = [(op, name) for op in CASES for name in OPERATIONS[op].backends]
#: How often a value is rounded to a narrow dtype of the inputs on the way to the result, at most.
ROUNDINGS = {
    "causal_conv": 1, "rms_norm": 1, "gated_rms_norm": 2, "linear": 1, "attention": 3, "routing": 1,
    "experts": 8,
}  # fmt: skip


def limit(op: str, dtype: torch.dtype) -> float:
    unit = torch.finfo(dtype).eps / 2
    return (16 if dtype in (F32, F64) else ROUNDINGS[op]) * unit


def cast(case: dict, dtype: torch.dtype) -> dict:
    return {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in case.items()}


def outputs(op: str, name: str | None, case: dict, kernels: Kernels | None = None) -> tuple[Tensor, ...] | None:
    """What the backend makes of the case; None where it refuses it before it runs."""
    kernels = kernels or Kernels({} if name is None else {op: name})
    try:
        found = getattr(kernels, op)(**case)
    except BackendError as refusal:
        assert re.search(rf"op {op}: backend {name} was asked for and cannot serve this call: \w.{{9,}}", str(refusal))
        assert "\n" not in str(refusal)
        return None
    return found if isinstance(found, tuple) else (found,)


@functools.cache
def arbiter(op: str, case: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The reference in float64, fed the values that `dtype` can hold."""
    return outputs(op, "reference", cast(cast(CASES[op][case], dtype), F64))


def test_every_op_has_cases():
    elsewhere = {"gated_delta_rule", "alignment"}  # have tests of their own
    assert set(OPERATIONS) == {*CASES, *elsewhere} == {*ROUNDINGS, *elsewhere}
    for operation in OPERATIONS.values():
        assert "reference" in operation.backends and len(operation.backends) > 1


# ---- every backend against the arbiter


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_backend_equals_the_arbiter(op, name, dtype):
    served = []
    for case, arguments in CASES[op].items():
        found = outputs(op, name, cast(arguments, dtype))
        if found is None:
            continue
        served.append(case)
        for part, expected in zip(found, arbiter(op, case, dtype), strict=True):
            assert part.shape == expected.shape, case
            if part.dtype == torch.int64:
                assert torch.equal(part, expected), case
                continue
            assert part.dtype == dtype, case
            error = relative_error(part, expected)
            assert error <= limit(op, dtype), f"{case}: {error:.1e}, limit {limit(op, dtype):.1e}"
    if not served:
        # Refusing every case of its own dtype would leave a backend untested.
        assert dtype != F32 or OPERATIONS[op].backends[name].supports(call(op, device="cuda")) is None
        pytest.skip(f"{name} refuses {dtype} here")


@pytest.mark.parametrize("op", CASES)
def test_the_automatic_choice_equals_the_arbiter_too(op):
    for case, arguments in CASES[op].items():
        for part, expected in zip(outputs(op, None, arguments), arbiter(op, case, F32), strict=True):
            assert relative_error(part, expected) <= limit(op, F32), case


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_backend_leaves_its_inputs_alone_and_repeats_itself(op, name):
    for case, arguments in CASES[op].items():
        kept = {key: x.clone() if isinstance(x, Tensor) else x for key, x in arguments.items()}
        first = outputs(op, name, arguments)
        if first is None:
            continue
        for part in first:
            for x in arguments.values():
                if isinstance(x, Tensor) and part.numel():
                    assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), case
        second = outputs(op, name, arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), case
        for key, x in kept.items():
            assert torch.equal(arguments[key], x) if isinstance(x, Tensor) else arguments[key] == x, (
                case,
                key,
            )


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_strides_do_not_matter(op, name):
    for case, arguments in CASES[op].items():
        strided = {
            key: x.repeat_interleave(2, -1)[..., ::2] if isinstance(x, Tensor) and key != "cu_seqlens" else x
            for key, x in arguments.items()
        }
        found = outputs(op, name, strided)
        if found is not None:
            for part, expected in zip(found, arbiter(op, case, F32), strict=True):
                assert relative_error(part, expected) <= limit(op, F32), case


# ---- gradients


def cotangents(found: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """Each output that can be differentiated, and the weights of the sum that is."""
    parts = [part for part in found if part.is_floating_point()]
    return [(p, torch.linspace(-1.0, 2.0, p.numel(), dtype=F64).view(p.shape).to(p.dtype)) for p in parts]


def gradients(op: str, name: str | None, case: dict, only: tuple[str, ...] | None = None) -> dict[str, Tensor] | None:
    """Gradients of a weighted sum of the outputs with respect to all floating inputs, or `only` some."""
    leaves = {
        key: x.detach().clone().requires_grad_(only is None or key in only)
        if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in case.items()
    }  # fmt: skip
    found = outputs(op, name, leaves)
    if found is None:
        return None
    total = sum((part * weight).sum() for part, weight in cotangents(found))
    total.backward()
    return {key: x.grad for key, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad}


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_gradients_equal_the_arbiters(op, name, dtype):
    for label, case in CASES[op].items():
        if sum(x.numel() for x in case.values() if isinstance(x, Tensor)) > 20_000:
            continue  # one of the automatic choice's, below
        found = gradients(op, name, cast(case, dtype))
        if found is None:
            continue
        wide = cast(case, F64)
        expected = gradients(op, "reference", wide)
        assert found.keys() == expected.keys()
        # Some gradients are a difference of equals, as that of a norm over one channel: the scale of an error
        # is the largest gradient of the case, or a hundredth of what came down from above.
        sizes = [torch.linalg.vector_norm(g).item() for g in expected.values() if g is not None]
        above = [torch.linalg.vector_norm(w).item() for _, w in cotangents(outputs(op, "reference", wide))]
        scale = max(*sizes, *(0.01 * size for size in above))
        for key, gradient in found.items():
            reference = torch.zeros_like(wide[key]) if expected[key] is None else expected[key]
            gradient = torch.zeros_like(reference) if gradient is None else gradient.double()
            distance = torch.linalg.vector_norm(gradient - reference).item()
            assert distance <= 20 * limit(op, dtype) * scale, f"{label}, {key}: {distance / scale:.1e}"


@pytest.mark.parametrize("op", CASES)
def test_the_arbiters_gradients_equal_finite_differences(op):
    case = cast(next(iter(CASES[op].values())), F64)
    names = [key for key, x in case.items() if isinstance(x, Tensor) and x.is_floating_point()]
    values = [case[key].clone().requires_grad_() for key in names]

    def function(*tensors: Tensor):
        found = outputs(op, "reference", {**case, **dict(zip(names, tensors, strict=True))})
        return tuple(part for part in found if part.is_floating_point() and part.requires_grad)

    assert torch.autograd.gradcheck(function, values, fast_mode=True)


@pytest.mark.parametrize(
    ("op", "case", "key"),
    [("attention", "512", key) for key in ("q", "k", "v")]
    + [("experts", "512 tokens, top 2 of 8", key) for key in ("x", "weights", "gate_up", "down")]
    + [("linear", "two batches", key) for key in ("x", "weight")]
    + [("causal_conv", "130, with a window", key) for key in ("x", "weight", "window")]
    + [("gated_rms_norm", "heads", key) for key in ("x", "gate", "weight")]
    + [("rms_norm", "heads", key) for key in ("x", "weight")],
)
def test_one_trained_input_alone_gets_its_gradient(op, case, key):
    """Everything else frozen: the automatic choice must still leave out what has no backward pass."""
    arguments = CASES[op][case]
    found = gradients(op, None, arguments, (key,))
    expected = gradients(op, "reference", cast(arguments, F64), (key,))
    assert relative_error(found[key], expected[key]) <= 20 * limit(op, F32)


# ---- causal convolution


@pytest.mark.parametrize("name", OPERATIONS["causal_conv"].backends)
def test_convolution_by_hand(name):
    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1).repeat(1, 20, 1)
    weight = torch.tensor([[100.0, 10.0, 1.0]])
    y, window = outputs("causal_conv", name, {"x": x, "weight": weight})
    expected = torch.tensor([1.0, 12.0, 123.0, 231.0])  # silu is the identity there but for silu(1)
    expected[0] = 1.0 / (1.0 + math.exp(-1.0))
    torch.testing.assert_close(y[0, :4, 0], expected, rtol=1e-4, atol=0)
    assert window.flatten().tolist() == [2.0, 3.0]
    y, window = outputs("causal_conv", name, {"x": x, "weight": weight, "window": torch.tensor([[[7.0], [8.0]]])})
    torch.testing.assert_close(y[0, :2, 0], torch.tensor([781.0, 812.0]))


@pytest.mark.parametrize("name", OPERATIONS["causal_conv"].backends)
@hypothesis.settings(max_examples=20)
@hypothesis.given(tokens=st.integers(2, 90), width=st.integers(1, 5), data=st.data())
def test_convolution_split_anywhere_equals_whole(name, tokens, width, data):
    x, weight = normal(5, 1, tokens, 6), normal(6, 6, width)
    whole, last = outputs("causal_conv", "reference", {"x": x, "weight": weight})
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(1, tokens - 1), max_size=4))})
    ys, window = [], None
    for start, stop in itertools.pairwise(cuts):
        part = {"x": x[:, start:stop], "weight": weight, "window": window}
        y, window = outputs("causal_conv", name, part) or outputs("causal_conv", None, part)
        ys.append(y)
    assert relative_error(torch.cat(ys, dim=1), whole) <= limit("causal_conv", F32)
    assert torch.equal(window, last)


@pytest.mark.parametrize("name", OPERATIONS["causal_conv"].backends)
def test_packed_convolution_equals_single_runs_to_the_last_neighbour(name):
    """A NaN in one sequence and its window reaches no other."""
    lengths = [5, 60, 1, 40]
    case = conv_case(lengths, 4, window=True, packed=True)
    case["x"][0, 5:65] = math.nan
    case["window"][1] = math.nan
    y, window = outputs("causal_conv", name, case)
    clean = [torch.isfinite(part).all().item() for part in y.split(lengths, dim=1)]
    assert clean == [True, False, True, True] == torch.isfinite(window).flatten(1).all(1).tolist()
    for s, (start, stop) in enumerate(itertools.pairwise(case["cu_seqlens"].tolist())):
        if s != 1:
            single = {
                "x": case["x"][:, start:stop],
                "weight": case["weight"],
                "window": case["window"][s : s + 1],
            }
            expected = outputs("causal_conv", "reference", cast(single, F64))
            assert relative_error(y[:, start:stop], expected[0]) <= limit("causal_conv", F32)
            assert torch.equal(window[s], expected[1][0].float())


# ---- norms


@pytest.mark.parametrize("name", OPERATIONS["rms_norm"].backends)
def test_norms_by_hand(name):
    x, weight = torch.tensor([[[3.0, -4.0]]]), torch.tensor([0.5, 0.0])
    root = math.sqrt(12.5)
    (y,) = outputs("rms_norm", name, {"x": x, "weight": weight, "eps": 0.0})
    torch.testing.assert_close(y, torch.tensor([[[4.5 / root, -4.0 / root]]]))
    (y,) = outputs("rms_norm", name, {"x": x, "weight": weight, "eps": 12.5})  # inside the root
    torch.testing.assert_close(y, torch.tensor([[[0.9, -0.8]]]))


@pytest.mark.parametrize("name", OPERATIONS["gated_rms_norm"].backends)
def test_the_gated_norm_by_hand(name):
    """The weight is plain, the gate goes through SiLU after the norm."""
    x, weight = torch.tensor([[[3.0, -4.0]]]), torch.tensor([0.5, 2.0])
    gate = torch.tensor([[[1.0, -2.0]]])
    (y,) = outputs("gated_rms_norm", name, {"x": x, "gate": gate, "weight": weight, "eps": 0.0})
    silu = [1.0 / (1.0 + math.exp(-1.0)), -2.0 / (1.0 + math.exp(2.0))]
    root = math.sqrt(12.5)
    torch.testing.assert_close(y, torch.tensor([[[1.5 / root * silu[0], -8.0 / root * silu[1]]]]))


@pytest.mark.parametrize("name", OPERATIONS["gated_rms_norm"].backends)
def test_the_gated_norm_rounds_where_its_definition_does(name):
    """In bf16 the normalised value is rounded before weight and gate: equal in almost every bit."""
    case = cast({**GATED_RMS_NORM["2 x 5 x 33"], "x": normal(8, 40, 5, 33), "gate": normal(9, 40, 5, 33)}, BF16)
    (found,), (expected,) = (
        outputs("gated_rms_norm", name, case),
        outputs("gated_rms_norm", "reference", case),
    )
    assert (found != expected).float().mean().item() < 1e-3


@pytest.mark.parametrize(("op", "name"), [pair for pair in BACKENDS if pair[0] in ("rms_norm", "gated_rms_norm")])
def test_norms_see_one_row_at_a_time_and_show_its_nan(op, name):
    case = {k: x.clone() if isinstance(x, Tensor) else x for k, x in CASES[op]["2 x 5 x 33"].items()}
    (clean,) = outputs(op, name, case)
    case["x"][1, 2, 30] = math.nan
    (found,) = outputs(op, name, case)
    assert bool(torch.isnan(found[1, 2]).all())
    found[1, 2] = clean[1, 2]
    assert torch.equal(found, clean)


# ---- attention


@pytest.mark.parametrize("name", OPERATIONS["attention"].backends)
def test_rows_without_keys_are_not_read(name):
    """What lies behind a sequence's key length changes no bit."""
    served = 0
    for case in ATTENTION.values():
        if case["key_lengths"] is None:
            continue
        plain = outputs("attention", name, case)
        if plain is None:
            continue
        changed = {**case, "k": case["k"].clone(), "v": case["v"].clone()}
        for s, length in enumerate(case["key_lengths"]):
            changed["k"][s, length:], changed["v"][s, length:] = 50.0, 1e6
        assert torch.equal(plain[0], outputs("attention", name, changed)[0])
        served += 1
    assert served


@pytest.mark.parametrize("name", OPERATIONS["attention"].backends)
def test_no_query_sees_the_future_and_each_sees_itself(name):
    served = 0
    for case in ATTENTION.values():
        if case["cu_seqlens"] is not None or case["key_lengths"] is not None:
            continue
        plain = outputs("attention", name, case)
        if plain is None:
            continue
        served += 1
        tokens, keys = case["q"].shape[1], case["k"].shape[1]
        at = tokens // 2  # the query whose own key changes
        changed = {**case, "v": case["v"].clone()}
        changed["v"][:, keys - tokens + at] += 1.0
        (found,) = outputs("attention", name, changed)
        differs = (found != plain[0]).flatten(2).any(-1).any(0)
        assert not bool(differs[:at].any()) and bool(differs[at])
    assert served


class Scores:
    """Keeps what is seen at the scores."""

    def __init__(self):
        self.seen: list[tuple[str, Tensor]] = []

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.seen.append((name, tensor.clone()))
        return tensor

    def scope(self, prefix: str) -> "Scores":
        return self


@pytest.mark.parametrize("name", OPERATIONS["attention"].backends)
def test_scores_are_shown_and_watching_changes_nothing(name):
    for label in ("one token, a past", "prefill", "prefill onto a past", "512"):
        case = ATTENTION[label]
        plain = outputs("attention", name, case)
        if plain is None:
            continue
        watched, tap = Kernels({"attention": name}), Scores()
        assert torch.equal(watched.attention(**case, tap=tap), plain[0])
        group = case["q"].shape[2] // case["k"].shape[2]
        keys = case["k"].repeat_interleave(group, dim=2)
        expected = torch.einsum("bthd,bshd->bhts", case["q"], keys) * case["scale"]
        assert {seen for seen, _ in tap.seen} == {taps.ATTN_SCORES}
        scores = torch.cat([scores for _, scores in tap.seen])
        assert relative_error(scores, expected) <= 1e-6


class Halved(Scores):
    """Puts half of them in the place of the scores."""

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return 0.5 * tensor


@pytest.mark.parametrize("name", OPERATIONS["attention"].backends)
def test_replaced_scores_are_what_the_softmax_is_taken_of(name):
    served = 0
    for case in ATTENTION.values():
        if outputs("attention", name, case) is None:
            continue
        found = Kernels({"attention": name}).attention(**case, tap=Halved())
        (expected,) = outputs("attention", "reference", {**case, "scale": 0.5 * case["scale"]})
        assert relative_error(found, expected) <= 1e-6
        served += 1
    assert served


def test_a_head_reads_the_key_head_of_its_group():
    """Heads 0 and 1 read key head 0, heads 2 and 3 key head 1; never by turns."""
    case = attention_case(6)
    case["v"] = torch.arange(2.0).view(1, 1, 2, 1).expand(1, 6, 2, 16).clone()
    for name in OPERATIONS["attention"].backends:
        found = outputs("attention", name, case)
        if found is not None:
            assert found[0].mean(dim=(0, 1, 3)).tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-6)


# ---- routing


@pytest.mark.parametrize("name", OPERATIONS["routing"].backends)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_among_equal_experts_the_lowest_number_wins(name, dtype):
    rows = [
        ([0.0] * 8, [0, 1, 2]),  # all equal
        ([-5.0] * 8, [0, 1, 2]),
        ([1, 2, 2, 1, 2, 0, 2, 1], [1, 2, 4]),
        ([-9, -3, -8, -3, -7, -3, -6, -3], [1, 3, 5]),  # all negative
        ([3, 0, 0, 0, 0, 0, 0, 4], [7, 0, 1]),
        ([-0.0, 0.0, -0.0, 0.0, -1, -1, -1, 0.0], [0, 1, 2]),
        ([-math.inf] * 6 + [0.0, 0.0], [6, 7, 0]),  # shut out, but top 3 must be filled
    ]
    logits = torch.tensor([row for row, _ in rows], dtype=dtype)
    for repeat in (1, 60):
        case = {"logits": logits.repeat(repeat, 1), "top_k": 3, "normalise": True}
        weights, experts = outputs("routing", name, case)
        assert experts.tolist() == [chosen for _, chosen in rows] * repeat
        assert bool((weights.diff(dim=-1) <= 0).all())
        assert torch.allclose(weights.float().sum(-1), torch.ones(7 * repeat), atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("count", [16, 64, 256])
@pytest.mark.parametrize("name", OPERATIONS["routing"].backends)
def test_ties_among_many_experts(name, count):
    """From some number of experts on, a sort that is not stable does change the order."""
    logits = torch.randint(0, 3, (40, count), generator=torch.Generator().manual_seed(1)).float()
    _, experts = outputs("routing", name, {"logits": logits, "top_k": 8, "normalise": True})
    assert experts.tolist() == [sorted(range(count), key=lambda e, r=row: -r[e])[:8] for row in logits.tolist()]


@pytest.mark.parametrize("name", OPERATIONS["routing"].backends)
def test_top_k_of_all_experts_is_an_order_of_all(name):
    logits = distinct_logits(300, 16)
    weights, experts = outputs("routing", name, {"logits": logits, "top_k": 16, "normalise": False})
    assert torch.equal(experts, logits.argsort(-1, descending=True))
    assert torch.allclose(weights, torch.softmax(logits, -1).gather(1, experts))
    assert torch.allclose(weights.sum(-1), torch.ones(300))


@pytest.mark.parametrize("name", OPERATIONS["routing"].backends)
def test_a_shift_of_all_logits_changes_no_choice(name):
    """Softmax has no absolute scale: far from zero, on either side, the same experts and weights come out."""
    logits = distinct_logits(33, 16)
    expected = outputs("routing", name, {"logits": logits, "top_k": 4, "normalise": True})
    for shift in (-1000.0, 1000.0, 96.0):
        weights, experts = outputs("routing", name, {"logits": logits + shift, "top_k": 4, "normalise": True})
        assert torch.equal(experts, expected[1])
        assert torch.allclose(weights, expected[0], rtol=1e-3)


@pytest.mark.parametrize("name", OPERATIONS["routing"].backends)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_logit_shows_in_its_row_alone(name, value):
    """The choice stays a legal one, so that what follows does not crash far from the cause."""
    logits = distinct_logits(300, 16)
    case = {"logits": logits, "top_k": 4, "normalise": True}
    expected = outputs("routing", name, case)
    broken = logits.clone()
    broken[[5, 299], [3, 0]] = value
    weights, experts = outputs("routing", name, {**case, "logits": broken})
    assert bool(torch.isnan(weights[[5, 299]]).all())
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 16 for row in experts[[5, 299]].tolist())
    rest = torch.ones(300, dtype=torch.bool)
    rest[[5, 299]] = False
    assert torch.equal(weights[rest], expected[0][rest]) and torch.equal(experts[rest], expected[1][rest])


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    rows=st.integers(1, 6), count=st.integers(1, 9), normalise=st.booleans(),
    dtype=st.sampled_from([F32, BF16, F16]), data=st.data(),
)  # fmt: skip
def test_every_router_chooses_alike(rows, count, normalise, dtype, data):
    """Few different values, so that ties abound: the rule is a stable sort of the fp32 probabilities.

    The arbiter sorts float64 ones: values are so far apart, and so close, that fp32 ties none of them.
    """
    value = st.sampled_from([-30.0, -2.0, -1.0, 0.0, 0.5, 0.50390625, 1.0, 4.0, 20.0])
    logits = torch.tensor(
        data.draw(st.lists(st.lists(value, min_size=count, max_size=count), min_size=rows, max_size=rows))
    )
    top_k = data.draw(st.integers(1, count))
    case = {"logits": logits.to(dtype), "top_k": top_k, "normalise": normalise}
    probabilities = torch.softmax(case["logits"].float(), dim=-1)
    for name in OPERATIONS["routing"].backends:
        found = outputs("routing", name, case)
        if found is None:
            continue
        weights, experts = found
        ranked = [sorted(range(count), key=lambda e, row=row: -row[e])[:top_k] for row in probabilities.tolist()]
        assert experts.tolist() == ranked, name
        expected = probabilities.gather(1, experts)
        expected = expected / expected.sum(-1, keepdim=True) if normalise else expected
        assert torch.allclose(weights.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7), name


# ---- experts


#: Computes every expert for every token and weighs by zero, as its comment says.
READS_EVERY_EXPERT = {"torch_dense"}


@pytest.mark.parametrize("name", OPERATIONS["experts"].backends)
def test_experts_by_hand(name):
    """Gate rows first, SiLU on the gate, weights on the output: two experts of width 1."""
    case = {
        "x": torch.tensor([[2.0, 1.0]]),
        "weights": torch.tensor([[0.75, 0.25]]),
        "experts": torch.tensor([[1, 0]]),
        "gate_up": torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[0.0, -1.0], [1.0, 1.0]]]),
        "down": torch.tensor([[[1.0], [0.0]], [[0.0], [2.0]]]),
    }
    silu = {x: x / (1.0 + math.exp(-x)) for x in (2.0, -1.0)}
    expected = torch.tensor([0.25 * silu[2.0] * 3.0, 0.75 * 2.0 * silu[-1.0] * 3.0])
    for tokens in (1, 6, 520):
        repeated = {key: x.repeat(tokens, 1) if key in ("x", "weights", "experts") else x for key, x in case.items()}
        found = outputs("experts", name, repeated)
        if found is not None:
            torch.testing.assert_close(found[0], expected.repeat(tokens, 1))


@pytest.mark.parametrize("tokens", [1, 4, 5, 40, 600])
@pytest.mark.parametrize("name", OPERATIONS["experts"].backends)
def test_a_nan_in_an_expert_reaches_the_tokens_that_chose_it_and_no_other(name, tokens):
    case = experts_spec.example(tokens=tokens, experts=6, top_k=2, hidden=20, width=12)
    case["experts"][case["experts"] == 5] = 4  # nobody chooses 5
    case["experts"][:, 1] = torch.where(case["experts"][:, 0] == 4, 1, case["experts"][:, 1])
    case["experts"][0] = torch.tensor([3, 0])
    for tensor, bad in itertools.product(("gate_up", "down"), (3, 5)):
        broken = {**case, tensor: case[tensor].clone()}
        broken[tensor][bad] = math.nan
        found = outputs("experts", name, broken)
        if found is None:
            continue
        hit = (case["experts"] == bad).any(-1)
        assert bool(hit.any()) == (bad == 3)
        if name in READS_EVERY_EXPERT:
            assert bool(torch.isnan(found[0]).all())
        else:
            assert torch.equal(torch.isnan(found[0]).all(-1), hit) and torch.equal(torch.isnan(found[0]).any(-1), hit)


@pytest.mark.parametrize("name", OPERATIONS["experts"].backends)
def test_a_nan_in_one_token_reaches_no_other(name):
    for tokens in (1, 4, 40, 600):
        case = experts_spec.example(tokens=tokens, experts=6, top_k=2, hidden=20, width=12)
        for bad in {0, tokens - 1}:  # token 0 also fills up segments
            broken = {**case, "x": case["x"].clone()}
            broken["x"][bad, 3] = math.nan
            found = outputs("experts", name, broken)
            if found is not None:
                assert torch.isnan(found[0]).any(-1).nonzero().flatten().tolist() == [bad]


@pytest.mark.parametrize("name", OPERATIONS["experts"].backends)
@hypothesis.settings(max_examples=20)
@hypothesis.given(tokens=st.integers(1, 12), count=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
def test_any_choice_of_experts(name, tokens, count, seed, data):
    top_k = data.draw(st.integers(1, count))
    case = cast(experts_spec.example(tokens=tokens, experts=count, top_k=top_k, hidden=7, width=3, seed=seed), F64)
    case["experts"] = torch.tensor(
        [data.draw(st.permutations(range(count)))[:top_k] for _ in range(tokens)], dtype=torch.int64
    )
    found = outputs("experts", name, case)
    if found is not None:
        assert relative_error(found[0], outputs("experts", "reference", case)[0]) <= 1e-13


# ---- choice


def call(op: str, device="cpu", dtype=F32, tokens=600, packed=False, needs_grad=False) -> Call:
    return Call(op, device, dtype, tokens, packed, needs_grad, NumericsPolicy())


CALLS = [
    dict(zip(("device", "dtype", "tokens", "packed", "needs_grad"), values, strict=True))
    for values in itertools.product(
        ("cpu", "cuda"), (F64, F32, BF16, F16), (1, 2, 4, 5, 31, 32, 255, 256, 511, 512, 4096),
        (False, True), (False, True),
    )
]  # fmt: skip


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_automatic_order_never_picks_what_refuses(op):
    backends = OPERATIONS[op].backends
    chosen = set()
    for fields in CALLS:
        asked = call(op, **fields)
        order = OPERATIONS[op].automatic_order(asked)
        assert set(order) <= set(backends) and len(set(order)) == len(order)
        resolution = resolve(asked)
        name = resolution.backend.name
        chosen.add(name)
        assert name in order and resolution.backend.supports(asked) is None
        passed_over = order[: order.index(name)]
        assert [refused for refused, _ in resolution.refused] == list(passed_over)
        for refused, reason in resolution.refused:
            assert reason == backends[refused].supports(asked) and len(reason) > 9 and "\n" not in reason
        for other, backend in backends.items():
            refusal = backend.supports(asked)
            if refusal is None:
                assert resolve(asked, other).backend is backend
            else:
                with pytest.raises(BackendError, match=re.escape(refusal)):
                    resolve(asked, other)
    assert "reference" not in chosen  # it is there to be named


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_reference_serves_everything(op):
    assert all(OPERATIONS[op].backends["reference"].supports(call(op, **fields)) is None for fields in CALLS)


def test_what_has_no_backward_pass_refuses_training():
    refusing = {
        (op, name)
        for op, operation in OPERATIONS.items()
        for name, backend in operation.backends.items()
        if backend.supports(call(op)) is None and backend.supports(call(op, needs_grad=True)) is not None
    }
    assert refusing == {
        ("linear", "torch_onednn"),
        ("attention", "torch_onednn"),
        ("experts", "torch_onednn"),
    }
    frozen = {"x": torch.randn(64, 256), "weight": torch.randn(256, 256)}
    trained = {**frozen, "weight": frozen["weight"].clone().requires_grad_()}
    kernels = Kernels()
    for arguments in (frozen, trained):
        kernels.linear(**arguments)
    with torch.no_grad():
        kernels.linear(**trained)
    calls = {row.backend: (row.calls, row.refused) for row in kernels.attestation()}
    assert calls["torch_linear"] == (1, (("torch_onednn", "torch's oneDNN product has no backward pass"),))
    assert calls["torch_onednn"] == (2, ())
