"""The sparse block against transformers': every router, alignment and expert backend, and what breaks them."""

import math

import models
import pytest
import torch
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from workbench import kernels
from workbench.analysis.launches import count_launches
from workbench.analysis.runs import using_policy
from workbench.cli import options
from workbench.config import ModelConfig
from workbench.errors import BackendError, InputError, WorkspaceError
from workbench.kernels import Kernels
from workbench.kernels.agreement import logit_difference
from workbench.kernels.experts.spec import declare_scratch, example
from workbench.kernels.registry import OPERATIONS, Call
from workbench.kernels.workspace import Workspace
from workbench.model import CausalLM, SparseBlock
from workbench.numerics import PRESETS, NumericsPolicy

LIMIT = 1e-5
EXPERTS, TOP_K, HIDDEN, WIDTH = 32, 4, 48, 16
#: Those that this machine can run in float32, which libraries of other machines cannot.
BACKENDS = {
    op: [name for name, backend in OPERATIONS[op].backends.items() if backend.refusal(call) is None]
    for op, call in (
        (op, Call(op, "cpu", torch.int64 if op == "alignment" else torch.float32, 40, False, False, NumericsPolicy()))
        for op in ("experts", "alignment", "routing")
    )
}
CASES = [(op, name) for op, names in BACKENDS.items() for name in names if name != "reference"]
#: Which sort their pairs.
SORTING = {"torch_sorted", "torch_sized", "torch_onednn", "torch_grouped", "torch_batched"}


