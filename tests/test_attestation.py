"""The rule of every op, cell by cell: unavailable or failing, named or chosen automatically, strict or lenient."""

import importlib
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from models import mini

from workbench.cards import Rule, card_named
from workbench.config import ModelConfig
from workbench.errors import BackendError, BackendFailure, BackendWarning, InputError, Unserved
from workbench.kernels import Kernels, registry
from workbench.kernels.alignment import spec as alignment_spec
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.gated_delta_rule import spec as rule_spec
from workbench.kernels.gdn_decode import spec as decode_spec
from workbench.kernels.machine import this_machine
from workbench.kernels.out_of_memory import is_out_of_memory
from workbench.kernels.registry import OPERATIONS, Operation, register_backend
from workbench.kernels.requirements import MissingSymbol, Requires, forget_symbols, load_symbol
from workbench.kernels.workspace import Workspace
from workbench.model import CausalLM
from workbench.numerics import NumericsPolicy


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


#: One valid call of every op.
CALLS = {
    "linear": lambda k: k.linear(normal(3, 4), normal(5, 4)),
    "causal_conv": lambda k: k.causal_conv(normal(1, 6, 4), normal(4, 3), window=normal(1, 2, 4)),
    "rms_norm": lambda k: k.rms_norm(normal(1, 3, 4), normal(4), eps=1e-6),
    "gated_rms_norm": lambda k: k.gated_rms_norm(normal(1, 3, 4), normal(1, 3, 4), normal(4), eps=1e-6),
    "attention": lambda k: k.attention(normal(1, 3, 2, 4), normal(1, 3, 1, 4), normal(1, 3, 1, 4), scale=0.5),
    "routing": lambda k: k.routing(normal(5, 8), top_k=2, normalise=True),
    "alignment": lambda k: k.alignment(torch.tensor([[0, 1], [2, 0]]), 3, 1),
    "experts": lambda k: k.experts(**experts_spec.example(tokens=5)),
    "gated_delta_rule": lambda k: k.gated_delta_rule(
        **rule_spec.example(tokens=3), initial_state=torch.ones(1, 4, 16, 24)
    ),
    "gdn_decode": lambda k: k.gdn_decode(**decode_spec.example()),
}


def test_every_op_is_here():
    assert set(CALLS) == set(OPERATIONS)


@pytest.fixture
def operations(monkeypatch):
    """A copy of the declared ops that the test may change."""
    monkeypatch.setattr(registry, "OPERATIONS", dict(OPERATIONS))
    return registry.OPERATIONS


class Flaky:
    """The arbiter of an op behind a fault: `failures` calls end in an error, then it computes."""

    def __init__(self, op: str, failures: int, error: Exception | None = None):
        self.inner, self.left, self.calls = OPERATIONS[op].backends["reference"].run, failures, 0
        self.error = error or RuntimeError("no kernel image is available")

    def run(self, *args, **named):
        self.calls += 1
        if self.left > 0:
            self.left -= 1
            raise self.error
        return self.inner(*args, **named)


def put_first(operations, op: str, run, refusal: str | None = None, **declared) -> None:
    """Register a backend `toy` of the op and let the automatic order begin with it."""
    register_backend(op, "toy", run, lambda call: refusal, **declared)
    operation = operations[op]
    operations[op] = Operation(op, operation.backends, lambda call: ("toy", *operation.automatic_order(call)))


