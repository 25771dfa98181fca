"""Faults of every kind, in every op: the stage watch names the op that was tampered with, and no other."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import models
import pytest
import torch
from torch import Tensor

import workbench
from workbench import taps
from workbench.analysis.stages import STAGES, stage_watch
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.tracing import intervene

PROMPT, STEPS = 70, 2  # more than a chunk, then decode


def model_of(kind: str = "mini", decay: str = "realistic") -> CausalLM:
    config = ModelConfig.from_hf({"mini": models.mini, "dense": models.mini_dense}[kind]())
    return CausalLM(config).init_weights(3, decay).eval()


def ids(tokens: int = PROMPT, rows: int = 1) -> Tensor:
    return torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def run(model: CausalLM, between: Callable = lambda cache: None) -> "workbench.analysis.stages.StageWatch":
    """A prefill and decode steps, watched; `between` may spoil the cache after the prefill."""
    with torch.inference_mode(), stage_watch(model) as watch:
        output = model(ids())
        between(output.cache)
        for step in range(STEPS):
            output = model(ids(STEPS + 3)[:, step : step + 1], cache=output.cache)
    return watch


def named(watch) -> set[tuple[int | None, str, str]]:
    """(step, tap, op) of every fault."""
    faults = watch.table[watch.table["is_fault"]]
    return set(zip(faults["step"], faults["tap"], faults["op"], strict=True))


# ---- healthy runs


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", ["class_default", "realistic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nothing_is_found_in_sound_models(tokens, decay, dtype):
    model = model_of(decay=decay).to(dtype)
    with torch.inference_mode(), stage_watch(model) as watch:
        output = model(ids(tokens, rows=2))
        for step in range(2):
            output = model(ids(7, rows=2)[:, step : step + 1], cache=output.cache)
    assert named(watch) == set()
    assert len(watch.table) > 100 and watch.table["step"].nunique() == 3
    assert bool(watch.table["inputs_finite"].all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_nothing_is_found_in_the_miniature(dtype):
    model = workbench.load("data/miniature", dtype=dtype)
    with stage_watch(model) as watch:
        model.generate(torch.arange(5, 305)[None], max_new_tokens=4)
    assert named(watch) == set()


def test_nothing_is_found_in_a_dense_model_and_other_sound_policies_and_backends():
    assert named(run(model_of("dense"))) == set()
    for policy in ("segsum", "fp32_cumsum"):
        model = model_of()
        model.kernels = Kernels(policy=policy)
        assert named(run(model)) == set(), policy
    model = model_of()
    model.kernels = Kernels("gated_delta_rule=torch_recurrent,experts=torch_loop,routing=torch_max")
    assert named(run(model)) == set()


# ---- a tensor that is wrong at one tap point: the op that gives it


LINEAR_TAPS = [name for name in STAGES if name.startswith("gdn.")]
FULL_TAPS = [name for name in STAGES if name.startswith("attn.")]
OTHERS = [name for name in STAGES if name not in (*LINEAR_TAPS, *FULL_TAPS)]


#: Tap points whose tensor is shown beside what the same op goes on with, and where else that shows: chunks have read
#: their states, and fused attention its scores, before an intervention replaces them.
READ_BESIDE = {
    taps.GDN_STATE: (taps.GDN_INTER, taps.GDN_OUT, "cache.state"),
    taps.GDN_QKV: ("cache.window",),
    taps.ATTN_SCORES: (taps.ATTN_OUT,),
}


def spoiled(x: Tensor, how: str) -> Tensor:
    x = x.clone()
    flat = x.view(-1)
    if how in ("nan", "inf"):
        flat[flat.numel() // 2] = math.nan if how == "nan" else math.inf
        return x
    return x * 1.01  # silent: every value one per cent too large


@pytest.mark.parametrize("how", ["nan", "inf", "scaled"])
@pytest.mark.parametrize("name", [*LINEAR_TAPS, *FULL_TAPS, *OTHERS])
def test_the_op_that_gave_a_wrong_tensor_is_named(name, how):
    layer = 3 if name in FULL_TAPS else 1
    full = taps.full_name(layer, name)
    model = model_of()
    with intervene(model, {full: lambda x: spoiled(x, how)}):
        watch = run(model)
    first = watch.first_fault
    found = {tap.removeprefix(f"layers.{layer:02d}.") for _, tap, _ in named(watch)}
    assert found <= {name, *READ_BESIDE.get(name, ())}
    assert first["tap"] == full and first["step"] == 0
    assert first["output_finite"] == (how == "scaled")


@pytest.mark.parametrize("how", ["nan", "inf", "scaled"])
@pytest.mark.parametrize("name", [taps.EMBED, taps.FINAL_NORM, taps.LOGITS])
def test_the_embedding_the_last_norm_and_the_head_are_named(name, how):
    with intervene(model := model_of(), {name: lambda x: spoiled(x, how)}):
        watch = run(model)
    assert {tap for _, tap, _ in named(watch)} == {name}
    assert watch.first_fault["op"] == {"embed": "embed_tokens", "final_norm": "rms_norm", "logits": "lm_head"}[name]


def test_a_transposed_state_is_named_where_both_sizes_are_equal():
    """With unequal ones it cannot hide."""
    config = ModelConfig.from_hf(models.mini(linear_value_head_dim=16))
    model = CausalLM(config).init_weights(3, "realistic").eval()
    watch = run(model, spoil_state(lambda s: s.transpose(-1, -2).contiguous()))
    assert named(watch) == {(1, "layers.01.cache.state", "recurrent state")}


# ---- ops that compute something else


class Faulty:
    """A model's kernels, one op of which is replaced."""

    def __init__(self, kernels: Kernels, **replaced: Callable):
        self._kernels, self._replaced = kernels, replaced

    def __getattr__(self, name: str):
        if name in self._replaced:
            def replaced(*args, watch=None, **named):  # what takes the place of an op raises no flags
                return self._replaced[name](getattr(self._kernels, name), *args, **named)

            return replaced
        return getattr(self._kernels, name)


