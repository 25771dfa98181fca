"""The stages inside the chunk kernels: those of `torch_chunk`, whole or as ranges, and the result's bits."""

import pytest
import torch
from triton_cases import triton_device  # noqa: F401 - a fixture

from workbench import taps
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.triton_chunk_stages import ranges_of
from workbench.numerics import NumericsPolicy

STAGES = ("cumsum", "decay", "kkt", "inverse", "u", "w", "intra", "state", "inter")
CALLS = {
    "two whole chunks": {"tokens": 32},
    "rows that end early": {"tokens": 37, "batch": 2},
    "one short chunk": {"tokens": 5},
    "packed": {"tokens": 40, "lengths": (3, 0, 20, 17)},
}


class Stages:
    """An observer that keeps what it sees, and may replace one of them."""

    sees_inside = True

    def __init__(self, takes_ranges: bool = False, replaced: str = ""):
        self.takes_ranges, self.replaced = takes_ranges, replaced
        self.seen: dict[str, object] = {}

    def __call__(self, name, tensor):
        self.seen[name] = tensor
        return tensor + 1.0 if name == self.replaced else tensor

    def see_ranges(self, name, ranges):
        self.seen[name] = ranges

    def scope(self, prefix):
        return self


def call(name: str, dtype: torch.dtype, device: str) -> dict:
    settings = dict(CALLS[name])
    lengths = settings.pop("lengths", None)
    given = spec.example(key_heads=2, value_heads=4, key_dim=16, value_dim=20, **settings)
    given = {key: x if key == "log_decay" else x.to(dtype) for key, x in given.items()}
    given = {key: x.to(device) for key, x in given.items()}
    if lengths is not None:
        given["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return given


def kernels(backend: str) -> Kernels:
    return Kernels({"gated_delta_rule": backend}, NumericsPolicy(chunk=16))


@pytest.mark.parametrize("name", CALLS)
def test_stages_are_those_of_torch(triton_device, name):  # noqa: F811
    given = call(name, torch.float32, triton_device)
    plain = kernels("triton_chunk").gated_delta_rule(**given)
    found, expected = Stages(), Stages()
    watched = kernels("triton_chunk").gated_delta_rule(**given, tap=found)
    kernels("torch_chunk").gated_delta_rule(**given, tap=expected)
    assert all(map(torch.equal, watched, plain))
    assert list(found.seen) == list(expected.seen) == [f"gdn.{stage}" for stage in STAGES]
    for stage, tensor in found.seen.items():
        assert tensor.shape == expected.seen[stage].shape, stage
        assert relative_error(tensor, expected.seen[stage]) < 2e-6, stage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["two whole chunks", "packed"])
def test_ranges_are_those_of_the_stages(triton_device, name, dtype):  # noqa: F811
    given = call(name, dtype, triton_device)
    plain = kernels("triton_chunk").gated_delta_rule(**given)
    whole, ranges = Stages(), Stages(takes_ranges=True)
    kernels("triton_chunk").gated_delta_rule(**given, tap=whole)
    watched = kernels("triton_chunk").gated_delta_rule(**given, tap=ranges)
    assert all(map(torch.equal, watched, plain)) and list(ranges.seen) == list(whole.seen)
    for stage, found in ranges.seen.items():
        assert found.shape == whole.seen[stage].shape, stage
        assert torch.equal(found.values, ranges_of(whole.seen[stage])), stage


def test_what_is_not_finite_is_counted(triton_device):  # noqa: F811
    given = call("two whole chunks", torch.float32, triton_device)
    given["k"][0, 20, 1, 3] = torch.nan
    found = Stages(takes_ranges=True)
    kernels("triton_chunk").gated_delta_rule(**given, tap=found)
    values = found.seen[taps.GDN_KKT].values
    assert values[0, :, 2].sum() == 0 and values[1, :2, 2].sum() == 0 and (values[1, 2:, 2] > 0).all()


def test_a_replaced_state_is_handed_on_and_another_stage_is_refused(triton_device):  # noqa: F811
    given = call("packed", torch.float32, triton_device)
    _, expected = kernels("torch_chunk").gated_delta_rule(**given, tap=Stages(replaced=taps.GDN_STATE))
    _, state = kernels("triton_chunk").gated_delta_rule(**given, tap=Stages(replaced=taps.GDN_STATE))
    assert relative_error(state, expected) < 2e-6
    with pytest.raises(InputError, match=r"tap gdn\.kkt: expected an observer"):
        kernels("triton_chunk").gated_delta_rule(**given, tap=Stages(replaced=taps.GDN_KKT))