def blocks(seed: int = 0) -> tuple[SparseBlock, Qwen3_5MoeSparseMoeBlock]:
    """Ours and transformers' with the same random weights."""
    config = Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=24, num_hidden_layers=1, layer_types=["full_attention"],
    )  # fmt: skip
    theirs = Qwen3_5MoeSparseMoeBlock(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    ours = SparseBlock(ModelConfig.from_hf(config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tokens_of(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_parity(ours: SparseBlock, theirs, x: torch.Tensor, **requested: str) -> None:
    with torch.inference_mode():
        found = ours(x, Kernels(requested), None)
        expected = theirs(x)
        expected = expected[0] if isinstance(expected, tuple) else expected
    assert bool(torch.isfinite(expected).all())
    assert logit_difference(found, expected) <= LIMIT, requested


@pytest.mark.parametrize(("op", "name"), CASES)
def test_every_backend_equals_transformers(op, name):
    ours, theirs = blocks()
    for count in (1, 7, 64, 1000):
        assert_parity(ours, theirs, tokens_of(count), **{op: name})


@pytest.mark.parametrize(("op", "name"), CASES)
def test_every_backend_equals_transformers_on_routers_that_are_not_even(op, name):
    """One expert for all, experts that nobody chooses, logits all negative or shifted far away."""
    for what in ("one expert first for all", "half of the experts for none", "all negative", "a constant added"):
        ours, theirs = blocks(seed=2)
        x = tokens_of(64, seed=3)
        x[..., 0] = 1.0  # a channel that is the same for every token: its router column is a bias
        with torch.no_grad():
            router = ours.gate.weight
            if what == "one expert first for all":
                router[5, 0] += 40.0
            elif what == "half of the experts for none":
                router[: EXPERTS // 2, 0] -= 40.0
            else:
                router[:, 0] += {"all negative": -60.0, "a constant added": 96.0}[what]
            theirs.gate.weight.copy_(router)
        logits = x[0] @ ours.gate.weight.T
        chosen = logits.topk(TOP_K).indices
        assert {
            "one expert first for all": bool((chosen[:, 0] == 5).all()),
            "half of the experts for none": bool((chosen >= EXPERTS // 2).all()),
            "all negative": bool((logits < 0).all()),
            "a constant added": bool((logits > 0).all()),
        }[what]
        assert_parity(ours, theirs, x, **{op: name})


@pytest.mark.parametrize("name", BACKENDS["routing"])
def test_ties_go_to_the_lowest_expert_in_the_block_too(name):
    """transformers' topk promises nothing about ties: equal experts make any choice right, and ours the lowest."""
    ours, theirs = blocks()
    with torch.no_grad():
        for block in (ours, theirs):
            block.gate.weight.zero_()
            for weight in (block.experts.gate_up_proj, block.experts.down_proj):
                weight.copy_(weight[:1].expand_as(weight).clone())
    assert_parity(ours, theirs, tokens_of(7), routing=name)
    _, chosen = Kernels({"routing": name}).routing(torch.zeros(7, EXPERTS), top_k=TOP_K, normalise=True)
    assert chosen.tolist() == [list(range(TOP_K))] * 7


def test_the_real_routing_width_by_every_backend():
    """256 experts, 8 per token."""
    case = example(tokens=65, experts=256, top_k=8, hidden=32, width=16)
    expected = Kernels("experts=reference").experts(**case)
    for name in BACKENDS["experts"]:
        assert logit_difference(Kernels({"experts": name}).experts(**case), expected) <= LIMIT, name


# ---- the chain: each link by itself


def test_a_link_that_is_missing_is_replaced_alone_and_named():
    """A native router that refuses leaves the alignment and the experts to their own choice."""
    ours, theirs = blocks()

    def refuse(_call):
        return "libmoe.so has no symbol topk_softmax"

    operation = OPERATIONS["routing"]
    native = type(next(iter(operation.backends.values())))("routing", "native", None, refuse)
    OPERATIONS["routing"] = type(operation)(
        "routing", {**operation.backends, "native": native}, lambda call: ("native", *operation.automatic_order(call))
    )
    try:
        used = Kernels({"experts": "torch_grouped", "alignment": "torch_sort"})
        with torch.inference_mode():
            found = ours(tokens_of(64), used, None)
            assert logit_difference(found, theirs(tokens_of(64))) <= LIMIT
        rows = {row.op: row for row in used.attestation()}
        assert rows["routing"].backend in operation.backends
        assert rows["routing"].refused == (("native", "libmoe.so has no symbol topk_softmax"),)
        assert (rows["experts"].backend, rows["alignment"].backend) == ("torch_grouped", "torch_sort")
        with pytest.raises(BackendError, match=r"op routing: backend native was asked for .* no symbol topk_softmax"):
            ours(tokens_of(64), Kernels({"routing": "native"}), None)
    finally:
        OPERATIONS["routing"] = operation


@pytest.mark.parametrize("name", BACKENDS["experts"])
def test_host_syncs_are_counted_and_not_claimed(name):
    case = example(tokens=64, experts=32, top_k=4, hidden=64, width=32)
    used = Kernels({"experts": name})
    found = count_launches(lambda: used.experts(**case))
    expected = {"torch_loop": 32, "torch_sorted": 1, "torch_sized": 1, "torch_onednn": 1, "torch_pairs": 1,
                "reference": 1}  # fmt: skip
    assert found.syncs == expected.get(name, 0)
    assert ("alignment" in {row.op for row in used.attestation()}) == (name in SORTING)
    weights = sum(case[key].numel() * 4 for key in ("gate_up", "down"))
    assert found.bytes > weights * len(case["experts"].unique()) / 32


# ---- bad input, named in one line


def moe_inputs(**changes) -> dict:
    return example(tokens=6, experts=8, top_k=2) | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": torch.tensor([[0, 8]] * 6)}, "experts: expected numbers from 0 to 7, found 8 at token 0, rank 1"),
        ({"experts": torch.tensor([[0, -1]] * 6)}, "found -1 at token 0, rank 1, 6 of 12 outside"),
        ({"experts": torch.tensor([[3, 3]] * 6)}, "expected those of a token distinct, found .3, 3. at token 0"),
        ({"experts": torch.zeros(6, 2)}, "experts: expected int64, found torch.float32"),
        ({"x": torch.zeros(6, 31)}, r"x: expected shape \(6, 32\)"),
        ({"x": torch.zeros(6, 32, dtype=torch.bfloat16)}, "x: expected torch.float32 as gate_up, found torch.bfloat16"),
        ({"down": torch.zeros(8, 24, 32)}, r"down: expected shape \(8, 32, 24\)"),
        ({"gate_up": torch.zeros(8, 47, 32)}, r"gate_up: expected \[E, 2 I, D\]"),
        ({"weights": torch.zeros(6, 3)}, r"weights: expected shape \(6, 2\)"),
    ],
)
def test_experts_that_do_not_fit_are_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        kernels.experts(**moe_inputs(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up": torch.zeros(0, 48, 32), "down": torch.zeros(0, 32, 24)}, r"at least 1 each, found \(0, 48, 32\)"),
        ({"gate_up": torch.zeros(8, 48, 0), "down": torch.zeros(8, 0, 24), "x": torch.zeros(6, 0)}, "at least 1 each"),
        ({"gate_up": torch.zeros(8, 0, 32), "down": torch.zeros(8, 32, 0)}, "of at least 1 each"),
        ({"experts": torch.zeros(6, 0, dtype=torch.int64), "weights": torch.zeros(6, 0)}, "at least one expert"),
        ({key: x.long() for key, x in example(tokens=6, experts=8, top_k=2).items()}, "floats of 16 bits or more"),
    ],
)
def test_sizes_of_zero_and_integers_are_refused(changes, message):
    for name in (None, *(f"experts={name}" for name in BACKENDS["experts"])):
        with pytest.raises(InputError, match=message):
            kernels.experts(**moe_inputs(**changes), backend=name)


@pytest.mark.parametrize("top_k", [2.0, None, "2", True])
def test_a_top_k_that_is_no_number_is_refused(top_k):
    with pytest.raises(InputError, match="top_k: expected 1 to 8, the number of experts, found"):
        kernels.routing(torch.zeros(2, 8), top_k=top_k)


@pytest.mark.parametrize(
    "logits", [[[1.0, 2.0]], torch.zeros(2, 8, device="meta"), torch.zeros(2, 8).to(torch.float8_e4m3fn), None]
)
def test_logits_that_are_none_are_refused(logits):
    with pytest.raises(InputError, match="routing: logits: expected"):
        kernels.routing(logits, top_k=1)


@pytest.mark.parametrize("name", BACKENDS["routing"])
def test_experts_whose_probability_vanishes_keep_the_order_of_their_logits(name):
    """fp32 softmax makes zeros of all that is 104 nats below the best: they are no ties."""
    logits = torch.zeros(1, 16)
    logits[0, [0, 15, 14, 13]] = torch.tensor([200.0, 50.0, 40.0, 30.0])
    weights, experts = kernels.routing(logits, top_k=4, backend=name)
    assert experts.tolist() == [[0, 15, 14, 13]] and weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    wide = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 1000.0
    assert torch.equal(kernels.routing(wide, top_k=8, backend=name)[1], wide.sort(-1, descending=True).indices[:, :8])


@pytest.mark.parametrize("name", BACKENDS["experts"])
def test_an_empty_batch_is_an_empty_result(name):
    case = moe_inputs(x=torch.zeros(0, 32), weights=torch.zeros(0, 2), experts=torch.zeros(0, 2, dtype=torch.int64))
    assert kernels.experts(**case, backend=f"experts={name}").shape == (0, 32)


@pytest.mark.parametrize("name", BACKENDS["routing"])
def test_an_empty_batch_has_no_routes(name):
    weights, experts = kernels.routing(torch.zeros(0, 8), top_k=2, backend=name)
    assert weights.shape == experts.shape == (0, 2)


def test_logits_without_a_softmax_are_named_and_not_routed_in_silence():
    logits = torch.zeros(5, 8)
    logits[3, 2], logits[4, 1] = math.nan, math.inf
    with pytest.raises(InputError, match="found nan at token 3, expert 2, such in 2 of 5 tokens"):
        kernels.routing(logits, top_k=2)
    shut = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf] * 3])
    assert kernels.routing(shut[:1], top_k=2)[1].tolist() == [[2, 0]]
    with pytest.raises(InputError, match="found -inf at token 1"):
        kernels.routing(shut, top_k=2)
    for top_k in (0, 4):
        with pytest.raises(InputError, match=f"top_k: expected 1 to 3, the number of experts, found {top_k}"):
            kernels.routing(shut[:1], top_k=top_k)


# ---- dtype of the router


@pytest.mark.parametrize("name", BACKENDS["routing"])
def test_a_narrow_router_ties_what_differs_in_its_last_bits(name):
    logits = torch.tensor([[1.0, 1.001, 0.0, 3.0]])  # bf16 has 8 bits: 1.001 is 1
    assert kernels.routing(logits, top_k=3, backend=name)[1].tolist() == [[3, 1, 0]]
    weights, experts = kernels.routing(logits, top_k=3, backend=name, dtype=torch.bfloat16)
    assert experts.tolist() == [[3, 0, 1]] and weights.dtype == torch.float32


def test_the_models_router_takes_the_dtype_that_is_asked_for():
    ours, _ = blocks()
    x = tokens_of(64)
    with torch.inference_mode():
        wide = ours(x, Kernels(), None)
        assert torch.equal(ours(x, Kernels(router_dtype=torch.float32), None), wide)
        narrow = ours(x, Kernels(router_dtype=torch.bfloat16), None)
        assert 0.0 < logit_difference(narrow, wide) < 0.5
        half = ours.to(torch.bfloat16)
        assert half(x.bfloat16(), Kernels(router_dtype=torch.float32), None).dtype == torch.bfloat16
    with pytest.raises(BackendError, match="router_dtype: expected one of float32, bfloat16, float16, found"):
        Kernels(router_dtype=torch.float64)


def test_another_policy_keeps_the_dtype_of_the_router():
    config = ModelConfig.from_hf(models.mini())
    model = CausalLM(config, Kernels(router_dtype=torch.bfloat16)).init_weights(0, "realistic").eval()
    with using_policy(model, "segsum"):
        assert model.kernels.router_dtype == torch.bfloat16 and model.kernels.policy == PRESETS["segsum"]


# ---- scratch memory


@pytest.mark.parametrize("name", ["torch_sorted", "torch_onednn"])
def test_experts_in_scratch_memory_are_bit_for_bit_the_same(name):
    """Debug fills scratch with NaN before and after: nothing unwritten is read, nothing is kept too long."""
    ours, _ = blocks()
    with Workspace(debug=True) as workspace:
        declare_scratch(workspace, tokens=70, top_k=TOP_K, hidden=HIDDEN, width=WIDTH, dtype=torch.float32)
        workspace.allocate()
        with_scratch = Kernels({"experts": name}, workspace=workspace)
        with torch.inference_mode():
            kept = []
            for count in (1, 70, 7):
                x = tokens_of(count)
                expected = ours(x, Kernels({"experts": name}), None)
                kept.append((ours(x, with_scratch, None), expected))
            assert all(torch.equal(found, expected) for found, expected in kept)
            with pytest.raises(WorkspaceError, match=r"buffer 'experts.gate_up': expected at most 8960 elements"):
                ours(tokens_of(71), with_scratch, None)
        # Where a gradient is recorded there is none to take.
        ours(tokens_of(71), Kernels("experts=torch_sorted", workspace=workspace), None)


def test_scratch_that_was_not_declared_is_named():
    workspace = Workspace()
    workspace.allocate()
    used = Kernels("experts=torch_sorted", workspace=workspace)
    with torch.inference_mode(), pytest.raises(WorkspaceError, match=r"buffer 'experts.gate_up': expected .*declared"):
        used.experts(**moe_inputs())


def test_the_command_line_offers_the_dtypes_that_a_router_takes():
    assert [getattr(torch, name) for name in options.ROUTER_DTYPES] == list(kernels.ROUTER_DTYPES)
