"""Backends of a vendor's modules, and the ways in which those failed in the field: each reaches the user as it is."""

import inspect
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch
from stand_ins import modules, vendor

from workbench.errors import BackendError, BackendFailure, BackendWarning
from workbench.kernels import Kernels, registry
from workbench.kernels.agreement import relative_error
from workbench.kernels.conformance import PASSED, conform
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.gated_delta_rule import spec as rule_spec
from workbench.kernels.machine import Machine
from workbench.kernels.registry import OPERATIONS, Call, Operation
from workbench.kernels.requirements import forget_symbols
from workbench.kernels.vendor_errors import complaints, native_stderr
from workbench.numerics import PRESETS

F16 = torch.float16
NAMES = ("corex_fa2", "corex_gdn", "corex_moe", "ixformer")
BACKENDS = [(op, name) for op, operation in OPERATIONS.items() for name in NAMES if name in operation.backends]
CARD = Machine("cuda", "a BI-V100", (7, 0), 32 * 2**30)


@pytest.fixture(autouse=True)
def symbols_afresh():
    forget_symbols()
    yield
    forget_symbols()


@pytest.fixture
def card(monkeypatch):
    """The vendor's modules installed, its backends runnable on a CPU."""
    modules.install(monkeypatch, vendor.SYMBOLS)
    return in_order(monkeypatch)


def in_order(monkeypatch, *first: tuple[str, str]) -> None:
    """The registry with the vendor's backends runnable here, those of `first` first of their op's automatic order."""
    table = {}
    for op, operation in OPERATIONS.items():
        own = {name: modules.runnable_here(op, name) for name in NAMES if name in operation.backends}
        leading = tuple(name for of, name in first if of == op)
        order = operation.automatic_order
        table[op] = Operation(
            op, dict(operation.backends) | own, lambda call, leading=leading, order=order: (*leading, *order(call))
        )
    monkeypatch.setattr(registry, "OPERATIONS", table)


def example(op: str, kernels: Kernels):
    """A call of the op in float16."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(F16)

    if op == "alignment":
        return kernels.alignment(torch.tensor([[0, 1], [2, 0]]), 3, 1)
    if op == "attention":
        return kernels.attention(normal(1, 3, 2, 8), normal(1, 3, 1, 8), normal(1, 3, 1, 8), scale=0.3)
    if op == "experts":
        return kernels.experts(**experts_spec.example(tokens=5, dtype=F16))
    if op == "linear":
        return kernels.linear(normal(3, 4), normal(5, 4))
    if op == "routing":
        return kernels.routing(normal(5, 8), top_k=2, normalise=True)
    first = torch.ones(1, 4, 16, 16)
    return kernels.gated_delta_rule(**rule_spec.example(tokens=3, value_dim=16, dtype=F16), initial_state=first)


def test_the_vendors_backends_serve_their_ops():
    assert set(BACKENDS) == {
        ("alignment", "ixformer"), ("attention", "corex_fa2"), ("experts", "corex_moe"), ("experts", "ixformer"),
        ("gated_delta_rule", "corex_gdn"), ("linear", "ixformer"), ("routing", "ixformer"),
    }  # fmt: skip
    assert {s for op, name in BACKENDS for s in OPERATIONS[op].backends[name].requires.symbols} == set(vendor.SYMBOLS)


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_adapter_keeps_the_contract(card, op, name):
    found = conform(op, modules.runnable_here(op, name))
    assert found.outcome == PASSED, found.reason
    served = {row.dtype for row in found.rows if row.check == "runs" and row.outcome == PASSED}
    assert served == ({"int64"} if op == "alignment" else {"float16"})


@pytest.mark.parametrize(("op", "name"), [pair for pair in BACKENDS if pair[0] != "alignment"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float16_alone_is_refused_before_the_call(card, op, name, dtype):
    backend = OPERATIONS[op].backends[name]
    policy = PRESETS[backend.policy or "safe"]
    call = Call(op, "cuda", dtype, 3, False, False, policy, (), CARD)
    assert backend.refusal(call) == f"takes float16, found {str(dtype).removeprefix('torch.')}"


# ---- the chain of the experts


@pytest.mark.parametrize("missing", ["routing", "alignment", "experts"])
def test_a_missing_link_is_replaced_alone(monkeypatch, missing):
    """topk_softmax is missing from the vendor's build: routing goes to torch, the rest of the chain stays native."""
    symbols = dict(vendor.IXFORMER)
    symbol = OPERATIONS[missing].backends["ixformer"].requires.symbols[0]
    del symbols[symbol]
    symbols.setdefault("ixformer.functions:silu_and_mul", len)  # the module is there without the function
    modules.install(monkeypatch, symbols)
    in_order(monkeypatch, *((op, "ixformer") for op in ("routing", "alignment", "experts")))
    kernels = Kernels()
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(1)).to(F16)
    inputs = experts_spec.example(tokens=9, dtype=F16)
    weights, chosen = kernels.routing(logits, top_k=2, normalise=True)
    out = kernels.experts(inputs["x"], weights, chosen, inputs["gate_up"], inputs["down"])
    alignment = kernels.alignment(chosen, 8, 4)
    expected = Kernels("experts=reference").experts(inputs["x"], weights, chosen, inputs["gate_up"], inputs["down"])
    assert relative_error(out, expected) < 2e-3
    assert torch.equal(alignment.rows, Kernels("alignment=reference").alignment(chosen, 8, 4).rows)
    ran = {row.op: row for row in kernels.attestation()}
    for op in ("routing", "alignment", "experts"):
        assert (ran[op].backend == "ixformer") == (op != missing), op
    attribute = symbol.partition(":")[2]
    assert ran[missing].refused[0] == ("ixformer", f"ixformer.functions (version stand-in) has no {attribute}")
    with pytest.raises(BackendError, match=f"asked for and cannot serve this call: .*has no {attribute}"):
        example(missing, Kernels({missing: "ixformer"}))


