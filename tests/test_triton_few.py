"""The experts of a few tokens and the router in Triton: the contract, every way of taking the products, dtypes."""

import pytest
import torch
from triton_cases import triton_device  # noqa: F401 - a fixture

from workbench.errors import BackendError
from workbench.kernels import conformance
from workbench.kernels.agreement import relative_error
from workbench.kernels.experts import reference, spec, triton_few
from workbench.kernels.routing import torch_sort, triton_topk
from workbench.kernels.routing.cases import distinct_logits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on(device, arguments, dtype):
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in arguments.items()
    }


@pytest.fixture
def few_programs(monkeypatch):
    """The interpreter takes its time for each program, not for each value."""
    monkeypatch.setattr(triton_topk, "SINGLE_TOKENS", 1)
    monkeypatch.setattr(triton_topk, "MOST_LOGITS", 1 << 13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_keep_the_contract(triton_device, dtype):  # noqa: F811
    found = conformance.conform("experts", "triton_few", device=triton_device, dtypes=[dtype])
    assert found.outcome == "passed", found.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_router_keeps_the_contract(triton_device, dtype, few_programs):  # noqa: F811
    found = conformance.conform("routing", "triton_topk", device=triton_device, dtypes=[dtype])
    assert found.outcome == "passed", found.reason


@pytest.mark.parametrize("pair_tokens", [0, 64], ids=["by expert", "by pair"])
@pytest.mark.parametrize("tokens", [1, 5, 17, 33])
def test_both_ways_for_any_number_of_tokens(triton_device, monkeypatch, pair_tokens, tokens):  # noqa: F811
    """Slots by pair and by expert, blocks of 16 to 64 tokens; sizes that fill no block of the kernels."""
    monkeypatch.setattr(triton_few, "PAIR_TOKENS", pair_tokens)
    case = spec.example(tokens=tokens, hidden=40, experts=12, top_k=3, width=24)
    found = triton_few.run(**on(triton_device, case, torch.bfloat16), chain=None)
    rounded = {name: x.bfloat16().double() if x.is_floating_point() else x for name, x in case.items()}
    assert relative_error(found.cpu().double(), reference.run(**rounded, chain=None)) <= 8 * 2**-9


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_kernels_that_overlap_wait_for_what_they_read(triton_device, tokens):  # noqa: F811
    """Layer after layer, each fed by the one before: the same to the last bit as with a wait after every kernel."""
    on_gpu = triton_device == "cuda"
    sizes = {"hidden": 2048, "experts": 64, "top_k": 8, "width": 512} if on_gpu else {"hidden": 24, "top_k": 3}
    case = on(triton_device, spec.example(tokens=tokens, **sizes), torch.bfloat16)
    router = case["gate_up"][:, 0].T.contiguous()
    top_k = case["experts"].shape[1]

    def layers(wait):
        x = case["x"]
        for _ in range(50 if on_gpu else 2):
            weights, experts = triton_topk.run(x @ router, top_k=top_k, normalise=True)
            wait()
            x = x + triton_few.run(x, weights, experts, case["gate_up"], case["down"], chain=None)
            wait()
            x = x / x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype)
        return x

    overlapped = layers(lambda: None)
    assert torch.equal(overlapped, layers(torch.cuda.synchronize if on_gpu else lambda: None))
    assert bool(torch.isfinite(overlapped).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_router_takes_its_softmax_in_a_dtype(triton_device, dtype, few_programs):  # noqa: F811
    """Logits this close are ties in 16 bits: the lowest expert wins there, the larger logit in float32."""
    logits = distinct_logits(20, 32) * 2**-9
    arguments = {"top_k": 6, "normalise": True, "dtype": dtype}
    weights, experts = triton_topk.run(logits.to(triton_device), **arguments)
    expected_weights, expected = torch_sort.run(logits, **arguments)
    assert torch.equal(experts.cpu(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights)


def test_the_router_refuses_a_softmax_in_float64(triton_device):  # noqa: F811
    with pytest.raises(BackendError, match="float64"):
        triton_topk.run(torch.zeros(1, 4, device=triton_device), top_k=2, normalise=True, dtype=torch.float64)


def test_many_tokens_are_refused():
    from workbench.kernels.registry import Call
    from workbench.numerics import PRESETS

    call = Call("experts", "cuda", torch.bfloat16, 65, False, False, PRESETS["safe"], (8, 64, 32), tensor_device="cuda")
    assert "up to 64" in triton_few.supports(call)
