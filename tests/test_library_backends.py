"""Backends of libraries, held to their contracts over stand-ins that have the libraries' own signatures.

No library is at hand here: `stand_ins.libraries` has their functions with the signatures as read from the named
versions and bodies of ours. What is tested is everything on our side of the call; what the kernels themselves compute,
`benchmarks/library_conformance.py` tests on a GPU.
"""

import importlib.metadata
import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stand_ins import libraries, modules

from workbench import bench
from workbench.errors import BackendError, BackendFailure
from workbench.kernels import Kernels, registry, triton_runs
from workbench.kernels.agreement import relative_error
from workbench.kernels.conformance import PASSED, conform
from workbench.kernels.gated_delta_rule import spec as rule_spec
from workbench.kernels.machine import Machine
from workbench.kernels.registry import OPERATIONS, Call, Operation
from workbench.kernels.requirements import forget_symbols, load_symbol
from workbench.numerics import PRESETS, Clamp, NumericsPolicy

LIBRARIES = ("causal_conv1d", "fla", "flash_attn", "flash_qla", "flashinfer", "vllm")
BACKENDS = [(op, name) for op, operation in OPERATIONS.items() for name in LIBRARIES if name in operation.backends]
RULES = [name for op, name in BACKENDS if op == rule_spec.OP]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = Machine("cuda", "an H200", (9, 0), 150 * 2**30)


@pytest.fixture(autouse=True)
def symbols_afresh(monkeypatch):
    monkeypatch.setenv("FLA_FLASH_QLA", "0")  # the stand-in of flash_qla is beside that of fla
    forget_symbols()
    yield
    forget_symbols()


@pytest.fixture
def installed(monkeypatch):
    modules.install(monkeypatch, libraries.SYMBOLS)


@pytest.fixture
def here(monkeypatch, installed):
    """The registry with every library's backend runnable on a CPU."""
    table = {
        op: Operation(op, dict(operation.backends) | {
            name: modules.runnable_here(op, name) for name in LIBRARIES if name in operation.backends
        }, operation.automatic_order)
        for op, operation in OPERATIONS.items()
    }  # fmt: skip
    monkeypatch.setattr(registry, "OPERATIONS", table)


def test_every_library_serves_the_ops_that_it_is_there_for():
    assert set(BACKENDS) == {
        ("alignment", "vllm"), ("attention", "flash_attn"), ("attention", "flashinfer"),
        ("causal_conv", "causal_conv1d"), ("causal_conv", "vllm"), ("experts", "vllm"), ("gated_delta_rule", "fla"),
        ("gated_delta_rule", "flash_qla"), ("gated_delta_rule", "flashinfer"), ("gated_delta_rule", "vllm"),
        ("rms_norm", "flashinfer"), ("rms_norm", "vllm"), ("gated_rms_norm", "fla"), ("gated_rms_norm", "vllm"),
        ("routing", "vllm"),
    }  # fmt: skip
    asked = {symbol for op, name in BACKENDS for symbol in OPERATIONS[op].backends[name].requires.symbols}
    assert asked == set(libraries.READ_FROM)


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_adapter_keeps_the_contract(installed, op, name):
    found = conform(op, modules.runnable_here(op, name))
    assert found.outcome == PASSED, found.reason


@pytest.mark.parametrize("symbol", libraries.READ_FROM)
def test_stand_in_has_the_signature_of_the_library_that_is_installed(symbol):
    """Where the library is here, in the version that was read."""
    stand_in, origin, path = libraries.READ_FROM[symbol]
    package, *version = origin.split()
    try:
        installed = importlib.metadata.version(package.rstrip(","))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed here")
    if version != [installed]:
        pytest.skip(f"read from {package} {' '.join(version)}, installed is {installed}")
    theirs = inspect.signature(load_symbol(symbol)).parameters
    assert list(inspect.signature(stand_in).parameters) == list(theirs), path


