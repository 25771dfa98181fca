"""What conformance (test_conformance) does not hold every backend to: values by hand, properties, taps, the choice.

The backends are those that the registry knows and that can run where the tests run. A call goes through `Kernels`, as
the model's does: a backend that refuses it is left out of that case, and must serve another.
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
from workbench.kernels.attention.cases import example as attention_example
from workbench.kernels.conformance import CONTRACTS
from workbench.kernels.contract import normal
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.experts.cases import READS_EVERY_EXPERT
from workbench.kernels.registry import OPERATIONS, Call, resolve
from workbench.kernels.routing.cases import distinct_logits
from workbench.numerics import NumericsPolicy

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
CASES = {op: contract.cases() for op, contract in CONTRACTS.items() if F32 in contract.dtypes}
del CASES["gated_delta_rule"]  # has a file of its own


def served_here(op: str) -> list[str]:
    """Backends that can run where the tests run; the conformance tests say of the others why not."""
    return [name for name, backend in OPERATIONS[op].backends.items() if backend.refusal(call(op)) is None]


def call(op: str, device="cpu", dtype=F32, tokens=600, packed=False, needs_grad=False) -> Call:
    return Call(op, device, dtype, tokens, packed, needs_grad, NumericsPolicy())


def limit(op: str, dtype: torch.dtype) -> float:
    return CONTRACTS[op].limit(dtype, CONTRACTS[op].outputs[0])


def cast(case: dict, dtype: torch.dtype) -> dict:
    return CONTRACTS["linear"].cast(case, dtype)


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


@pytest.mark.parametrize("op", CASES)
def test_the_automatic_choice_equals_the_arbiter_too(op):
    for case, arguments in CASES[op].items():
        for part, expected in zip(outputs(op, None, arguments), arbiter(op, case, F32), strict=True):
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


@pytest.mark.parametrize("name", served_here("causal_conv"))
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


@pytest.mark.parametrize("name", served_here("causal_conv"))
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


# ---- norms


@pytest.mark.parametrize("name", served_here("rms_norm"))
def test_norms_by_hand(name):
    x, weight = torch.tensor([[[3.0, -4.0]]]), torch.tensor([0.5, 0.0])
    root = math.sqrt(12.5)
    (y,) = outputs("rms_norm", name, {"x": x, "weight": weight, "eps": 0.0})
    torch.testing.assert_close(y, torch.tensor([[[4.5 / root, -4.0 / root]]]))
    (y,) = outputs("rms_norm", name, {"x": x, "weight": weight, "eps": 12.5})  # inside the root
    torch.testing.assert_close(y, torch.tensor([[[0.9, -0.8]]]))


@pytest.mark.parametrize("name", served_here("gated_rms_norm"))
def test_the_gated_norm_by_hand(name):
    """The weight is plain, the gate goes through SiLU after the norm."""
    x, weight = torch.tensor([[[3.0, -4.0]]]), torch.tensor([0.5, 2.0])
    gate = torch.tensor([[[1.0, -2.0]]])
    (y,) = outputs("gated_rms_norm", name, {"x": x, "gate": gate, "weight": weight, "eps": 0.0})
    silu = [1.0 / (1.0 + math.exp(-1.0)), -2.0 / (1.0 + math.exp(2.0))]
    root = math.sqrt(12.5)
    torch.testing.assert_close(y, torch.tensor([[[1.5 / root * silu[0], -8.0 / root * silu[1]]]]))


@pytest.mark.parametrize("name", served_here("gated_rms_norm"))
def test_the_gated_norm_rounds_where_its_definition_does(name):
    """In bf16 the normalised value is rounded before weight and gate: equal in almost every bit."""
    drawn = {"x": normal(8, 40, 5, 33), "gate": normal(9, 40, 5, 33)}
    case = cast({**CASES["gated_rms_norm"]["2 x 5 x 33"], **drawn}, BF16)
    (found,), (expected,) = (
        outputs("gated_rms_norm", name, case),
        outputs("gated_rms_norm", "reference", case),
    )
    assert (found != expected).float().mean().item() < 1e-3


# ---- attention


class Scores:
    """Keeps what is seen at the scores."""

    def __init__(self):
        self.seen: list[tuple[str, Tensor]] = []

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.seen.append((name, tensor.clone()))
        return tensor

    def scope(self, prefix: str) -> "Scores":
        return self


@pytest.mark.parametrize("name", served_here("attention"))
def test_scores_are_shown_and_watching_changes_nothing(name):
    for label in ("one token, a past", "prefill", "prefill onto a past", "512"):
        case = CASES["attention"][label]
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


@pytest.mark.parametrize("name", served_here("attention"))
def test_replaced_scores_are_what_the_softmax_is_taken_of(name):
    served = 0
    for case in CASES["attention"].values():
        if outputs("attention", name, case) is None:
            continue
        found = Kernels({"attention": name}).attention(**case, tap=Halved())
        (expected,) = outputs("attention", "reference", {**case, "scale": 0.5 * case["scale"]})
        assert relative_error(found, expected) <= 1e-6
        served += 1
    assert served


def test_a_head_reads_the_key_head_of_its_group():
    """Heads 0 and 1 read key head 0, heads 2 and 3 key head 1; never by turns."""
    case = attention_example(6)
    case["v"] = torch.arange(2.0).view(1, 1, 2, 1).expand(1, 6, 2, 16).clone()
    for name in served_here("attention"):
        found = outputs("attention", name, case)
        if found is not None:
            assert found[0].mean(dim=(0, 1, 3)).tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-6)


# ---- routing


def test_a_shift_of_all_logits_changes_no_choice_of_the_arbiter():
    """Softmax has no absolute scale: far from zero, on either side, the same experts and weights come out."""
    case = {"logits": distinct_logits(33, 16), "top_k": 4, "normalise": True}
    expected = outputs("routing", "reference", case)
    for shift in (-1000.0, 1000.0, 96.0):
        weights, experts = outputs("routing", "reference", {**case, "logits": case["logits"] + shift})
        assert torch.equal(experts, expected[1])
        assert torch.allclose(weights, expected[0], rtol=1e-3)


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
    for name in served_here("routing"):
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


@pytest.mark.parametrize("name", served_here("experts"))
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


@pytest.mark.parametrize("name", READS_EVERY_EXPERT)
def test_what_computes_every_expert_shows_the_nan_of_one_that_nobody_chose(name):
    for label, probe in CONTRACTS["experts"].probes().items():
        if label.startswith(("gate_up", "down")):
            found = outputs("experts", name, probe.arguments)
            assert found is None or bool(torch.isnan(found[0]).all()), label


@pytest.mark.parametrize("name", served_here("experts"))
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
        assert name in order and resolution.backend.refusal(asked) is None
        passed_over = order[: order.index(name)]
        assert [refused for refused, _ in resolution.refused] == list(passed_over)
        for refused, reason in resolution.refused:
            assert reason == backends[refused].refusal(asked) and len(reason) > 9 and "\n" not in reason
        for other, backend in backends.items():
            refusal = backend.refusal(asked)
            if refusal is None:
                assert resolve(asked, other).backend is backend
            else:
                with pytest.raises(BackendError, match=re.escape(refusal)):
                    resolve(asked, other)
    assert "reference" not in chosen  # it is there to be named


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_reference_serves_everything(op):
    assert all(OPERATIONS[op].backends["reference"].refusal(call(op, **fields)) is None for fields in CALLS)


def test_what_has_no_backward_pass_refuses_training():
    refusing = {
        (op, name)
        for op, operation in OPERATIONS.items()
        for name, backend in operation.backends.items()
        if name.startswith("torch_")
        and backend.refusal(call(op)) is None
        and backend.refusal(call(op, needs_grad=True)) is not None
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