@dataclass(frozen=True)
class Fault:
    """`replaced` ops by name; `tap` and `op` that must be named first, and all that may be named beside it."""

    tap: str
    op: str
    replaced: dict[str, Callable]
    also: tuple[str, ...] = ()


def without_offset(run, x, weight, *, eps):
    return run(x, weight - 1.0, eps=eps)


def with_double_offset(run, x, weight, *, eps):
    return run(x, weight + 1.0, eps=eps)


def shifted_conv(run, x, weight, **named):
    y, window = run(x, weight, **named)
    return torch.roll(y, 1, dims=1), window


def conv_that_forgets(run, x, weight, *, window=None, cu_seqlens=None):
    return run(x, weight, window=None if window is None else torch.zeros_like(window), cu_seqlens=cu_seqlens)


def reversed_taps(run, x, weight, **named):
    return run(x, weight.flip(-1), **named)


def delta(change: Callable[..., dict]) -> Callable:
    """The gated delta rule with changed arguments, so that its first stage that reads them differs."""
    return lambda run, q, k, v, **named: run(**({"q": q, "k": k, "v": v} | named | change(q=q, k=k, v=v, **named)))


def state_forgotten(run, *args, initial_state=None, **named):
    return run(*args, initial_state=None if initial_state is None else torch.zeros_like(initial_state), **named)


def out_of_heads(run, *args, **named):
    out, state = run(*args, **named)
    return out.roll(1, dims=2), state


def scores_not_scaled(run, q, k, v, *, scale, **named):
    return run(q, k, v, scale=1.0, **named)


def not_causal(run, q, k, v, *, scale, key_lengths=None, cu_seqlens=None, tap=None):
    heads, kv_heads = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    return torch.einsum("bhtl,blhd->bthd", (torch.einsum("bthd,blhd->bhtl", q, k) * scale).softmax(-1), v)


def tiled_key_heads(run, q, k, v, **named):
    groups = q.shape[2] // k.shape[2]
    return run(q, k.repeat(1, 1, groups, 1), v.repeat(1, 1, groups, 1), **named)


def last_experts(run, logits, *, top_k, normalise):
    weights, experts = run(logits, top_k=top_k, normalise=normalise)
    return weights, logits.shape[-1] - 1 - experts


def not_normalised(run, logits, *, top_k, normalise):
    return run(logits, top_k=top_k, normalise=False)


def softmax_of_the_chosen_in_half(run, logits, *, top_k, normalise):
    weights, experts = run(logits, top_k=top_k, normalise=normalise)
    return weights.half().to(weights.dtype), experts


def up_before_gate(run, x, weights, experts, gate_up, down):
    return run(x, weights, experts, torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1), down)