# ---- refusals before the call


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_without_the_library_the_import_error_is_the_reason(op, name):
    backend = OPERATIONS[op].backends[name]
    dtype = BF16 if BF16 in (backend.requires.dtypes or (BF16,)) else backend.requires.dtypes[0]
    policy = PRESETS[backend.policy] if backend.policy else NumericsPolicy()
    call = Call(op, "cuda", dtype, 2, False, False, policy, (), HOPPER)
    symbol = backend.requires.symbols[0]
    try:
        load_symbol(symbol)
    except BackendError as error:
        assert backend.refusal(call) == str(error)
        assert symbol.partition(".")[0].partition(":")[0] in str(error)
    else:
        pytest.skip("the library is installed here")


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_a_missing_function_is_named(monkeypatch, op, name):
    """The package is there, in a version that has not got the function."""
    backend = OPERATIONS[op].backends[name]
    symbol = backend.requires.symbols[-1]
    module, _, attribute = symbol.partition(":")
    modules.install(monkeypatch, {s: len for s in backend.requires.symbols if s != symbol} | {f"{module}:other": len})
    call = Call(op, "cuda", BF16, 2, False, False, PRESETS[backend.policy or "safe"], (), HOPPER)
    assert backend.refusal(call) == f"{module} (version stand-in) has no {attribute}"


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_an_unknown_signature_shows_both_and_is_no_call(monkeypatch, here, op, name):
    called = []
    strange = {symbol: lambda tensor_descriptor, plan: called.append(plan) for symbol in libraries.SYMBOLS}
    modules.install(monkeypatch, strange)
    with pytest.raises(BackendError, match="was asked for and cannot serve this call") as caught:
        one_call(op, name)
    text = str(caught.value)
    assert "found (tensor_descriptor, plan)" in text and "; needed (" in text and not called
    assert "nothing is known to go to 'tensor_descriptor', 'plan'" in text and f"op {op}: backend {name}" in text


@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_what_the_library_raises_reaches_the_user(monkeypatch, here, op, name):
    def lost(*arguments, **named):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def raising(symbol, function):
        lost.__signature__ = None
        wrapped = lambda *a, **k: lost()  # noqa: E731 - needs a signature of its own
        wrapped.__signature__ = inspect.signature(function)
        return wrapped

    modules.install(monkeypatch, {symbol: raising(symbol, found) for symbol, found in libraries.SYMBOLS.items()})
    with pytest.raises(BackendFailure, match="an illegal memory access was encountered") as caught:
        one_call(op, name)
    assert isinstance(caught.value.__cause__, RuntimeError) and "given " in str(caught.value)


def one_call(op: str, name: str):
    """A call of the op in a dtype and of sizes that every library takes, through `Kernels`."""
    kernels = Kernels({op: name})
    x = torch.ones(3, 64, dtype=BF16)
    if op == "alignment":
        return kernels.alignment(torch.tensor([[0, 1], [2, 0]]), 3, 1)
    if op == "attention":
        return kernels.attention(*(torch.ones(1, 2, 2, 64, dtype=BF16) for _ in range(3)), scale=0.1)
    if op == "causal_conv":
        return kernels.causal_conv(x[None], torch.ones(64, 4, dtype=BF16))
    if op == "experts":
        w = torch.ones(4, 64, 64, dtype=BF16)
        chosen = torch.tensor([[0, 1]] * 3)
        return kernels.experts(x, torch.ones(3, 2, dtype=BF16), chosen, w, w[:, :, :32].contiguous())
    if op == "routing":
        return kernels.routing(x, top_k=2, normalise=True)
    if op == "rms_norm":
        return kernels.rms_norm(x[None], x[0], eps=1e-6)
    if op == "gated_rms_norm":
        return kernels.gated_rms_norm(x[None], x[None], x[0], eps=1e-6)
    return kernels.gated_delta_rule(**rule_spec.example(tokens=3, key_dim=128, value_dim=128, dtype=BF16))


# ---- the gated delta rule: policies, and calls of one token


