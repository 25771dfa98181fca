"""Which backend runs: a named one or an error, an automatic one with its reason, and a record of both."""

import pytest
import torch

from workbench.errors import BackendError, PolicyError
from workbench.kernels import Kernels, gated_delta_rule, registry
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.registry import OPERATIONS, Backend, Call, Operation, register_backend, resolve
from workbench.numerics import SAFE

DELTA_RULE = "gated_delta_rule"


def call(op: str, **changes) -> Call:
    fields = {
        "device": "cpu",
        "dtype": torch.float32,
        "tokens": 600,
        "packed": False,
        "needs_grad": False,
        "policy": SAFE,
    }
    return Call(op=op, **(fields | changes))


@pytest.fixture
def operations(monkeypatch):
    """A copy of the declared ops that the test may change."""
    monkeypatch.setattr(registry, "OPERATIONS", dict(OPERATIONS))
    return registry.OPERATIONS


def never(*_arguments, **_named):
    raise AssertionError("a backend that refused was run")


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_op_has_an_arbiter_and_an_automatic_choice_for_any_call(op):
    assert "reference" in OPERATIONS[op].backends
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for tokens in (1, 2, 65, 4096):
            for flags in ({}, {"packed": True}, {"needs_grad": True}, {"device": "cuda"}):
                resolution = resolve(call(op, dtype=dtype, tokens=tokens, **flags))
                assert resolution.backend.name != "reference"
                assert str(tokens) in resolution.reason
                assert all(reason for _, reason in resolution.refused)


def test_a_named_backend_that_refuses_is_an_error_with_its_reason():
    for changes, reason in (
        ({"needs_grad": True}, "no backward pass"),
        ({"dtype": torch.bfloat16}, "written for float32"),
        ({"device": "cuda"}, "serves the CPU, not cuda"),
    ):
        with pytest.raises(BackendError, match=f"op linear: backend torch_onednn was asked for .*{reason}"):
            resolve(call("linear", **changes), "torch_onednn")


def test_the_automatic_choice_keeps_what_refused_and_why():
    resolution = resolve(call("linear", needs_grad=True, weight_shape=(512, 512)))
    assert resolution.backend.name == "torch_linear"
    assert resolution.refused == (("torch_onednn", "torch's oneDNN product has no backward pass"),)


@pytest.mark.parametrize(
    ("op", "few", "many"),
    [
        ("linear", {"tokens": 1, "weight_shape": (2048, 2047)}, {"tokens": 1, "weight_shape": (2048, 2048)}),
        ("linear", {"tokens": 31, "weight_shape": (256, 256)}, {"tokens": 64, "weight_shape": (256, 256)}),
        ("attention", {"tokens": 511}, {"tokens": 512}),
        ("experts", {"tokens": 511, "weight_shape": (16, 128, 256)}, {"tokens": 512, "weight_shape": (16, 128, 256)}),
        ("experts", {"tokens": 1, "weight_shape": (256, 1023, 1024)}, {"tokens": 1, "weight_shape": (256, 1024, 1024)}),
    ],
)
def test_what_gains_only_on_large_calls_is_chosen_there_and_serves_small_ones_by_name(op, few, many):
    assert resolve(call(op, **few)).backend.name != "torch_onednn"
    assert resolve(call(op, **many)).backend.name == "torch_onednn"
    assert resolve(call(op, **few), "torch_onednn").backend.name == "torch_onednn"


def test_one_token_takes_the_recurrence_and_more_take_chunks():
    assert resolve(call(DELTA_RULE, tokens=1)).backend.name == "torch_recurrent"
    assert resolve(call(DELTA_RULE, tokens=2)).backend.name == "torch_chunk"


def test_an_unknown_op_or_backend_names_the_known_ones():
    with pytest.raises(BackendError, match="unknown op 'softmax', expected one of alignment, attention, causal_conv"):
        resolve(call("softmax"))
    with pytest.raises(BackendError, match="unknown backend 'fused_chunk', expected one of reference"):
        resolve(call(DELTA_RULE), "fused_chunk")


def test_an_op_that_nobody_can_serve_lists_every_refusal(operations):
    backends = {
        name: Backend("echo", name, never, lambda _call, name=name: f"{name} is out of order")
        for name in ("a", "b")
    }
    operations["echo"] = Operation("echo", backends, lambda _call: ("b", "a"))
    with pytest.raises(BackendError, match=r"no backend .*: b: b is out of order; a: a is out of order"):
        resolve(call("echo"))


def test_a_registered_backend_runs_only_where_it_is_named(operations):
    calls = []

    def run(x, weight):
        calls.append(len(x))
        return x @ weight.T

    register_backend("linear", "by_hand", run, lambda call: None if call.tokens < 5 else "at most 4 rows")
    x, weight = torch.ones(3, 2), torch.ones(4, 2)
    Kernels().linear(x, weight)
    assert calls == []
    assert Kernels("linear=by_hand").linear(x, weight).shape == (3, 4)
    assert calls == [3]
    with pytest.raises(BackendError, match=r"by_hand was asked for .*: at most 4 rows"):
        Kernels("linear=by_hand").linear(torch.ones(5, 2), weight)
    with pytest.raises(BackendError, match="backend 'by_hand' is registered already"):
        register_backend("linear", "by_hand", never, lambda call: None)
    assert "by_hand" not in OPERATIONS["linear"].backends, "the fixture gave the test a table of its own"


def test_the_attestation_counts_calls_by_backend_and_phase():
    kernels = Kernels()
    inputs = spec.example(tokens=3)
    one = {name: x[:, :1] for name, x in inputs.items()}
    kernels.gated_delta_rule(**inputs)
    kernels.gated_delta_rule(**inputs)
    kernels.gated_delta_rule(**one)
    kernels.rms_norm(torch.ones(1, 40, 8), torch.zeros(8), eps=1e-6)
    rows = {(row.op, row.backend, row.tokens): row for row in kernels.attestation()}
    assert {key: row.calls for key, row in rows.items()} == {
        (DELTA_RULE, "torch_chunk", "2 and more"): 2,
        (DELTA_RULE, "torch_recurrent", "1"): 1,
        ("rms_norm", "torch_rms", "2 and more"): 1,
    }
    row = rows[DELTA_RULE, "torch_chunk", "2 and more"]
    assert (row.device, row.dtype, row.refused) == ("cpu", "float32", ())
    assert "automatic" in row.reason
    kernels.reset_attestation()
    assert kernels.attestation() == []
    kernels.gated_delta_rule(**one)
    assert [row.calls for row in kernels.attestation()] == [1]


def test_the_attestation_says_what_the_user_named():
    kernels = Kernels("torch_recurrent:segsum")
    kernels.gated_delta_rule(**spec.example(tokens=3))
    (row,) = kernels.attestation()
    assert (row.backend, row.reason) == ("torch_recurrent", "named by the user")


def test_gradients_take_another_choice_than_inference():
    kernels = Kernels()
    x, weight = torch.randn(64, 256), torch.randn(256, 256, requires_grad=True)
    kernels.linear(x, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        kernels.linear(x, weight)
    assert {row.backend for row in kernels.attestation()} == {"torch_linear", "torch_onednn"}


def test_errors_come_with_the_choice_and_before_any_work():
    with pytest.raises(PolicyError, match="neither a preset"):
        Kernels(policy="fast")
    with pytest.raises(BackendError, match="unknown backend 'fast'"):
        gated_delta_rule(**spec.example(tokens=3), backend="fast")
