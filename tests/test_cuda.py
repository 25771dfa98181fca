"""The same model on a CUDA device: equal to the CPU's float64 results, differentiable, cached and packed.

Skipped where no device is; `python3 bootstrap.py test -m gpu` runs these alone on a machine that has one.
"""

import dataclasses
import gc
import shutil
import warnings

import models
import numpy as np
import pytest
import torch

from workbench.config import ModelConfig
from workbench.kernels import Kernels
from workbench.kernels.agreement import logit_difference, relative_error
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.gated_delta_rule import reference, spec
from workbench.kernels.registry import OPERATIONS, Call
from workbench.model import CausalLM
from workbench.numerics import SAFE
from workbench.recovery import Recovery, Request, serve_requests
from workbench.tracing import trace
from workbench.tracing.flags import Flags, FlagTap
from workbench.tracing.observer import is_stage, tap_names
from workbench.training.train import Run, Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

CONFIGS = {"mini": models.mini, "mini256": models.mini256, "dense": models.mini_dense, "next": models.mini_next}


def pair(name: str, decay: str = "class_default") -> tuple[CausalLM, CausalLM]:
    """The same weights as a float64 model on the CPU and a float32 model on the device."""
    config = ModelConfig.from_hf(CONFIGS[name]())
    on_cpu = CausalLM(config).init_weights(0, decay).double().eval()
    on_device = CausalLM(config).init_weights(0, decay).cuda().eval()
    return on_cpu, on_device


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("decay", ["class_default", "realistic"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits_equal_the_float64_model_on_the_cpu(name, decay):
    on_cpu, on_device = pair(name, decay)
    for tokens in (1, 63, 65, 200):
        prompt = ids(2, tokens)
        found = on_device(prompt.cuda()).logits.cpu()
        assert logit_difference(found, on_cpu(prompt).logits) <= 1e-5, tokens


@torch.inference_mode()
def test_split_prefill_decode_and_packing_equal_one_prefill():
    _, model = pair("mini")
    prompt = ids(1, 130).cuda()
    whole = model(prompt).logits
    for split in (1, 63, 64, 65, 129):
        first = model(prompt[:, :split])
        second = model(prompt[:, split:], cache=first.cache)
        assert logit_difference(torch.cat([first.logits, second.logits], dim=1), whole) <= 1e-5, split
    cache, steps = None, []
    for t in range(70):
        out = model(prompt[:, t : t + 1], cache=cache)
        cache = out.cache
        steps.append(out.logits)
    assert logit_difference(torch.cat(steps, dim=1), whole[:, :70]) <= 1e-5
    lengths = [37, 1, 64, 28]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = model(prompt, cu_seqlens=bounds).logits
    for start, stop in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        assert logit_difference(packed[:, start:stop], model(prompt[:, start:stop]).logits) <= 1e-5


@pytest.mark.parametrize("backend", ["torch_chunk", "torch_recurrent"])
@pytest.mark.parametrize("log_decay", [-20.0, -1.39, -1e-3, 0.0, None])
def test_gated_delta_rule_against_the_oracle(backend, log_decay):
    inputs = spec.example(tokens=193, log_decay=log_decay, device="cuda")
    out, state = Kernels({"gated_delta_rule": backend}, SAFE).gated_delta_rule(**inputs)
    expected_out, expected_state = reference.oracle(**{name: x.cpu() for name, x in inputs.items()})
    assert relative_error(out.cpu(), expected_out) <= 3e-6
    assert relative_error(state.cpu(), expected_state) <= 3e-6


#: Expert backends that read nothing back, and those that read once.
WITHOUT_SYNC = {"torch_batched", "torch_dense", "torch_gathered", "torch_grouped"}
WITH_ONE_SYNC = {"torch_sorted", "torch_sized"}


def on_cuda(case: dict, dtype: torch.dtype) -> dict:
    return {key: (x.to(dtype) if x.is_floating_point() else x).cuda() for key, x in case.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(WITHOUT_SYNC | WITH_ONE_SYNC | {"torch_loop"}))
@torch.inference_mode()
def test_experts_equal_the_arbiter(name, dtype):
    for tokens in (1, 7, 64, 1000):
        case = on_cuda(experts_spec.example(tokens=tokens, experts=64, top_k=4, hidden=64, width=32), dtype)
        call = Call("experts", "cuda", dtype, tokens, False, False, SAFE, tuple(case["gate_up"].shape))
        refused = OPERATIONS["experts"].backends[name].refusal(call)
        if refused is not None:
            assert (name, dtype == torch.bfloat16) == ("torch_grouped", False), refused
            continue
        found = Kernels({"experts": name}).experts(**case)
        wide = {key: x.double().cpu() if x.is_floating_point() else x.cpu() for key, x in case.items()}
        expected = Kernels("experts=reference").experts(**wide)
        assert relative_error(found.cpu(), expected) <= {torch.float32: 1e-5}.get(dtype, 2e-2), tokens


@pytest.mark.parametrize("name", sorted(WITHOUT_SYNC | WITH_ONE_SYNC))
@torch.inference_mode()
def test_host_syncs_of_the_experts_as_torch_counts_them(name):
    case = on_cuda(experts_spec.example(tokens=256, experts=64, top_k=4, hidden=64, width=32), torch.bfloat16)
    used = Kernels({"experts": name})
    used.experts(**case)  # what is probed and compiled once
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            used.experts(**case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [str(entry.message) for entry in seen if "synchronizing" in str(entry.message)]
    assert len(syncs) == (name in WITH_ONE_SYNC), syncs


@pytest.mark.parametrize("experts", ["torch_dense", "torch_sorted", "torch_gathered"])
def test_gradients_equal_those_of_the_float64_model(experts):
    on_cpu, on_device = pair("mini")
    on_device.kernels = Kernels({"experts": experts})
    prompt = ids(2, 70)
    on_cpu(prompt, use_cache=False).logits.logsumexp(-1).sum().backward()
    on_device(prompt.cuda(), use_cache=False).logits.logsumexp(-1).sum().backward()
    for (name, a), (_, b) in zip(on_cpu.named_parameters(), on_device.named_parameters(), strict=True):
        if a.grad is not None:
            assert relative_error(b.grad.cpu(), a.grad) <= 1e-3, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_half_precision_keeps_gates_and_state_wide(dtype):
    _, model = pair("mini")
    out = model.to(dtype)(ids(1, 100).cuda())
    assert out.logits.dtype == dtype and bool(torch.isfinite(out.logits).all())
    for module in model.modules():
        if hasattr(module, "A_log"):
            assert module.A_log.dtype == module.dt_bias.dtype == torch.float32
    assert all(layer.state.dtype == torch.float32 for layer in out.cache.layers if hasattr(layer, "state"))


def test_generation_is_repeatable():
    _, model = pair("mini")
    prompt = ids(2, 20).cuda()
    settings = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    assert model.generate(prompt, **settings).sequences == model.generate(prompt, **settings).sequences


@pytest.fixture()
def token_files(tmp_path):
    """Text and dialogues of random tokens; the last four of each dialogue of twenty are to learn."""
    draws = np.random.default_rng(0)
    draws.integers(0, 97, size=5000).astype("<u2").tofile(tmp_path / "train.u16")
    draws.integers(0, 97, size=500).astype("<u2").tofile(tmp_path / "heldout.u16")
    for name in ("train_dialogues", "validation_dialogues"):
        draws.integers(0, 97, size=2000).astype("<u2").tofile(tmp_path / f"{name}.u16")
        np.tile(np.repeat([0, 1], [16, 4]), 100).astype("u1").tofile(tmp_path / f"{name}.u8")
        np.arange(0, 2000, 20).astype("<u4").tofile(tmp_path / f"{name}.starts.u32")
    return tmp_path


def test_a_step_captured_as_a_graph_equals_the_plain_step(token_files):
    settings = Settings(steps=6, batch=4, length=130, dialogue_rows=2, warmup=3, learning_rate=1e-3)
    config = dataclasses.replace(ModelConfig.from_hf(models.mini()), router_aux_loss_coef=0.01)
    runs = {
        name: Run(token_files, token_files / name, settings, "cuda", config, eager=name == "eager")
        for name in ("eager", "graph")
    }
    for run in runs.values():
        assert run.train(evaluate_every=1)
    assert runs["eager"]._captured is None and runs["graph"]._captured is not None
    for plain, captured in zip(runs["eager"].curve, runs["graph"].curve, strict=True):
        for column in set(plain) - {"seconds"}:
            # Exact columns too: steps, tokens, rates. A warm-up step that counted would show in the first losses.
            assert captured[column] == pytest.approx(plain[column], rel=1e-4), (plain["step"], column)
    steps = [state["step"].item() for state in runs["graph"].optimizer.state.values()]
    assert set(steps) == {6.0}
    pairs = zip(runs["eager"].model.named_parameters(), runs["graph"].model.named_parameters(), strict=True)
    for (name, plain), (_, captured) in pairs:
        assert relative_error(captured, plain) <= 1e-2, name


def test_a_captured_run_resumes_in_itself_and_in_a_new_one(token_files):
    settings = Settings(steps=4, batch=4, length=130, dialogue_rows=2, warmup=2, learning_rate=1e-3)
    config = dataclasses.replace(ModelConfig.from_hf(models.mini()), router_aux_loss_coef=0.01)

    def run_in(name: str) -> Run:
        return Run(token_files, token_files / name, settings, "cuda", config)

    whole, first = run_in("whole"), run_in("first")
    assert whole.train(evaluate_every=2)
    assert not first.train(evaluate_every=2, seconds_limit=0.0)
    shutil.copytree(first.out, token_files / "second")
    for run in (first, run_in("second")):
        run.resume()
        assert run.step == 1 and run.train(evaluate_every=2)
        for (name, a), (_, b) in zip(whole.model.named_parameters(), run.model.named_parameters(), strict=True):
            assert relative_error(b, a) <= 1e-2, name


def full_width(policy: str = "safe") -> CausalLM:
    """One gated delta rule layer of hidden 2048, 16 and 32 heads of 128, in bfloat16, on the PyTorch backend."""
    config = ModelConfig.from_hf(
        models.mini_dense(
            hidden_size=2048, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
            linear_value_head_dim=128, num_hidden_layers=1, layer_types=["linear_attention"], intermediate_size=512,
            mtp_num_hidden_layers=0,
        )
    )  # fmt: skip
    model = CausalLM(config, Kernels({"gated_delta_rule": "torch_chunk"}, policy)).init_weights(0, "class_default")
    return model.cuda().bfloat16().eval()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("tokens", [1, 200])
@torch.inference_mode()
def test_flags_of_a_captured_full_width_layer_see_every_replay(tokens, inside):
    """A graph with flags is captured once; passes replayed with other tokens are flagged each for itself."""
    model = full_width()
    prompt = ids(1, tokens).cuda()
    flags = Flags(tap_names(model), steps=8, device="cuda")
    model.tap = FlagTap(flags, None, inside=inside)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = model(prompt, use_cache=False).logits
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(prompt, use_cache=False).logits
    model.tap = None
    before = flags.steps_seen
    graph.replay()
    assert torch.equal(logits, expected) and flags.tripped() == [] and not flags.last_is_bad()
    weight = model.layers[0].linear_attn.norm.weight
    healthy = weight.clone()
    weight.fill_(torch.inf)
    graph.replay()
    assert flags.last_is_bad()
    weight.copy_(healthy)
    graph.replay()
    assert flags.steps_seen == before + 3 and not flags.last_is_bad()
    bad = flags.tripped()
    assert bad[0] == (before + 1, "layers.00.gdn.norm") and {step for step, _ in bad} == {before + 1}
    rows = flags.table[flags.table["step"] == before + 2]
    stages = {name for name in rows["tap"] if is_stage(name)}
    assert bool(stages) == inside  # torch_chunk is named: a single token has stages too
    assert {"logits", "layers.00.gdn.state"} <= set(rows["tap"])


@torch.inference_mode()
def test_flags_never_wait_for_the_device():
    """In the dtypes and layouts that tap points show, also at a point that a pass reaches twice."""
    _, model = pair("mini")
    x = torch.randn(64, 96, device="cuda")
    shown = {"embed": x, "layers.00.gdn.q": x.bfloat16(), "layers.00.gdn.k": x[:, 3:50].half(),
             "layers.00.gdn.cumsum": x.double(), "layers.00.gdn.v": x.T}  # fmt: skip
    with trace(model, check="flags", inside=True) as seen:
        model(ids(1, 130).cuda())
        torch.cuda.set_sync_debug_mode("error")
        try:
            for name, tensor in [*shown.items(), *shown.items()]:
                seen.flags.write(name, tensor)
            seen.flags.end_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert seen.flags.tripped() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_flags_are_exact_on_the_device(dtype):
    limit = torch.finfo(dtype if dtype != torch.float64 else torch.float32).max
    cases = {"nan": torch.nan, "pinf": torch.inf, "ninf": -torch.inf, "near": limit * 0.75, "fine": limit * 0.25}
    flags = Flags(list(cases), device="cuda")
    for name, value in cases.items():
        x = torch.ones(300, 70, dtype=torch.float64)
        x[211, 33] = value
        flags.write(name, x.to(dtype).cuda()[:, 1:])
    flags.end_step()
    table = flags.table.set_index("tap")
    assert table["has_nan"].tolist() == [True, False, False, False, False]
    assert table["has_pinf"].eq(True).tolist() == [False, True, False, False, False]
    assert table["has_ninf"].eq(True).tolist() == [False, False, True, False, False]
    assert table["is_near_limit"].tolist() == [False, False, False, True, False]


class Garbage:
    """Tensors in a reference cycle: nothing but a collection frees them."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.itself, self.tensors = self, tensors


def fill(*spare: int) -> Garbage:
    """Take all that the limit of the process leaves, but for blocks of `spare` bytes."""
    kept_free = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in spare]
    taken, size = [], 2**28
    while size >= 512:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    del kept_free
    return Garbage(taken)


@pytest.fixture
def limit():
    """A function that lets this process have so many bytes more of the device than it has now."""

    def set_limit(n_bytes: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + n_bytes) / total)

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.enable()
    gc.collect()
    torch.cuda.empty_cache()


def dense(**requested: str) -> CausalLM:
    """Wide weights, no experts: the same bits in every run."""
    config = ModelConfig.from_hf(models.mini_dense(initializer_range=0.1))
    return CausalLM(config, Kernels(requested)).init_weights(0).cuda().eval()


#: Room in a full device for part of the prefill, for what comes before the key stores grow, and for part of a token.
SPARE = ((2**26, *[2**20] * 4), (2**20,) * 6, (2**20,))


@pytest.mark.parametrize("full_at", range(len(SPARE)))
@torch.inference_mode()
def test_a_step_out_of_memory_is_saved_by_what_it_frees(limit, full_at):
    """A full device, at the prefill, at the token for which the key stores grow, and at the next: the same bits."""
    model, prompts, told = dense(), ids(64, 512).cuda(), []

    def run(step, is_disturbed: bool):
        cache, tokens, found = None, prompts, []
        for number in range(4):
            if is_disturbed and number == full_at:
                gc.disable()
                fill(*SPARE[full_at])  # nobody holds it, and nothing collects it before the step does
            output = step(tokens, cache=cache, last_only=True)
            cache, tokens = output.cache, output.logits[:, -1].argmax(-1)[:, None]
            found.append(tokens)
        return torch.cat(found, dim=1), cache

    run(model, False)  # what libraries allocate once
    expected, cache = run(model, False)
    limit(4 * 2**30)
    found, after = run(Recovery(model, told.append).step, True)
    assert [incident.is_recovered for incident in told] == [True], told
    assert "OutOfMemoryError" in told[0].error and told[0].tokens == (512 if full_at == 0 else 1)
    assert told[0].layer == 3 if full_at == 1 else told[0].layer is not None
    assert torch.equal(found, expected) and after.lengths == cache.lengths
    for name in ("keys", "values"):
        assert torch.equal(getattr(after.layers[3], name), getattr(cache.layers[3], name))
    for layer in range(3):
        assert torch.equal(after.layers[layer].window, cache.layers[layer].window)
        assert torch.equal(after.layers[layer].state, cache.layers[layer].state)


def test_a_request_too_large_for_the_device_fails_alone(limit):
    """4,000 tokens whose scores in float64 take 512 MB each time, beside two short prompts."""
    model, told = dense(attention="reference"), []
    asked = [Request(input_ids=ids(1, tokens).cuda(), max_new_tokens=6) for tokens in (40, 4000, 70)]
    expected = serve_requests(model, asked)
    limit(600 * 2**20)
    found = serve_requests(model, asked, recovery=Recovery(model, told.append))
    assert [(x.layer, x.op, x.backend, x.is_recovered) for x in told] == [(3, "attention", "reference", False)]
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert (found[1].reason, found[1].tokens) == ("out_of_memory", [])
    table = found[1].failure.table
    rows = {row.what: row.n_bytes for row in table.rows}
    assert rows["total of the device"] == torch.cuda.mem_get_info()[1] > rows["free on the device"] > 0
    # The first of these tensors does not fit any more: what is held are those of the layers before.
    assert 2**20 < rows["activations of the failed step, when it failed"] < rows["allocated when the step failed"]
    assert rows["weights"] < rows["allocated now"] <= rows["reserved by the allocator"]
    assert rows["caches of 1 other requests"] > 0 and table.largest[0].n_bytes >= 2**20
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert serve_requests(model, asked[1:2]) == expected[1:2]


class Refusing:
    """A tap that is out of memory at the end of the pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "logits":
            self.passes += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tensor

    def scope(self, prefix: str) -> None:
        return None


@torch.inference_mode()
def test_out_of_memory_while_a_graph_is_captured_is_passed_on():
    """Nothing is retried inside a lost capture; the next capture has the pass."""
    model = full_width()
    prompt, recovery = ids(1, 1).cuda(), Recovery(model)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = model(prompt, use_cache=False).logits
    torch.cuda.current_stream().wait_stream(stream)
    model.tap = refusing = Refusing()
    with pytest.raises(torch.OutOfMemoryError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        recovery.step(prompt, use_cache=False)
    assert refusing.passes == 1 and recovery.incidents == []
    model.tap, graph = None, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = recovery.step(prompt, use_cache=False).logits
    graph.replay()
    assert torch.equal(logits, expected)