def call_of(name: str, policy: NumericsPolicy, tokens: int = 64, dtype: torch.dtype = BF16) -> str | None:
    call = Call(rule_spec.OP, "cuda", dtype, tokens, False, False, policy, (4, 128, 128), HOPPER)
    return OPERATIONS[rule_spec.OP].backends[name].supports(call)


@pytest.mark.parametrize("name", RULES)
def test_only_the_policy_that_the_library_computes_by_is_served(name):
    backend = OPERATIONS[rule_spec.OP].backends[name]
    theirs = PRESETS[backend.policy]
    assert call_of(name, theirs) is None
    for other, policy in PRESETS.items():
        inside = [clamp.site for clamp in policy.clamps if clamp.site not in ("A_log", "raw_gate", "decode_gate")]
        same = replace(policy, clamps=(), nan_to_num=False) == theirs and not inside
        reason = call_of(name, policy)
        assert (reason is None) == same, other
        if reason is not None:
            assert reason.startswith(f"computes by policy {backend.policy}") and "the policy" in reason, reason
    assert "cumsum float32; the policy asks for float64" in call_of(name, NumericsPolicy())
    wide = call_of(name, replace(theirs, state_dtype="float64"))
    assert wide == f"computes by policy {backend.policy} with a state of float32; the policy asks for float64"


@pytest.mark.parametrize("name", RULES)
def test_naming_the_library_takes_its_policy_and_another_is_refused(here, name):
    inputs = rule_spec.example(tokens=70, key_heads=1, value_heads=2, key_dim=128, value_dim=128, dtype=BF16)
    kernels = Kernels({rule_spec.OP: name})
    assert kernels.policy == PRESETS[OPERATIONS[rule_spec.OP].backends[name].policy]
    out, state = kernels.gated_delta_rule(**inputs)
    expected, last = Kernels({rule_spec.OP: "reference"}).gated_delta_rule(**inputs)
    assert relative_error(out, expected) < 1e-2 and relative_error(state, last) < 1e-5
    (row,) = kernels.attestation()
    assert row.backend == name and row.calls == 1
    with pytest.raises(BackendError, match=r"computes by policy .*the policy asks for float64"):
        Kernels({rule_spec.OP: name}, "safe").gated_delta_rule(**inputs)


@pytest.mark.parametrize("name", ["fla", "vllm"])
def test_gates_are_clamped_before_the_call(here, name):
    """The one clamp that lies outside the kernel, in prefill and decode, and what it does shows."""
    policy = replace(PRESETS[name], clamps=(Clamp(site="raw_gate", lo=-0.5, hi=0.0),))
    for tokens in (1, 70):
        inputs = rule_spec.example(tokens=tokens, dtype=BF16)
        clamped = inputs | {"log_decay": inputs["log_decay"].clamp(min=-0.5)}
        first = torch.ones(1, 4, 16, 24)
        out, state = Kernels({rule_spec.OP: name}, policy).gated_delta_rule(**inputs, initial_state=first)
        plain, last = Kernels({rule_spec.OP: name}).gated_delta_rule(**clamped, initial_state=first)
        assert torch.equal(out, plain) and torch.equal(state, last)
        other = Kernels({rule_spec.OP: name}).gated_delta_rule(**inputs, initial_state=first)[1]
        assert not torch.equal(state, other)


@pytest.mark.parametrize("name", RULES)
def test_the_state_that_came_in_is_not_written_over(here, name):
    inputs = rule_spec.example(tokens=3, key_dim=128, value_dim=128, dtype=BF16)
    first = torch.ones(1, 4, 128, 128)
    kept = first.clone()
    _, state = Kernels({rule_spec.OP: name}).gated_delta_rule(**inputs, initial_state=first)
    assert torch.equal(first, kept) and state.dtype == F32 and state.is_contiguous()
    assert state.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_decode_limits_are_said():
    assert "no kernel for a decode step" in call_of("flash_qla", NumericsPolicy(), tokens=1)
    assert "takes raw gates (A_log, a, dt_bias)" in call_of("flashinfer", NumericsPolicy(), tokens=1)
    for name in ("fla", "vllm"):
        assert call_of(name, NumericsPolicy(), tokens=1) is None  # one token has no chunk for the policy to be about
    assert "TF32" in call_of("fla", PRESETS["fla"], dtype=F32) and call_of("fla", PRESETS["fla"], 1, F32) is None


