"""The recurrent state over a long input."""

import pytest
import torch

from workbench.analysis import drift
from workbench.errors import InputError
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.reference import oracle


def kept(layer: int, **options) -> dict:
    inputs = spec.example(tokens=50, **options)
    return {f"layers.{layer:02d}.gdn.{name}": x for name, x in inputs.items()}


def test_the_state_is_that_of_the_repeated_input():
    tensors = kept(2, log_decay=-0.01, seed=1)
    table = drift.state_drift(tensors, 2, [("safe", "float32")], tokens=300, piece=100)
    assert table["tokens"].tolist() == [100, 200, 300]
    inputs = {name.rsplit(".", 1)[1]: x.repeat(1, 6, *[1] * (x.dim() - 2)) for name, x in tensors.items()}
    norm = torch.linalg.vector_norm(oracle(**inputs)[1]).item()
    assert table["norm"].iloc[-1] == pytest.approx(norm, rel=1e-5) and (table["error"] < 1e-6).all()


def test_what_binds_or_rounds_is_further_off():
    tensors = kept(2, log_decay=-1.0, seed=2)
    table = drift.state_drift(tensors, 2, drift.SETTINGS, tokens=512, piece=256).groupby("setting")["error"].max()
    assert table["safe, float32"] < 1e-6 < table["safe, bfloat16"] < table["clamp_cumsum_20, float32"]
    assert table["safe, float32"] < table["safe, float16"] < table["safe, bfloat16"]  # 11 bits against 8


def test_the_layer_with_the_longest_memory_is_found():
    tensors = kept(1, log_decay=-2.0) | kept(4, log_decay=-0.01) | kept(6, log_decay=-0.5)
    assert drift.longest_memory(tensors) == 4
    with pytest.raises(InputError, match=r"layer 3: expected one of \[1, 4, 6\]"):
        drift.state_drift(tensors, 3)
    with pytest.raises(InputError, match="expected at least 1, found 0"):
        drift.state_drift(tensors, 4, tokens=0)