def experts_without_weights(run, x, weights, experts, gate_up, down):
    return run(x, torch.ones_like(weights), experts, gate_up, down)


def second_expert_dropped(run, x, weights, experts, gate_up, down):
    return run(x, weights * torch.tensor([1.0, 0.0]), experts, gate_up, down)


def scratch_not_written(run, x, weights, experts, gate_up, down):
    out = run(x, weights, experts, gate_up, down)
    out[-1] = math.nan
    return out


def gate_without_silu(run, x, gate, weight, *, eps):
    return run(x, torch.ones_like(gate), weight, eps=eps) * torch.sigmoid(gate) / torch.sigmoid(torch.ones(()))


GDN, ATTN = "layers.00.", "layers.03."
FAULTS: dict[str, Fault] = {
    "norm without its offset": Fault("layers.00.input_norm", "rms_norm", {"rms_norm": without_offset}),
    "norm with its offset twice": Fault(
        "layers.00.input_norm", "rms_norm", {"rms_norm": with_double_offset}, also=("q_proj", "k_proj")
    ),  # which have a norm of each head behind them
    "convolution one token late": Fault(GDN + "gdn.conv", "causal_conv", {"causal_conv": shifted_conv}),
    "convolution without its past": Fault(
        GDN + "gdn.conv", "causal_conv", {"causal_conv": conv_that_forgets}, also=("conv window",)
    ),
    "convolution with its taps reversed": Fault(GDN + "gdn.conv", "causal_conv", {"causal_conv": reversed_taps}),
    "gated norm without SiLU": Fault(GDN + "gdn.norm", "gated_rms_norm", {"gated_rms_norm": gate_without_silu}),
    "gates twice as strong": Fault(
        GDN + "gdn.cumsum", "gated_delta_rule",
        {"gated_delta_rule": delta(lambda log_decay, **_: {"log_decay": 2 * log_decay})},
    ),
    "gates in bfloat16": Fault(
        GDN + "gdn.cumsum", "gated_delta_rule",
        {"gated_delta_rule": delta(lambda log_decay, **_: {"log_decay": log_decay.bfloat16().float()})},
    ),
    "key heads swapped": Fault(
        GDN + "gdn.kkt", "gated_delta_rule", {"gated_delta_rule": delta(lambda k, **_: {"k": k.flip(2)})},
    ),
    "query heads swapped": Fault(
        GDN + "gdn.intra", "gated_delta_rule", {"gated_delta_rule": delta(lambda q, **_: {"q": q.flip(2)})},
    ),
    "value heads swapped": Fault(
        GDN + "gdn.u", "gated_delta_rule", {"gated_delta_rule": delta(lambda v, **_: {"v": v.flip(2)})},
    ),
    "queries scaled twice": Fault(
        GDN + "gdn.intra", "gated_delta_rule", {"gated_delta_rule": delta(lambda q, **_: {"q": q * 0.25})},
    ),
    "state forgotten between passes": Fault(
        GDN + "gdn.state", "gated_delta_rule", {"gated_delta_rule": state_forgotten}
    ),
    "output heads rolled": Fault(GDN + "gdn.out", "gated_delta_rule", {"gated_delta_rule": out_of_heads}),
    "scores not scaled": Fault(ATTN + "attn.scores", "attention", {"attention": scores_not_scaled}),
    "attention that sees the future": Fault(ATTN + "attn.out", "attention", {"attention": not_causal}),
    "key heads tiled and not repeated": Fault(ATTN + "attn.scores", "attention", {"attention": tiled_key_heads}),
    "wrong experts": Fault("layers.00.moe.topk", "routing", {"routing": last_experts}),
    "weights not normalised": Fault("layers.00.moe.topk", "routing", {"routing": not_normalised}),
    "weights rounded to half": Fault("layers.00.moe.topk", "routing", {"routing": softmax_of_the_chosen_in_half}),
    "up rows before gate rows": Fault("layers.00.moe.experts", "experts", {"experts": up_before_gate}),
    "experts without weights": Fault("layers.00.moe.experts", "experts", {"experts": experts_without_weights}),
    "second expert dropped": Fault("layers.00.moe.experts", "experts", {"experts": second_expert_dropped}),
    "expert scratch not written": Fault("layers.00.moe.experts", "experts", {"experts": scratch_not_written}),
}  # fmt: skip