@pytest.mark.parametrize("name", RULES)
def test_limits_of_the_machine_and_of_training_are_said(name):
    backend = OPERATIONS[rule_spec.OP].backends[name]
    call = Call(rule_spec.OP, "cuda", BF16, 64, False, True, PRESETS[backend.policy], (4, 128, 128), HOPPER)
    assert "backward pass" in backend.supports(call)
    call = replace(call, needs_grad=False, weight_shape=(4, 512, 512))
    assert "found K 512, W 512" in backend.supports(call)
    volta = Machine("cuda", "a V100", (7, 0), 2**34)
    least = 8 if name in ("fla", "vllm") else 9
    assert backend.refusal(replace(call, machine=volta)) == f"needs compute capability {least}.0, found 7.0"
    if name == "flash_qla":  # chunks of 32 there: another policy
        newer = Machine("cuda", "an RTX", (12, 0), 2**34)
        assert backend.refusal(replace(call, machine=newer)) == "works below compute capability 12.0, found 12.0"


def test_fla_does_not_run_flash_qla_under_its_name(monkeypatch, installed):
    """The library hands prefill to FlashQLA where that is installed: the attestation would name the wrong kernel."""
    import importlib.machinery
    import sys

    sys.modules["flash_qla"].__spec__ = importlib.machinery.ModuleSpec("flash_qla", None)
    monkeypatch.delenv("FLA_FLASH_QLA")
    assert "hand this call to flash_qla" in call_of("fla", PRESETS["fla"])
    assert call_of("fla", NumericsPolicy(), tokens=1) is None  # FlashQLA has no decode
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert call_of("fla", PRESETS["fla"]) is None


def test_flashinfer_is_given_decays_and_not_their_logarithms(monkeypatch, here):
    seen = {}

    def spy(symbol):
        inner = libraries.SYMBOLS[symbol]

        def call(*arguments, **named):
            seen.update(named)
            return inner(*arguments, **named)

        call.__signature__ = inspect.signature(inner)
        return call

    symbol = "flashinfer.gdn_prefill:chunk_gated_delta_rule"
    modules.install(monkeypatch, {symbol: spy(symbol)})
    inputs = rule_spec.example(tokens=5, key_dim=128, value_dim=128, dtype=BF16, log_decay=-2.0)
    Kernels({rule_spec.OP: "flashinfer"}).gated_delta_rule(**inputs, initial_state=torch.zeros(1, 4, 128, 128))
    assert torch.allclose(seen["g"], torch.full((5, 4), -2.0).exp()) and seen["gate_domain"] == "linear"
    assert seen["scale"] == 1.0 and seen["beta"].dtype == F32 and seen["cu_seqlens"].tolist() == [0, 5]


def test_routing_in_another_dtype_is_an_error(here):
    with pytest.raises(BackendFailure, match=r"takes its softmax in float32, asked for torch.bfloat16"):
        Kernels({"routing": "vllm"}, router_dtype=BF16).routing(torch.ones(2, 4), top_k=2, normalise=True)


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_an_observer_sees_the_scores_and_may_change_them(here, name):
    q, k, v = (torch.randn(2, 6, 2, 64, generator=torch.Generator().manual_seed(i)).to(BF16) for i in range(3))
    kernels = Kernels({"attention": name})
    plain = kernels.attention(q, k, v, scale=0.125)
    seen = []

    def watch(point, scores):
        seen.append(scores.shape)
        return scores

    assert torch.equal(kernels.attention(q, k, v, scale=0.125, tap=watch), plain) and len(seen) == 2
    even = kernels.attention(q, k, v, scale=0.125, tap=lambda point, scores: torch.zeros_like(scores))
    means = v.float().cumsum(1) / torch.arange(1, 7)[:, None, None]
    assert relative_error(even, means) < 1e-2