def test_the_chain_asks_the_alignment_that_was_named(card):
    inputs = experts_spec.example(tokens=9, dtype=F16)
    for align in ("torch_count", "ixformer", "reference"):
        kernels = Kernels({"experts": "ixformer", "alignment": align})
        kernels.experts(**inputs)
        assert {(row.op, row.backend) for row in kernels.attestation()} == {
            ("experts", "ixformer"), ("alignment", align)
        }  # fmt: skip


@pytest.mark.parametrize(
    "forward",
    [vendor.moe_forward_merged, vendor.moe_forward_separate, vendor.moe_forward_routing_merged,
     vendor.moe_forward_routing_separate],
)  # fmt: skip
def test_every_form_of_the_vendors_experts_is_right(monkeypatch, card, forward):
    """w13 or w1, w2, w3; weights given, or routed inside from logits: the same result, each matrix in its place."""
    modules.install(monkeypatch, {"corex_moe:moe_forward": forward})
    inputs = experts_spec.example(tokens=40, experts=16, top_k=4, dtype=F16)
    for scale in (1.0, 0.37):  # weights that are not normalised too
        given = inputs | {"weights": (inputs["weights"] * scale).to(F16)}
        out = Kernels("experts=corex_moe").experts(**given)
        expected = Kernels("experts=reference").experts(**{k: v.double() if v.is_floating_point() else v
                                                           for k, v in given.items()})  # fmt: skip
        assert relative_error(out, expected) < 1e-3


def test_a_swapped_matrix_would_show(card, monkeypatch):
    """The test above can fail: gate and up in each other's place give something else."""
    modules.install(monkeypatch, {"corex_moe:moe_forward": lambda hidden_states, w1, w2, w3, topk_weights, topk_ids: (
        vendor.moe_forward_separate(hidden_states, w3, w2, w1, topk_weights, topk_ids))})  # fmt: skip
    inputs = experts_spec.example(tokens=5, dtype=F16)
    expected = Kernels("experts=reference").experts(**inputs)
    assert relative_error(Kernels("experts=corex_moe").experts(**inputs), expected) > 0.1


# ---- constructors


