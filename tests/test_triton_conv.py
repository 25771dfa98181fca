"""The convolution kernel: the contract, words of flags, strides, and packed tiles."""

import pytest
import torch
from triton_cases import triton_device  # noqa: F401 - a fixture

from workbench.kernels import conformance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_keeps_the_contract(triton_device, dtype):  # noqa: F811
    found = conformance.conform("causal_conv", "triton_conv", device=triton_device, dtypes=[dtype])
    assert found.outcome == "passed", found.reason
    assert found.counts()[conformance.FLAGS]["passed"] > 0