def test_the_page_has_every_backend_with_its_ops_policy_and_source():
    page = (Path(__file__).resolve().parent.parent / "docs" / "backends.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    with_symbols = {(op, name): backend.requires.symbols for op, operation in OPERATIONS.items()
                    for name, backend in operation.backends.items() if backend.requires.symbols}  # fmt: skip
    foreign = {key for key, symbols in with_symbols.items() if symbols != triton_runs.REQUIRES.symbols}
    rows = [line.split("|") for line in lines if line.startswith("| `") and "=" in line.split("|")[1]]
    assert {tuple(row[1].strip(" `").split("=")) for row in rows} == set(with_symbols)
    for row in rows:
        op, name = row[1].strip(" `").split("=")
        requires = OPERATIONS[op].backends[name].requires
        needs = row[3 if (op, name) in foreign else 2]  # our own are read from nowhere
        if requires.capability:
            assert f"CUDA {requires.capability[0]}.{requires.capability[1]}" in needs, row
        for dtype, short in ((BF16, "bf16"), (F16, "fp16"), (F32, "fp32")):
            assert (short in needs) == (dtype in requires.dtypes), row
        read = [libraries.READ_FROM[symbol][1] for symbol in requires.symbols if symbol in libraries.READ_FROM]
        assert all(origin.split()[0].rstrip(",") in row[2] and origin.split()[-1] in row[2] for origin in read), row
    for op, name in foreign:
        (listed,) = [line for line in lines if line.startswith(f"| `{op}` |")]
        assert f"`{name}`" in listed
        policy = OPERATIONS[op].backends[name].policy
        assert policy is None or f"| `{name}` | `{policy}` |" in page
        assert f"`{name}`" in page.partition("| backend | on a GPU |")[2].partition("##")[0]