@pytest.mark.parametrize("constructor", [vendor.SeparateHeads, vendor.CommonHeads])
@pytest.mark.parametrize("tokens", [1, 37])
def test_either_constructor_of_the_gated_delta_rule(monkeypatch, card, constructor, tokens):
    modules.install(monkeypatch, {"corex_gdn:CoreXGDN": constructor})
    inputs = rule_spec.example(tokens=tokens, key_heads=2, value_heads=4, value_dim=16, dtype=F16)
    first = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2))
    kept = first.clone()
    out, state = Kernels("gated_delta_rule=corex_gdn").gated_delta_rule(**inputs, initial_state=first)
    expected, last = Kernels("gated_delta_rule=reference").gated_delta_rule(**inputs, initial_state=first)
    assert relative_error(out, expected) < 2e-3 and relative_error(state, last) < 1e-5 and torch.equal(first, kept)


def test_one_size_for_keys_and_values_cannot_take_two(monkeypatch, card):
    modules.install(monkeypatch, {"corex_gdn:CoreXGDN": vendor.CommonHeads})
    inputs = rule_spec.example(tokens=3, key_dim=16, value_dim=24, dtype=F16)
    with pytest.raises(BackendFailure, match=r"found .num_heads, head_dim, .*needed .num_v_heads, num_k_heads"):
        Kernels("gated_delta_rule=corex_gdn").gated_delta_rule(**inputs)


@pytest.mark.parametrize(
    ("constructor", "found"),
    [(vendor.SwallowingHeads, "found (heads=1, **kwargs)"), (vendor.WholeLayer, "found (hidden_states, attn_metadata")],
)
def test_an_unknown_constructor_or_forward_shows_both_and_is_not_called(monkeypatch, card, constructor, found):
    modules.install(monkeypatch, {"corex_gdn:CoreXGDN": constructor})
    with pytest.raises(BackendError) as caught:
        example("gated_delta_rule", Kernels("gated_delta_rule=corex_gdn"))
    text = str(caught.value)
    assert found in text and "needed (" in text and "next: " in text and "docs/backends.md" in text


def test_how_a_silent_function_is_called_is_part_of_the_attestation(card):
    """The router of the stand-in tells no signature, the alignment no names, the product both."""
    reasons = {}
    for op in ("routing", "alignment", "linear"):
        kernels = Kernels({op: "ixformer"})
        example(op, kernels)
        (row,) = kernels.attestation()
        reasons[op] = row.reason
    assert reasons == {
        "routing": "named by the user; ixformer.functions:vllm_moe_topk_softmax tells no signature: called in the "
        "documented order (topk_weights, topk_ids, token_expert_indices, gating_output)",
        "alignment": "named by the user", "linear": "named by the user",
    }  # fmt: skip


def test_chosen_automatically_an_unknown_signature_is_a_refusal_on_record(monkeypatch):
    modules.install(monkeypatch, vendor.SYMBOLS | {"ixformer:matmul": lambda plan: None})
    in_order(monkeypatch, ("linear", "ixformer"))
    kernels = Kernels()
    example("linear", kernels)
    (row,) = kernels.attestation()
    assert row.backend != "ixformer" and row.refused[0][0] == "ixformer"
    assert "ixformer:matmul: its signature is not one that is known: found (plan)" in row.refused[0][1]


# ---- faults at the call


