"""Words of flags that a backend raises itself, and the way through its kernels that is attested."""

import pytest
import torch
from models import mini

import workbench
from workbench import taps
from workbench.config import ModelConfig
from workbench.errors import BackendError
from workbench.kernels import Kernels, conformance, registry
from workbench.kernels.causal_conv import torch_shift
from workbench.kernels.registry import OPERATIONS, Backend, register_backend
from workbench.model import CausalLM

#: Bits of a float32 that no tensor of these passes holds.
SENTINEL = 0x42280000


@pytest.fixture
def operations(monkeypatch):
    monkeypatch.setattr(registry, "OPERATIONS", dict(OPERATIONS))
    return registry.OPERATIONS


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(ModelConfig.from_hf(mini())).init_weights(3).eval()


def writes(x, weight, *, window=None, cu_seqlens=None, flags=None):
    """The convolution, and for its flags what tells it apart from whoever reads the result."""
    if flags is not None:
        assert flags.shape == (1, 2) and flags.dtype == torch.int32 and flags.is_contiguous()
        flags.clamp_(min=SENTINEL)
    return torch_shift.run(x, weight, window=window, cu_seqlens=cu_seqlens)


def path(x, weight, *, window=None, cu_seqlens=None, flags=None):
    return f"{x.shape[1] // 2} tiles"


IDS = torch.arange(6)[None]


def raised(seen) -> set[str]:
    """Points whose words are the kernel's."""
    table = seen.flags.magnitudes()
    return set(table.loc[table["high"] == 42.0, "tap"])


def test_the_kernel_raises_the_words_and_nothing_reads_the_tensor_again(model, operations):
    register_backend("causal_conv", "toy", writes, lambda call: None, flags=(taps.GDN_CONV,))
    layers = {f"layers.{i:02d}.gdn.conv" for i, kind in enumerate(model.config.layer_types) if kind[0] == "l"}
    model.kernels = Kernels({"causal_conv": "toy"})
    with torch.inference_mode(), workbench.trace(model, check="flags") as seen:
        model(IDS)
        model(IDS)
    assert raised(seen) == layers and seen.steps == 2
    row = seen.flags.table.set_index("tap").loc["layers.00.gdn.conv"]
    assert row["dtype"].tolist() == ["float32"] * 2 and row["shape"].tolist()[0][:2] == (1, 6)
    assert set(seen.table["tap"]) >= layers and seen.flags.tripped() == []


def test_a_tensor_that_may_be_replaced_or_was_not_asked_for_is_read_by_pytorch(model, operations):
    register_backend("causal_conv", "toy", writes, lambda call: None, flags=(taps.GDN_CONV,))
    model.kernels = Kernels({"causal_conv": "toy"})
    with torch.inference_mode():
        replaced = "layers.00.gdn.conv"
        with workbench.intervene(model, {replaced: lambda x: x}), workbench.trace(model, check="flags") as seen:
            model(IDS)
        assert replaced not in raised(seen) and replaced in set(seen.table["tap"])
        with workbench.trace(model, check="flags", inside=True) as seen:
            model(IDS)
        assert raised(seen) == set()
        select = workbench.tracing.Selection(("*.gdn.out",))
        with workbench.trace(model, check="flags", select=select) as seen:
            model(IDS)
        assert raised(seen) == set()
        model.kernels = Kernels({"causal_conv": "toy"}, strict=False)
        with workbench.trace(model, check="flags") as seen:
            model(IDS)
        assert raised(seen) == set()
        model.kernels = Kernels({"causal_conv": "toy"})
        with workbench.trace(model):
            model(IDS)


def test_a_pass_that_broke_off_leaves_no_point_to_a_kernel(model, operations):

    def breaks(x, weight, *, window=None, cu_seqlens=None, flags=None):
        raise MemoryError("toy")

    register_backend("causal_conv", "toy", breaks, lambda call: None, flags=(taps.GDN_CONV,))
    model.kernels = Kernels({"causal_conv": "toy"})
    with torch.inference_mode(), workbench.trace(model, check="flags") as seen:
        with pytest.raises(BackendError):
            model(IDS)
        model.kernels = Kernels()
        model(IDS)
    table = seen.table
    assert "layers.00.gdn.conv" in set(table.loc[table["step"] == 1, "tap"])


def test_points_that_are_no_neighbours_are_refused():
    with pytest.raises(BackendError, match=r"expected neighbours in the order of .*, found gdn.out, gdn.state"):
        Backend("gated_delta_rule", "toy", writes, lambda call: None, flags=(taps.GDN_OUT, taps.GDN_STATE))
    Backend("gated_delta_rule", "toy", writes, lambda call: None, flags=(taps.GDN_STATE, taps.GDN_OUT))


def test_conformance_compares_the_words_with_the_result():
    found = conformance.conform(
        "causal_conv", Backend("causal_conv", "toy", writes, lambda call: None, flags=(taps.GDN_CONV,))
    )
    assert {row.check for row in found.failures} == {conformance.FLAGS}
    assert f"gdn.conv: words [{SENTINEL}, {SENTINEL}], of the result [" in found.reason

    def honest(x, weight, *, window=None, cu_seqlens=None, flags=None):
        y, window = torch_shift.run(x, weight, window=window, cu_seqlens=cu_seqlens)
        if flags is not None:
            bits = torch.stack([y.amax(), (-y).amax()]).float().clamp(min=0.0).view(torch.int32) & 0x7FFFFFFF
            flags.copy_(torch.maximum(flags, bits[None]))
        return y, window

    found = conformance.conform(
        "causal_conv", Backend("causal_conv", "toy", honest, lambda call: None, flags=(taps.GDN_CONV,))
    )
    assert found.outcome == "passed", found.reason


@pytest.mark.parametrize("strict", [True, False])
def test_the_way_that_was_taken_is_attested(operations, strict):
    register_backend("causal_conv", "toy", writes, lambda call: None, path=path)
    kernels = Kernels({"causal_conv": "toy"}, strict=strict)
    for tokens in (4, 4, 6, 1):
        kernels.causal_conv(torch.ones(1, tokens, 3), torch.ones(3, 2))
    one, more = kernels.attestation()
    assert more.paths == (("2 tiles", 2), ("3 tiles", 1)) and one.paths == (("0 tiles", 1),)
    assert "2 tiles (2 of them); 3 tiles (1 of them); named by the user" in more.in_words()
    assert "token: 0 tiles; named by the user" in one.in_words()
    assert more.to_json()["paths"] == [["2 tiles", 2], ["3 tiles", 1]]
    kernels.reset_attestation()
    kernels.causal_conv(torch.ones(1, 9, 3), torch.ones(3, 2))
    assert kernels.attestation()[0].paths == (("4 tiles", 1),)