@pytest.fixture
def script(monkeypatch, installed):
    """benchmarks/library_conformance.py, over a registry whose foreign backends run on a CPU."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "benchmarks")
    import library_conformance

    for op, operation in list(OPERATIONS.items()):
        own = {name: modules.runnable_here(op, name) for name in LIBRARIES if name in operation.backends}
        table = Operation(op, dict(operation.backends) | own, operation.automatic_order)
        monkeypatch.setitem(OPERATIONS, op, table)
    return library_conformance


@pytest.mark.parametrize("op", list(OPERATIONS))
def test_the_script_for_a_gpu_says_what_is_right_and_times_it(script, capsys, tmp_path, op):
    names = [name for of, name in BACKENDS if of == op]
    options = ["--tokens", "1", "5", "--rounds", "2", "--out", str(tmp_path)]
    code = script.main(["--device", "cpu", "--tiny", "--op", op, *options])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    if not names:
        assert all(" refused: " in line for line in lines) and not list(tmp_path.iterdir())
        return
    (path,) = tmp_path.iterdir()  # nothing unfinished is left
    assert lines[-1] == str(path) and path.name == "library_conformance.cpu.json"
    result = bench.read_result(path)
    assert 0.0 <= result["correctness"]["value"] <= 1.0
    rows = {(row["case"], row["backend"], row["unit"]): row for row in result["rows"]}
    for name in names:
        assert rows[f"{op}: contract", name, "values right"]["median"] > 0
        assert rows[f"{op}: contract", name, "failed checks"]["median"] == 0
        for words in ("1 token", "5 tokens"):
            case = f"{op}, {words}, bfloat16"
            if op == rule_spec.OP and name in ("flash_qla", "flashinfer") and words == "1 token":
                assert "refused: " in result["hardware"]["not_timed"][f"{case}: {name}"]
                assert (case, name, "us") not in rows
                continue
            row = rows[case, name, "us"]
            assert row["median"] > 0 and row["n"] == 2 and row["attested"] == [f"{op}={name}"]
            assert rows[case, name, "error over its limit"]["median"] <= 1.0
            (ours,) = [r for (of, side, _), r in rows.items() if of == case and side.startswith("torch_")]
            assert name in ours["backend"] and f"{op}={ours['backend'].split()[0]}" in ours["attested"]


def test_a_stopped_run_of_the_script_keeps_what_is_over_and_goes_on(script, monkeypatch, capsys, tmp_path):
    arguments = ["--device", "cpu", "--tiny", "--op", "rms_norm", "--tokens", "1", "--rounds", "2", "--out",
                 str(tmp_path)]  # fmt: skip
    inner, asked = script.at_real_shapes, []

    def stopped(*of):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "at_real_shapes", stopped)
    with pytest.raises(KeyboardInterrupt):
        script.main(arguments)
    (path,) = tmp_path.iterdir()
    assert list(json.loads(path.read_text())["done"]) == ["rms_norm: flashinfer", "rms_norm: vllm"]
    monkeypatch.setattr(script, "at_real_shapes", inner)
    monkeypatch.setattr(script, "held_to_its_contract", lambda *of: asked.append(of))
    assert script.main(arguments) == 0 and not asked
    told = capsys.readouterr()
    assert "going on after 2 cases" in told.err
    (path,) = tmp_path.iterdir()
    assert ("rms_norm: contract", "vllm") in {(row["case"], row["backend"]) for row in bench.read_result(path)["rows"]}


def test_the_script_runs_real_shapes_alone(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "conform", None)
    arguments = ["--device", "cpu", "--tiny", "--op", "rms_norm", "--tokens", "1", "--rounds", "2", "--skip-contract"]
    assert script.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("1 tokens bfloat16  right" in line for line in lines)


def test_the_script_tells_what_is_wrong_and_does_not_time_it(script, monkeypatch, capsys):
    inner = libraries.SYMBOLS["vllm._custom_ops:rms_norm"]

    def off(out, input, weight, epsilon):
        inner(out, input, weight - 1.0, epsilon)  # a plain weight taken for a zero-centred one

    modules.install(monkeypatch, {"vllm._custom_ops:rms_norm": off})
    code = script.main(["--device", "cpu", "--tiny", "--op", "rms_norm", "--backend", "vllm", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1 and lines[0].startswith("rms_norm          vllm           failed 3 values right")
    assert "value against the arbiter: case" in lines[0] and "first bad row" in lines[0]
    assert len(lines) == 3 and all(" wrong y " in line and " us" not in line for line in lines[1:])


@pytest.mark.parametrize("name", RULES)
def test_chunk_kernels_are_held_to_the_rounding_of_their_inputs_and_one_token_is_too(installed, name):
    """A state that is off by less than a rounding of the call's dtype passes, one that is off by three does not."""
    inner = modules.runnable_here(rule_spec.OP, name)

    def off_by(roundings: float):
        def run(q, k, v, **named):
            out, state = inner.run(q, k, v, **named)
            return out, state * (1.0 + roundings * torch.finfo(q.dtype).eps / 2)

        return replace(inner, run=run)

    cases = ["heads of 128, from a state"]
    assert conform(rule_spec.OP, off_by(0.9), cases=cases).outcome == PASSED
    assert "state: failed" in conform(rule_spec.OP, off_by(3.0), cases=cases).reason


def test_named_backends_run_and_the_automatic_order_has_none_of_them():
    """None was measured against ours yet: they run where they are named."""
    for op, operation in OPERATIONS.items():
        for tokens in (1, 4096):
            for device in ("cpu", "cuda"):
                call = Call(op, device, BF16, tokens, False, False, NumericsPolicy(), (), HOPPER)
                assert not set(operation.automatic_order(call)) & set(LIBRARIES)