def failing(symbol: str, after: int, error: Exception):
    """The vendor's function, which raises from call `after` + 1 on."""
    inner, calls = vendor.SYMBOLS[symbol], [0]

    def call(*arguments, **named):
        calls[0] += 1
        if calls[0] > after:
            raise error
        return inner(*arguments, **named)

    if isinstance(inner, vendor.Builtin):
        return vendor.Builtin(type("named", (), {"__call__": lambda self, *a: call(*a), "__name__": symbol})(),
                              inner.__doc__)  # fmt: skip
    if inspect.isclass(inner):

        class Failing(inner):
            def forward(self, q, k, v, gate, beta, conv_state, temporal_state, attn_metadata):
                temporal_state.zero_()  # half done
                calls[0] += 1
                if calls[0] > after:
                    raise error
                return super().forward(q, k, v, gate, beta, conv_state, temporal_state, attn_metadata)

        return Failing
    call.__signature__ = inspect.signature(inner)
    return call


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_an_exception_after_the_first_call_reaches_the_user(monkeypatch, card, op, name):
    (symbol,) = OPERATIONS[op].backends[name].requires.symbols
    per_call = 2 if (op, name) == ("experts", "ixformer") else 1
    error = RuntimeError("ixrt: device-side assert, stream 0x7f")
    modules.install(monkeypatch, vendor.SYMBOLS | {symbol: failing(symbol, per_call, error)})
    kernels = Kernels({op: name})
    example(op, kernels)
    with pytest.raises(BackendFailure) as caught:
        example(op, kernels)
    text = str(caught.value)
    assert "ixrt: device-side assert, stream 0x7f" in text and f"op {op}: backend {name} failed at call" in text
    assert " float16 on cpu strides " in text or op == "alignment"


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_leniently_it_is_tried_once_more_and_then_replaced_alone(monkeypatch, op, name):
    (symbol,) = OPERATIONS[op].backends[name].requires.symbols
    error = RuntimeError("ixrt: out of resources")
    modules.install(monkeypatch, vendor.SYMBOLS | {symbol: failing(symbol, 0, error)})
    in_order(monkeypatch, (op, name))
    kernels = Kernels(policy=OPERATIONS[op].backends[name].policy, strict=False)
    with pytest.warns(BackendWarning, match="ixrt: out of resources"):
        found = example(op, kernels)
    expected = example(op, Kernels({op: "reference"}))
    first = found[0] if isinstance(found, tuple) else getattr(found, "rows", found)
    wanted = expected[0] if isinstance(expected, tuple) else getattr(expected, "rows", expected)
    assert relative_error(first, wanted) < 5e-3
    (row,) = [row for row in kernels.attestation() if row.op == op]
    assert row.backend != name and row.replaced[0][0] == name and "ixrt: out of resources" in row.replaced[0][1]


def test_what_c_code_prints_is_an_error_though_it_returned(monkeypatch, card, capfd):
    """The dtype error of the field, its cause planted: printed, not raised, and the result is wrong."""

    def widened(input, other, out=None, transa=False, transb=False, alpha=1.0, beta=0.0):
        return vendor.matmul(input.float(), other, transb=transb).half()

    modules.install(monkeypatch, {"ixformer:matmul": widened})
    with pytest.raises(BackendFailure) as caught:
        example("linear", Kernels("linear=ixformer"))
    assert vendor.MATMUL_DTYPE in str(caught.value) and "its result is not used" in str(caught.value)
    assert vendor.MATMUL_DTYPE in capfd.readouterr().err  # and it was not swallowed


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_what_c_code_printed_is_told_with_the_exception(monkeypatch, card, op, name):
    (symbol,) = OPERATIONS[op].backends[name].requires.symbols

    class Loud(RuntimeError):
        def __init__(self):
            super().__init__("unknown error")

    def loud(function):
        def call(*arguments, **named):
            for _ in range(80):
                vendor.complain(f"{op}.cu:149 'Expected input.dtype() == kHalf'")
            raise Loud

        call.__signature__ = inspect.signature(function)
        return call

    inner = vendor.SYMBOLS[symbol]
    if inspect.isclass(inner):
        made = type("Loud", (inner,), {"forward": loud(inner.forward)})
    elif isinstance(inner, vendor.Builtin):
        made = vendor.Builtin(loud(inner.function), inner.__doc__)
        made.function.__name__ = made.__name__ = inner.__name__
    else:
        made = loud(inner)
    modules.install(monkeypatch, vendor.SYMBOLS | {symbol: made})
    with pytest.raises(BackendFailure) as caught:
        example(op, Kernels({op: name}))
    text = str(caught.value)
    assert f"Loud: unknown error; its C code printed: {op}.cu:149 'Expected input.dtype() == kHalf' (80 times)" in text


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_a_shared_object_that_is_missing_is_named(monkeypatch, tmp_path, op, name):
    """The module is there; the library that it loads is not."""
    import sys

    (symbol,) = OPERATIONS[op].backends[name].requires.symbols
    top = symbol.partition(":")[0].partition(".")[0]
    package = tmp_path / top
    package.mkdir()
    load = f'import ctypes\nctypes.CDLL("lib{top}_that_nobody_has.so")\n'
    (package / "__init__.py").write_text(load if "." not in symbol.partition(":")[0] else "")
    (package / "functions.py").write_text(load)
    for loaded in [key for key in sys.modules if key.partition(".")[0] == top]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(tmp_path)
    forget_symbols()
    in_order(monkeypatch, (op, name))
    with pytest.raises(BackendError) as caught:
        example(op, Kernels({op: name}))
    text = f"OSError: lib{top}_that_nobody_has.so: cannot open shared object file: No such file or directory"
    assert text in str(caught.value)
    kernels = Kernels()
    example(op, kernels)  # another serves, and why this one did not is on record
    (row,) = [row for row in kernels.attestation() if row.op == op]
    assert row.backend != name and row.refused[0][0] == name and text in row.refused[0][1]
    for loaded in [key for key in sys.modules if key.partition(".")[0] == top]:
        del sys.modules[loaded]


