"""Pages say which backends ran, why, what was refused before them, and what failed."""

import html

import pytest
import torch
from models import mini

from workbench import report
from workbench.analysis import runs
from workbench.analysis.compare import compare
from workbench.config import ModelConfig
from workbench.errors import BackendWarning
from workbench.kernels import Attestation, Kernels, registry
from workbench.kernels.registry import OPERATIONS, Operation, register_backend
from workbench.model import CausalLM
from workbench.report.comparison import comparison_view

ROW = Attestation(
    "experts", "torch_sorted", "cpu", "float32", "2 and more", 7,
    "first of the automatic order for 12 tokens on cpu that can serve", (("toy", "needs <cuda>, not cpu"),),
)  # fmt: skip


def test_a_row_says_why_and_what_was_refused():
    page = report.attested({"safe": [ROW]})._repr_html_()
    assert "first in order on cpu that can serve" in page and "toy: needs &lt;cuda&gt;, not cpu" in page
    assert "failed" not in page and ">safe<" not in page  # one run needs no name
    assert "No run says" in repr(report.attested({"safe": []}))


def test_other_engines_and_rules_of_cards_are_told():
    rows = [{"op": "model", "backend": "vllm 0.9"}, ROW.to_json() | {"routed": 7, "cast": 2}]
    page = report.attested({"a": rows, "b": [ROW]})._repr_html_()
    assert "vllm 0.9" in page and "not said" in page and "7 calls routed; 2 calls with inputs cast" in page
    assert ">a<" in page and ">b<" in page


@pytest.fixture
def lenient(monkeypatch):
    """Kernels whose first backend for experts fails always, and for linear once."""
    monkeypatch.setattr(registry, "OPERATIONS", dict(OPERATIONS))
    left = {"experts": 99, "linear": 1}

    for op in left:
        inner = OPERATIONS[op].backends["reference"].run

        def run(*args, op=op, inner=inner, **named):
            if left[op]:
                left[op] -= 1
                raise RuntimeError("no kernel image <is> available")
            return inner(*args, **named)

        register_backend(op, "toy", run, lambda call: None)
        operation = registry.OPERATIONS[op]
        registry.OPERATIONS[op] = Operation(
            op, operation.backends, lambda call, order=operation.automatic_order: ("toy", *order(call))
        )
    return Kernels(strict=False)


def test_what_failed_stands_on_the_pages_of_a_run_and_of_a_comparison(lenient):
    model = CausalLM(ModelConfig.from_hf(mini()), lenient).init_weights(3)
    ids = torch.tensor([[5, 6, 7, 8]])
    with pytest.warns(BackendWarning):
        run = runs.run_prompt(model, ids, "safe")
    plain = CausalLM(ModelConfig.from_hf(mini()), Kernels("reference")).init_weights(3)
    with pytest.warns(BackendWarning):
        model.kernels = lenient.altered()
        found = compare(None, model, plain, prompt=ids)
    for view in (report.attested({"safe": run.attestation}), comparison_view(found)):
        page = html.unescape(view._repr_html_())
        assert "took the place of toy, which failed twice at call: RuntimeError: no kernel image <is> available" in page
        assert page.index("Backends failed while they ran") < page.index("Which backends ran, and why")
        assert "no kernel image <is> available" not in view._repr_html_()