@contextmanager
def faulty(model: CausalLM, replaced: dict[str, Callable]) -> Iterator[None]:
    kernels = model.kernels
    model.kernels = Faulty(kernels, **replaced)
    try:
        yield
    finally:
        model.kernels = kernels


@pytest.mark.parametrize("name", FAULTS)
def test_the_op_that_computes_something_else_is_named(name):
    fault = FAULTS[name]
    model = model_of()
    with faulty(model, fault.replaced):
        watch = run(model)
    first = watch.first_fault
    assert first is not None, "not found"
    assert (first["tap"], first["op"]) == (fault.tap, fault.op)
    ops = {op for _, _, op in named(watch)}
    assert ops <= {fault.op, *fault.also}, ops


# ---- policies that are wrong by themselves


@pytest.mark.parametrize(
    ("policy", "tap"),
    [
        ("factored", "gdn.decay"), ("multiply_mask", "gdn.decay"), ("fp16_factored", "gdn.decay"),
        ("bf16_cumsum", "gdn.decay"), ("clamp_cumsum_20", "gdn.cumsum"), ("clamp_all_exponents_80", "gdn.cumsum"),
    ],
)  # fmt: skip
def test_the_stage_that_a_policy_spoils_is_named(policy, tap):
    model = model_of(decay="class_default")
    model.kernels = Kernels(policy=policy)
    first = run(model).first_fault
    assert first["tap"].endswith(tap) and first["op"] == "gated_delta_rule"


# ---- memory between two passes


def spoil_state(change: Callable[[Tensor], Tensor]) -> Callable:
    def between(cache) -> None:
        cache.layers[1].state = change(cache.layers[1].state)

    return between


def shift_window(cache) -> None:
    cache.layers[1].window = cache.layers[1].window.roll(1, dims=1)


def stale_keys(cache) -> None:
    cache.layers[3].keys[:, PROMPT // 2] = 0.0


def swapped_values(cache) -> None:
    cache.layers[3].values[:, :PROMPT] = cache.layers[3].values[:, :PROMPT].flip(2)


MEMORY_FAULTS = {
    "state of an earlier token": (spoil_state(lambda s: s * 0.9), "layers.01.cache.state", "recurrent state"),
    "state in half precision": (spoil_state(lambda s: s.half().float()), "layers.01.cache.state", "recurrent state"),
    "state of other heads": (spoil_state(lambda s: s.roll(1, dims=1)), "layers.01.cache.state", "recurrent state"),
    "state not finite": (spoil_state(lambda s: s * math.nan), "layers.01.cache.state", "recurrent state"),
    "window shifted": (shift_window, "layers.01.cache.window", "conv window"),
    "keys of a block lost": (stale_keys, "layers.03.cache.keys", "key store"),
    "values of other heads": (swapped_values, "layers.03.cache.values", "value store"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY_FAULTS)
def test_memory_that_changed_between_two_passes_is_named(name):
    between, tap, op = MEMORY_FAULTS[name]
    watch = run(model_of(), between)
    assert named(watch) == {(1, tap, op)}


# ---- weights, and what is refused


def test_the_count_of_faults():
    taps_spoiled = 3 * len(STAGES)
    assert taps_spoiled + len(FAULTS) + len(MEMORY_FAULTS) + 6 >= 40 and len(FAULTS) + len(MEMORY_FAULTS) >= 30


def test_the_place_of_a_fault_is_told():
    model = model_of()

    def one_value(x: Tensor) -> Tensor:
        x = x.clone()
        if x.shape[1] == PROMPT:
            x[0, 41, 2, 5] += 1.0
        return x

    with intervene(model, {"layers.01.gdn.v": one_value}):
        first = run(model).first_fault
    assert first["index"] == (0, 41, 2, 5) and first["found"] == pytest.approx(first["expected"] + 1.0, rel=1e-4)


def test_packed_and_padded_batches_are_refused_in_one_line():
    model = model_of()
    with pytest.raises(InputError, match="expected a batch without padding"), stage_watch(model):
        model(ids(), cu_seqlens=torch.tensor([0, 30, PROMPT]))
    assert model.tap is None and "forward" not in vars(model)


def test_a_watch_inside_a_watch_is_refused_and_leaves_the_outer_one():
    model = model_of()
    with stage_watch(model) as outer:
        with pytest.raises(InputError, match="expected a model with its own forward"), stage_watch(model):
            pass
        model(ids(5))
    assert len(outer.table) > 50 and "forward" not in vars(model)