def test_a_policy_that_the_vendor_does_not_compute_by_is_refused(card):
    with pytest.raises(BackendError, match=r"computes by policy fp32_cumsum, which clamps nothing inside; the policy"):
        Kernels("gated_delta_rule=corex_gdn", "clamp_cumsum_20").gated_delta_rule(
            **rule_spec.example(tokens=3, value_dim=16, dtype=F16)
        )
    packed = rule_spec.example(tokens=3, value_dim=16, dtype=F16) | {"cu_seqlens": torch.tensor([0, 1, 3])}
    with pytest.raises(BackendError, match="takes sequences of one length, no packed row"):
        Kernels("gated_delta_rule=corex_gdn").gated_delta_rule(**packed)


def test_a_product_without_transb_is_given_the_transposed_weight(monkeypatch, card):
    modules.install(monkeypatch, {"ixformer:matmul": lambda a, b: vendor.matmul(a, b)})
    expected = example("linear", Kernels("linear=reference"))
    assert relative_error(example("linear", Kernels("linear=ixformer")), expected) < 1e-3


def test_needs_grad_is_refused(card):
    for op, name in BACKENDS:
        backend = OPERATIONS[op].backends[name]
        call = Call(op, "cuda", F16, 3, False, True, PRESETS[backend.policy or "safe"], (), CARD)
        assert op == "alignment" or "backward pass" in backend.supports(call)
        assert backend.supports(replace(call, needs_grad=False)) is None


# ---- stderr of C code


def test_only_complaints_are_errors_and_everything_is_handed_on(capfd):
    with native_stderr("vendor:f"):
        vendor.complain("Loaded fused operator from libvendor.so")
    assert capfd.readouterr().err == "Loaded fused operator from libvendor.so\n"
    with pytest.raises(BackendError, match=r"vendor:f returned, but its C code printed: a\.cu:3 assertion failed"):
        with native_stderr("vendor:f"):
            vendor.complain("note\na.cu:3 assertion failed")
    assert capfd.readouterr().err == "note\na.cu:3 assertion failed\n"
    with pytest.raises(ValueError, match=r"^mine$"):  # nothing printed: the exception as it was
        with native_stderr("vendor:f"):
            raise ValueError("mine")
    with pytest.raises(KeyboardInterrupt):
        with native_stderr("vendor:f"):
            vendor.complain("error: before")
            raise KeyboardInterrupt
    vendor.complain("after")
    assert capfd.readouterr().err == "error: before\nafter\n"


def test_calls_of_several_threads_leave_stderr_as_it_was(capfd):
    started, texts = threading.Barrier(3), {}

    def call(number):
        started.wait()
        try:
            with native_stderr(f"vendor:{number}"):
                with native_stderr("vendor:inner"):
                    time.sleep(0.01 * number)
                vendor.complain(f"error: of {number}")
        except BackendError as error:
            texts[number] = str(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    vendor.complain("after")
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == "after" and sorted(lines[:-1]) == [f"error: of {number}" for number in (1, 2, 3)]
    assert all(f"its C code printed: error: of {number};" in texts[number] for number in (1, 2, 3))


def test_a_flood_is_told_once():
    assert complaints("error: x\n" * 80) == "error: x (80 times)"
    assert complaints("all is well\n") == "" and len(complaints("\n".join(f"error {i}" for i in range(999)))) < 500


def test_the_watch_is_quiet_where_nothing_is_wrong(card):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for op, name in BACKENDS:
            example(op, Kernels({op: name}))