def same(found, expected) -> bool:
    found = found if isinstance(found, tuple) else (found,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


def result(value):
    return (value.rows, value.position, value.offsets) if isinstance(value, alignment_spec.Alignment) else value


def row_of(kernels: Kernels, op: str):
    return {row.op: row for row in kernels.attestation()}[op]


# ---- unavailable when the choice is made


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("strict", [True, False])
def test_unavailable_and_named_is_an_error_with_the_reason(operations, op, strict):
    flaky = Flaky(op, 0)
    put_first(operations, op, flaky.run, "libtoy.so: cannot open shared object file")
    with pytest.raises(BackendError, match=f"op {op}: backend toy was asked for .*libtoy.so: cannot open"):
        CALLS[op](Kernels(f"{op}=toy", strict=strict))
    assert flaky.calls == 0


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("strict", [True, False])
def test_unavailable_and_automatic_takes_the_next_and_records_the_refusal(operations, op, strict):
    flaky = Flaky(op, 0)
    put_first(operations, op, flaky.run, "libtoy.so: cannot open shared object file")
    kernels = Kernels(strict=strict)
    assert same(result(CALLS[op](kernels)), result(CALLS[op](Kernels("reference"))))
    row = row_of(kernels, op)
    assert row.refused[0] == ("toy", "libtoy.so: cannot open shared object file") and row.backend != "toy"
    assert row.replaced == () and row.to_json()["refused"][0][0] == "toy" and flaky.calls == 0


# ---- fails at call, strict


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_failure_is_an_error_that_says_everything(operations, op, is_named):
    flaky = Flaky(op, 9)
    put_first(operations, op, flaky.run)
    with pytest.raises(BackendFailure) as caught:
        CALLS[op](Kernels(f"{op}=toy" if is_named else None))
    text, error = str(caught.value), caught.value
    assert flaky.calls == 1 and (error.op, error.backend) == (op, "toy")
    assert text.startswith(f"op {op}: backend toy failed at call: RuntimeError: no kernel image is available; given ")
    assert "\n" not in text and f"`workbench conformance {op} --backend toy`" in text
    assert "float32 on cpu strides [" in text or op == "alignment"
    assert isinstance(error.__cause__, RuntimeError)


def test_every_tensor_of_the_call_is_in_the_text(operations):
    put_first(operations, "causal_conv", Flaky("causal_conv", 1).run)
    with pytest.raises(BackendFailure) as caught:
        Kernels().causal_conv(normal(1, 4, 6).transpose(1, 2), normal(4, 3), window=normal(1, 2, 4))
    for part in (
        "x [1, 6, 4] float32 on cpu strides [24, 1, 6]", "weight [4, 3] float32 on cpu strides [3, 1]",
        "window [1, 2, 4] float32 on cpu strides [8, 4, 1]", "cu_seqlens None;",
    ):  # fmt: skip
        assert part in str(caught.value)


def test_the_policy_is_told_by_its_name_and_what_is_no_input_is_left_out(operations):
    put_first(operations, "gated_delta_rule", Flaky("gated_delta_rule", 9).run)
    for policy, name in (("segsum", "segsum"), (NumericsPolicy(chunk=7), "of its own")):
        with pytest.raises(BackendFailure, match=f"; policy {name}; next: ") as caught:
            CALLS["gated_delta_rule"](Kernels(policy=policy))
        assert "tap" not in str(caught.value)


def test_unusable_input_is_no_failure_of_the_backend(operations):
    put_first(operations, "linear", Flaky("linear", 1, InputError("rows: expected some")).run)
    with pytest.raises(InputError, match=r"^rows: expected some$"):
        Kernels(strict=False).linear(normal(1, 2), normal(3, 2))


def test_a_failure_inside_another_op_is_told_once(operations):
    put_first(operations, "alignment", Flaky("alignment", 9).run)
    with pytest.raises(BackendFailure, match=r"^op alignment: backend toy failed at call") as caught:
        Kernels("experts=torch_sorted").experts(**experts_spec.example(tokens=5))
    assert caught.value.op == "alignment"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_is_no_error_passes(operations, error):
    put_first(operations, "linear", Flaky("linear", 1, error).run)
    with pytest.raises(type(error)):
        Kernels(strict=False).linear(normal(1, 2), normal(3, 2))


# ---- fails at call, lenient


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("is_named", [True, False])
def test_lenient_tries_once_more(operations, op, is_named):
    flaky = Flaky(op, 1)
    put_first(operations, op, flaky.run)
    kernels = Kernels(f"{op}=toy" if is_named else None, strict=False)
    with pytest.warns(BackendWarning, match=f"op {op}: backend toy failed and is tried once more .*no kernel image"):
        found = result(CALLS[op](kernels))
    assert same(found, result(CALLS[op](Kernels("reference"))))
    row = row_of(kernels, op)
    assert (row.backend, row.calls, row.retries, row.replaced) == ("toy", 1, 1, ())
    assert row.to_json()["retries"] == 1


@pytest.mark.parametrize("op", CALLS)
def test_lenient_and_named_is_an_error_the_second_time(operations, op):
    flaky = Flaky(op, 9)
    put_first(operations, op, flaky.run)
    with pytest.warns(BackendWarning), pytest.raises(BackendFailure, match="backend toy failed a second time at call"):
        CALLS[op](Kernels(f"{op}=toy", strict=False))
    assert flaky.calls == 2


@pytest.mark.parametrize("op", CALLS)
def test_lenient_and_automatic_replaces_that_op_alone_and_says_so(operations, op):
    flaky = Flaky(op, 9)
    put_first(operations, op, flaky.run)
    kernels = Kernels(strict=False)
    with pytest.warns(BackendWarning) as told:
        found = result(CALLS[op](kernels))
    assert same(found, result(CALLS[op](Kernels("reference"))))
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 2 and f"op {op}: backend toy failed twice and is replaced by" in texts[1]
    row = row_of(kernels, op)
    assert row.backend != "toy" and row.calls == 1
    assert row.replaced == (("toy", "failed twice at call: RuntimeError: no kernel image is available"),)
    assert row.to_json()["replaced"] and row.refused[0][0] == "toy"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[op](kernels)
    assert flaky.calls == 2 and row_of(kernels, op).calls == 2, "it is not asked again"
    assert all(not other.replaced for other in kernels.attestation() if other.op != op)


def test_calls_before_a_replacement_stay_with_who_served_them(operations):
    flaky = Flaky("linear", 0)
    put_first(operations, "linear", flaky.run)
    kernels = Kernels(strict=False)
    CALLS["linear"](kernels)
    CALLS["linear"](kernels)
    flaky.left = 9
    with pytest.warns(BackendWarning):
        CALLS["linear"](kernels)
    assert {row.backend: row.calls for row in kernels.attestation()} == {"toy": 2, "torch_linear": 1}
    took_over = {row.backend: [name for name, _ in row.replaced] for row in kernels.attestation()}
    assert took_over == {"toy": [], "torch_linear": ["toy"]}
    kernels.reset_attestation()
    assert kernels.attestation() == []


def test_a_row_in_words_leaves_nothing_out(operations):
    register_backend("linear", "absent", Flaky("linear", 0).run, lambda call: "libtoy.so:\n cannot open")
    put_first(operations, "linear", Flaky("linear", 9).run)
    toys = operations["linear"]
    operations["linear"] = Operation("linear", toys.backends, lambda call: ("absent", *toys.automatic_order(call)))
    kernels = Kernels(strict=False)
    with pytest.warns(BackendWarning):
        CALLS["linear"](kernels)
    assert row_of(kernels, "linear").in_words() == (
        "linear=torch_linear in float32, 1 call of 2 and more tokens: first of the automatic order for 3 tokens on cpu "
        "that can serve; refused: absent: libtoy.so: cannot open; took the place of toy, which failed twice at call: "
        "RuntimeError: no kernel image is available; 1 repeated after a failure"
    )


def test_where_none_is_left_the_error_lists_all(operations):
    operations["linear"] = Operation("linear", {}, lambda call: ("toy",))
    register_backend("linear", "toy", Flaky("linear", 9).run, lambda call: None)
    none_left = r"no backend can serve .*toy: failed twice"
    with pytest.warns(BackendWarning), pytest.raises(BackendFailure, match=none_left):
        Kernels(strict=False).linear(normal(1, 2), normal(3, 2))


def half_updating(op: str, key: str, failures: int):
    """The arbiter with a state that it updates in place, breaking off halfway the first times."""
    inner, left = OPERATIONS[op].backends["reference"].run, [failures]

    def run(*args, **named):
        if left[0]:
            left[0] -= 1
            named[key].flatten(1)[:, ::2].fill_(float("nan"))
            raise RuntimeError("illegal memory access")
        return inner(*args, **named)

    return run


@pytest.mark.parametrize(("op", "key"), [("gated_delta_rule", "initial_state"), ("causal_conv", "window")])
@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_retry_and_a_replacement_see_the_state_as_it_was(operations, op, key, failures, mode):
    put_first(operations, op, half_updating(op, key, failures))
    with mode(), pytest.warns(BackendWarning):
        found = CALLS[op](Kernels(strict=False))
        assert same(found, CALLS[op](Kernels("reference")))


def test_declared_inputs_are_restored_and_undeclared_ones_refuse_the_retry(operations):
    def run(x, weight):
        x.zero_()
        raise RuntimeError("illegal memory access")

    put_first(operations, "linear", run)
    x, weight = normal(2, 3), normal(4, 3)
    with pytest.raises(BackendFailure, match="after it changed its input x in place, which it does not declare"):
        Kernels(strict=False).linear(x.clone(), weight)
    operations["linear"] = OPERATIONS["linear"]
    put_first(operations, "linear", run, mutates=("x",))
    with pytest.warns(BackendWarning):
        assert same(Kernels(strict=False).linear(x.clone(), weight), x @ weight.T)


def expanded_state():
    return torch.arange(64.0).view(1, 4, 16, 1).expand(1, 4, 16, 24)


def strided_state():
    return normal(2, 24, 16, 8).transpose(1, 3)[1:, ::2]


def state_of_inference():
    with torch.inference_mode():
        return normal(1, 4, 16, 24)


@pytest.mark.parametrize("make", [expanded_state, strided_state, state_of_inference])
@pytest.mark.parametrize("failures", [1, 2])
def test_state_of_any_layout_is_restored(operations, make, failures):
    seen, inner = [], OPERATIONS["gated_delta_rule"].backends["reference"].run

    def run(*args, **named):
        state = named["initial_state"]
        seen.append(state.clone())
        if len(seen) <= failures:
            with torch.inference_mode():
                state[:, :, ::2, :1] = float("nan")
            raise RuntimeError("illegal memory access")
        return inner(*args, **named)

    put_first(operations, "gated_delta_rule", run)
    state, inputs = make(), rule_spec.example(tokens=3)
    before = state.clone()
    with torch.no_grad(), pytest.warns(BackendWarning):
        found = Kernels(strict=False).gated_delta_rule(**inputs, initial_state=state)
    assert torch.equal(state, before) and all(torch.equal(x, before) for x in seen)
    assert same(found, Kernels("reference").gated_delta_rule(**inputs, initial_state=before))


def test_a_retry_leaves_the_backward_pass_what_it_needs(operations):
    put_first(operations, "gated_delta_rule", Flaky("gated_delta_rule", 1).run)
    leaf = torch.zeros(1, 4, 16, 24, requires_grad=True)
    with pytest.warns(BackendWarning):
        state = leaf.exp()  # its backward reads the result, which is the state
        out, _ = Kernels(strict=False).gated_delta_rule(**rule_spec.example(tokens=3), initial_state=state)
    out.sum().backward()
    assert leaf.grad.abs().sum() > 0


def test_what_torch_does_not_watch_is_restored_all_the_same(operations):
    left = [1]

    def run(x, weight):
        if left[0]:
            left[0] -= 1
            x.zero_()
            raise RuntimeError("illegal memory access")
        return x @ weight.T

    put_first(operations, "linear", run)
    with torch.inference_mode(), pytest.warns(BackendWarning):
        x, weight = normal(2, 3), normal(4, 3)
        expected = x @ weight.T
        assert torch.equal(Kernels(strict=False).linear(x, weight), expected)


def test_the_next_backend_may_write_to_other_inputs(operations):
    left = [1]

    def writes(x, weight):
        if left[0]:
            left[0] -= 1
            x.zero_()
            raise RuntimeError("misaligned address")
        return x @ weight.T

    register_backend("linear", "second", writes, lambda call: None, mutates=("x",))
    operations["linear"] = Operation("linear", operations["linear"].backends, lambda call: ("second",))
    put_first(operations, "linear", Flaky("linear", 2).run)
    x, weight = normal(2, 3), normal(4, 3)
    kernels = Kernels(strict=False)
    with pytest.warns(BackendWarning):
        assert torch.equal(kernels.linear(x.clone(), weight), x @ weight.T)
    row = row_of(kernels, "linear")
    # A retry of each: the first served nothing, so that its own is told with who did.
    assert (row.backend, row.calls, row.retries, [name for name, _ in row.replaced]) == ("second", 1, 2, ["toy"])


class Failing:
    """An observer that fails, or what it is given to a library that says it in its own words."""

    sees_inside = True

    def __init__(self):
        self.calls = 0

    def __call__(self, name, tensor):
        self.calls += 1
        raise ValueError("the observer's own")

    def scope(self, prefix):
        return self


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_what_an_observer_raises_is_no_failure_of_the_backend(operations, strict, is_wrapped):
    inner = OPERATIONS["gated_delta_rule"].backends["reference"].run

    def run(*args, **named):
        try:
            return inner(*args, **named)
        except ValueError as error:
            if is_wrapped:
                raise RuntimeError("callback failed") from error
            raise

    put_first(operations, "gated_delta_rule", run)
    observer, kernels = Failing(), Kernels(strict=strict)
    with pytest.raises(ValueError, match=r"^the observer's own$"):
        kernels.gated_delta_rule(**rule_spec.example(tokens=3), tap=observer)
    row = row_of(kernels, "gated_delta_rule")
    assert observer.calls == 1 and (row.backend, row.retries, row.replaced) == ("toy", 0, ())


@pytest.mark.parametrize("strict", [True, False])
def test_an_op_inside_that_cannot_be_served_is_its_own_error(operations, strict):
    register_backend("alignment", "toy", Flaky("alignment", 0).run, lambda call: "libtoy.so: cannot open")
    operation = operations["experts"]
    operations["experts"] = Operation("experts", operation.backends, lambda call: ("torch_sorted", "torch_loop"))
    with pytest.raises(Unserved, match=r"^op alignment: backend toy was asked for .*libtoy.so: cannot open"):
        Kernels("alignment=toy", strict=strict).experts(**experts_spec.example(tokens=5))


def test_a_route_does_not_lead_back_to_what_failed(operations):
    register_backend("linear", "toy", Flaky("linear", 9).run, lambda call: None)
    rule = Rule(op="linear", library="torch_linear", dtypes=("float32",), outcome="route", to="toy", why="no kHalf",
                source="")  # fmt: skip
    kernels = Kernels(strict=False, card=replace(card_named("cpu"), rules=(rule,)))
    with pytest.warns(BackendWarning) as told:
        assert same(CALLS["linear"](kernels), CALLS["linear"](Kernels("reference")))
    row = row_of(kernels, "linear")
    assert len(told) == 2 and row.backend == "torch_onednn" and [name for name, _ in row.replaced] == ["toy"]


def test_a_row_of_several_kinds_of_calls_keeps_every_refusal_and_reason(operations):
    def supports(call):
        return "no packed sequences" if call.packed else f"at most 2 tokens, found {call.tokens}"

    register_backend("causal_conv", "toy", Flaky("causal_conv", 0).run, supports)
    operations["causal_conv"] = Operation(
        "causal_conv", operations["causal_conv"].backends, lambda call: ("toy", "reference")
    )
    kernels = Kernels()
    for tokens in (4, 6):
        kernels.causal_conv(normal(1, tokens, 4), normal(4, 3), window=normal(1, 2, 4))
    kernels.causal_conv(
        normal(1, 6, 4), normal(4, 3), window=normal(2, 2, 4), cu_seqlens=torch.tensor([0, 2, 6])
    )  # fmt: skip
    row = row_of(kernels, "causal_conv")
    assert row.refused == (("toy", "at most 2 tokens, found 4"), ("toy", "no packed sequences"))
    assert row.calls == 3 and row.reason.count("first of the automatic order") == 1


@pytest.mark.parametrize("is_named", [True, False])
def test_memory_that_ran_out_is_told_at_once_and_replaces_nothing(operations, is_named):
    flaky = Flaky("linear", 9, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    put_first(operations, "linear", flaky.run)
    kernels = Kernels("linear=toy" if is_named else None, strict=False)
    with pytest.raises(BackendFailure, match=r"failed at call: OutOfMemoryError: CUDA out of memory") as caught:
        CALLS["linear"](kernels)
    assert flaky.calls == 1 and is_out_of_memory(caught.value) and row_of(kernels, "linear").retries == 0


# ---- requirements


def test_requirements_are_checked_one_by_one():
    call = registry.Call("linear", "cpu", torch.float16, 3, False, False, Kernels().policy)
    on_cuda = registry.Call("linear", "cuda", torch.float16, 3, False, False, Kernels().policy)
    assert Requires().refusal(call) is None
    assert Requires(devices=("cuda",)).refusal(call) == "serves cuda, not cpu"
    assert Requires(dtypes=(torch.float32, torch.bfloat16)).refusal(call) == "takes float32, bfloat16, found float16"
    if this_machine("cuda").capability is None:
        assert "found no cuda device" in Requires(capability=(9, 0)).refusal(on_cuda)
    assert Requires(capability=(9, 0)).refusal(call) is None  # of CUDA devices alone
    assert "MiB of free device memory, found" in Requires(free_bytes=1 << 60).refusal(call)
    assert Requires(symbols=("math:sqrt",)).refusal(call) is None
    assert Requires(symbols=("math:sqrtt",)).refusal(call) == "math has no sqrtt"


def test_capabilities_are_compared_as_pairs_of_numbers():
    from workbench.kernels.machine import Machine

    def judged(found, **requires):
        machine = Machine("cuda", "a card", found)
        call = registry.Call("linear", "cuda", torch.float16, 3, False, False, Kernels().policy, (), machine)
        return Requires(**requires).refusal(call)

    assert judged((10, 0), capability=(9, 0)) is None
    assert judged((7, 5), capability=(8, 0)) == "needs compute capability 8.0, found 7.5"
    assert judged((10, 0), capability_below=(10, 0)) == "works below compute capability 10.0, found 10.0"
    assert judged((9, 0), capability_below=(10, 0)) is None


def test_an_import_error_is_told_in_full_with_its_cause(tmp_path, monkeypatch):
    (tmp_path / "toy_vendor.py").write_text(
        "try:\n    raise OSError('libcusolver.so.11: cannot open shared object file')\n"
        "except OSError as error:\n    raise ImportError('toy_vendor needs cuSOLVER') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    forget_symbols()
    text = "ImportError: toy_vendor needs cuSOLVER, caused by OSError: libcusolver.so.11: cannot open shared object"
    with pytest.raises(MissingSymbol, match=text):
        load_symbol("toy_vendor:run")
    register = Requires(symbols=("toy_vendor:run",))
    call = registry.Call("linear", "cpu", torch.float32, 3, False, False, Kernels().policy)
    assert text in register.refusal(call) and "toy_vendor.py:2" in register.refusal(call)
    with pytest.raises(MissingSymbol, match=r"ModuleNotFoundError: No module named 'no_such_vendor'"):
        load_symbol("no_such_vendor.ops:run")
    forget_symbols()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise SystemExit('no card found')", "import of toy_ends fails: SystemExit: no card found"),
        ("def __getattr__(name):\n    raise ImportError('libtoy.so: cannot open')",
         "toy_ends: run cannot be had: ImportError: libtoy.so: cannot open"),
        ("def __getattr__(name):\n    raise AttributeError(name) from OSError('libtoy.so: cannot open')",
         "toy_ends has no run: AttributeError: run, caused by OSError: libtoy.so: cannot open"),
    ],
)  # fmt: skip
def test_a_library_that_ends_the_process_or_imports_late_is_told_too(tmp_path, monkeypatch, source, text):
    (tmp_path / "toy_ends.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_ends", raising=False)
    importlib.invalidate_caches()
    forget_symbols()
    with pytest.raises(MissingSymbol, match=text):
        load_symbol("toy_ends:run")
    forget_symbols()


@pytest.mark.parametrize("text", ["math", ":sqrt", "math:"])
def test_a_symbol_has_a_module_and_a_name(text):
    with pytest.raises(BackendError, match=r"expected package.module:attribute"):
        load_symbol(text)


def test_the_policy_of_a_named_backend_is_that_of_the_run(operations):
    run = OPERATIONS["gated_delta_rule"].backends["reference"].run
    register_backend("gated_delta_rule", "toy", run, lambda call: None, policy="segsum")
    assert Kernels("toy").policy == Kernels("torch_chunk:segsum").policy
    assert Kernels("toy:safe").policy == Kernels().policy
    assert Kernels("toy", "safe").policy == Kernels().policy


# ---- a card's rehearsal


class Solving:
    """An observer whose own arithmetic no card without a solver library could do."""

    sees_inside = False

    def __init__(self):
        self.seen = 0

    def __call__(self, name, tensor):
        torch.linalg.solve_triangular(torch.eye(2), torch.ones(2, 1), upper=False)
        self.seen += 1
        return tensor

    def scope(self, prefix):
        return self


def test_observers_and_choices_are_no_part_of_what_is_rehearsed():
    model = CausalLM(ModelConfig.from_hf(mini()), Kernels(card=card_named("bi-v100"))).init_weights(0)
    model.tap = Solving()
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
    assert model.tap.seen > 20 and model.kernels.watched_by(model.tap).sees_inside is False
    model.tap = None
    absent = r"linalg_solve_triangular.* lacks libcusolver.so: .*use a solver that multiplies matrices"
    by_library = NumericsPolicy(solver="solve_triangular")
    model.kernels = model.kernels.altered(policy=by_library)
    model(torch.tensor([[1, 2, 3]]))
    refused = dict(row_of(model.kernels, "gated_delta_rule").refused)
    assert "solve_triangular, which Iluvatar BI-V100 32 GB lacks" in refused["torch_chunk"]
    model.kernels = model.kernels.altered(requested="torch_chunk", policy=by_library)
    with pytest.raises(BackendError, match=r"backend torch_chunk was asked for .*which Iluvatar BI-V100 32 GB lacks"):
        model(torch.tensor([[1, 2, 3]]))
    with model.kernels.rehearsal(), pytest.raises(BackendError, match=absent):
        torch.linalg.solve_triangular(torch.eye(2), torch.ones(2, 1), upper=False)


def test_altered_kernels_keep_the_rest():
    workspace = Workspace()
    kernels = Kernels("torch_chunk:segsum", router_dtype=torch.bfloat16, workspace=workspace, strict=False,
                      card=card_named("t4"))  # fmt: skip
    changed = kernels.altered(policy="safe")
    assert (changed.requested, changed.router_dtype, changed.workspace, changed.strict, changed.card) == (
        kernels.requested, torch.bfloat16, workspace, False, kernels.card,
    )  # fmt: skip
    assert changed.policy == Kernels().policy != kernels.policy


@pytest.mark.parametrize(("outcome", "to"), [("route", "torch_linear"), ("cast", "float16")])
def test_a_cards_rule_routes_or_casts_and_is_counted(operations, outcome, to):
    seen = []

    def run(x, weight):
        seen.append((x.dtype, weight.dtype))
        return x @ weight.T

    register_backend("linear", "vendor", run, lambda call: None, requires=Requires(dtypes=(torch.float16,)))
    rule = Rule(op="linear", library="vendor", dtypes=("float32",), outcome=outcome, to=to, why="takes kHalf",
                source="")  # fmt: skip
    kernels = Kernels("linear=vendor", card=replace(card_named("v100"), rules=(rule,)))
    x, weight = normal(3, 4), normal(5, 4)
    found = kernels.linear(x, weight)
    (row,) = kernels.attestation()
    assert found.dtype == torch.float32 and "card v100: takes kHalf" in row.reason
    if outcome == "route":
        assert (row.backend, row.routed, row.cast, seen) == ("torch_linear", 1, 0, [])
        assert torch.equal(found, x @ weight.T)
    else:
        assert (row.backend, row.routed, row.cast, seen) == ("vendor", 0, 1, [(torch.float16, torch.float16)])
        assert torch.equal(found, (x.half() @ weight.half().T).float())
    assert row.to_json()["routed" if outcome == "route" else "cast"] == 1


def test_no_cast_narrows_the_state_or_the_gates(operations):
    seen = {}
    inner = OPERATIONS["gated_delta_rule"].backends["reference"].run

    def run(q, k, v, *, log_decay, beta, initial_state, cu_seqlens, policy, tap):
        seen.update(q=q.dtype, beta=beta.dtype, log_decay=log_decay.dtype, state=initial_state.dtype)
        return inner(q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, policy=policy)

    register_backend("gated_delta_rule", "vendor", run, lambda call: None)
    rule = Rule(op="gated_delta_rule", library="vendor", dtypes=("float32",), outcome="cast", to="float16", why="kHalf",
                source="")  # fmt: skip
    out, state = CALLS["gated_delta_rule"](Kernels("vendor", card=replace(card_named("v100"), rules=(rule,))))
    assert seen == {"q": torch.float16, "beta": torch.float16, "log_decay": torch.float32, "state": torch.float32}
    assert out.dtype == state.dtype == torch.float32
