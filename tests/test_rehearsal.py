"""A card's limits held on this machine: what raises there raises, what rounds there rounds, all of it counted."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from workbench.cards import card_named
from workbench.errors import BackendFailure
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.torch_chunk import run as chunked
from workbench.kernels.rehearsal import AbsentPrimitive, DtypeViolation, Rehearsal, prices
from workbench.loading import load
from workbench.numerics import NumericsPolicy

MINIATURE = Path(__file__).resolve().parent.parent / "data" / "miniature"
BI_V100 = card_named("bi-v100")

NARROWING = """
title = "Card that narrows"
device = "cuda"
native_matmul = ["float16"]
model_dtype = "float16"

[unknown]
capability = "of a test"
memory_bytes = "of a test"
bandwidth = "of a test"
"rates.float16" = "of a test"
"rates.bfloat16" = "of a test"
"rates.float32" = "of a test"
"rates.float64" = "of a test"

[[rules]]
op = "matmul"
library = "vendor"
dtypes = ["float32"]
outcome = "cast"
to = "float16"
why = "takes kHalf"
source = "of a test"
"""


@pytest.fixture
def narrowing(tmp_path):
    path = tmp_path / "narrow.toml"
    path.write_text(NARROWING, encoding="utf-8")
    return card_named(path)


class Witness(TorchDispatchMode):
    """A guard that shares nothing with the one under test: keeps the name of every operator that is about to run."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.add(func.name().split(".")[0].rstrip("_"))
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("workbench_test::solve", mutates_args=())
def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_triangular(a, b, upper=False)


LIBRARY = torch.library.Library("workbench_test", "DEF")
for name, kernel in (("on_cpu", "CPU"), ("anywhere", "CompositeExplicitAutograd"),
                     ("of_others", "CompositeImplicitAutograd")):  # fmt: skip
    LIBRARY.define(f"{name}(Tensor a, Tensor b) -> Tensor")
    LIBRARY.impl(name, lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), kernel)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(
    "call",
    [
        lambda a: torch.linalg.solve_triangular(a, a, upper=False),
        lambda a: torch.linalg.solve_triangular(a, a, upper=False, out=torch.empty(4, 4)),
        torch.linalg.inv,
        torch.linalg.cholesky,
        lambda a: torch.linalg.solve(a, a),
        lambda a: torch.triangular_solve(a, a),
        lambda a: torch.linalg.svd(a),
        lambda a: torch.linalg.pinv(a),
        lambda a: torch.linalg.eigh(a),
        lambda a: torch.linalg.lstsq(a, a),
        torch.linalg.lu,
        torch.linalg.eigvals,
        torch.linalg.matrix_rank,
        lambda a: torch.linalg.cond(a, 2),
        lambda a: torch.lobpcg(a, k=1, niter=1),
        lambda a: torch.vmap(lambda x: torch.linalg.solve_triangular(a, x[:, None], upper=False))(a),
        lambda a: torch.func.jacrev(lambda x: torch.linalg.solve(a, x))(a),
        lambda a: a.clone().cholesky_inverse(),
        # What others bring along, with a kernel in Python or in C++.
        lambda a: solve(a, a),
        lambda a: torch.ops.workbench_test.on_cpu(a, a),
        lambda a: torch.ops.workbench_test.anywhere(a, a),
        lambda a: torch.ops.workbench_test.of_others(a, a),
    ],
)
def test_what_the_card_lacks_raises_and_never_runs(call, mode):
    eye = torch.eye(4)
    witness = Witness()
    with mode(), witness, Rehearsal(BI_V100), pytest.raises(AbsentPrimitive, match=r"libcusolver\.so.*use ") as caught:
        call(eye)
    assert "card bi-v100" in str(caught.value) and "\n" not in str(caught.value)
    assert not witness.ran & set(BI_V100.absent_primitives)


@pytest.mark.parametrize("call", [lambda a: torch.linalg.solve(a, a), lambda a: solve(a, a), torch.linalg.lu])
def test_what_the_card_lacks_raises_with_a_gradient_and_in_its_backward_pass(call):
    eye = torch.eye(4, requires_grad=True)
    with Rehearsal(BI_V100), pytest.raises(AbsentPrimitive):
        call(eye)
    out = torch.linalg.solve(eye, eye)  # outside: its backward pass solves once more
    with Rehearsal(BI_V100), pytest.raises(AbsentPrimitive):
        out.sum().backward()


def test_an_operator_that_is_opened_gives_what_it_gave():
    a, x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)), torch.ones(2, 3, 8)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    calls = {
        "matrix_exp": lambda: torch.matrix_exp(a), "cdist": lambda: torch.cdist(a.repeat(5, 1), a.repeat(5, 1)),
        "bilinear": lambda: F.bilinear(a, a, a[None]), "encoder": lambda: layer(x),
        "activation": lambda: torch._addmm_activation(a[0], a, a),
    }  # fmt: skip
    for name, call in calls.items():
        rehearsal = Rehearsal(BI_V100)
        with torch.inference_mode():
            expected = call()
            with rehearsal:
                found = call()
        assert torch.equal(found, expected), name
        assert rehearsal.seen and all(row.outcome == "route" for row in rehearsal.seen), name


def test_the_witness_sees_what_a_run_without_rehearsal_executes():
    witness = Witness()
    with torch.inference_mode(), witness:
        torch.linalg.solve_triangular(torch.eye(4), torch.eye(4), upper=False)
    assert "aten::linalg_solve_triangular" in witness.ran


def test_the_error_names_op_place_and_remedy():
    policy = NumericsPolicy(solver="solve_triangular")
    inputs = spec.example()
    with Rehearsal(BI_V100), pytest.raises(AbsentPrimitive) as caught:
        chunked(**inputs, initial_state=None, cu_seqlens=None, policy=policy, tap=None)
    assert "called by gated_delta_rule at kernels/gated_delta_rule/torch_chunk.py:" in str(caught.value)
    assert "row_loop" in str(caught.value)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_miniature_runs_within_the_limits_of_the_card(mode):
    model = load(MINIATURE, dtype="float16")
    ids = torch.arange(150)[None]
    witness, rehearsal = Witness(), Rehearsal(BI_V100)
    with mode(), witness, rehearsal:
        out = model(ids)
        model(ids[:, :1], cache=out.cache)
    assert len(witness.ran) > 30 and not witness.ran & set(BI_V100.absent_primitives)
    rows = {(s.op, s.dtype): s for s in rehearsal.seen}
    assert rows["gated_delta_rule", "float32"].outcome == "route" and rows["gated_delta_rule", "float32"].to == "torch"
    assert rows["linear", "float16"].outcome == "run" and rows["linear", "float16"].calls > 60
    assert not any(s.overflowed for s in rehearsal.seen) and out.logits.isfinite().all()


def test_products_of_float16_are_summed_in_float32_and_rounded_once():
    torch.manual_seed(0)
    a, b = torch.randn(9, 300).half(), torch.randn(300, 7).half()
    exact = a.double() @ b.double()
    with Rehearsal(BI_V100):
        found = a @ b
    assert found.dtype == torch.float16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-11 * (1 + 1e-2)).all()
    ones = torch.ones(1, 5000).half()
    with Rehearsal(BI_V100):
        assert (ones @ ones.T).item() == 5000.0  # a sum held in float16 stops at 2048


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        lambda a, b, c: c.clone().addmm_(a, b, beta=0.5, alpha=2.0),
        lambda a, b, c: torch.mm(a, b, out=torch.empty_like(c)),
        lambda a, b, c: torch.addmm(c, a, b, out=torch.empty_like(c)),
        lambda a, b, c: torch.baddbmm(c[None], a[None], b[None])[0],
        lambda a, b, c: c[None].clone().baddbmm_(a[None], b[None])[0],
        lambda a, b, c: torch.bmm(a[None], b[None])[0],
        lambda a, b, c: torch.mv(a, b[:, 0]),
        lambda a, b, c: torch.dot(a[0], b[:, 0]),
        lambda a, b, c: F.linear(a, b.T),
        lambda a, b, c: torch.einsum("ij,jk->ik", a, b),
        lambda a, b, c: F.conv1d(a[None], torch.ones_like(a)[None, :, :3]),
    ],
)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_every_form_of_a_product_is_seen_and_rounded_once(call, mode):
    generator = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(*shape, generator=generator) for shape in ((6, 40), (40, 5), (6, 5)))
    given = [x.half() for x in (a, b, c)]
    wide = call(*(x.double() for x in given))
    rehearsal = Rehearsal(BI_V100)
    with mode(), rehearsal:
        found = call(*given)
    assert found.dtype == torch.float16
    assert ((found.double() - wide).abs() <= wide.abs() * 2**-11 + 1e-5).all()
    (row,) = rehearsal.seen
    assert (row.calls, row.outcome, row.library, row.dtype) == (1, "run", "ixformer", "float16")


def test_overflow_and_flush_of_a_product_are_counted():
    rehearsal = Rehearsal(BI_V100)
    with rehearsal:
        found = torch.tensor([[300.0], [1e-4]]).half() @ torch.tensor([[300.0, 1e-5]]).half()
    assert found[0, 0].isinf() and found[1, 1] == 0
    (row,) = rehearsal.seen
    assert (row.overflowed, row.flushed) == (1, 1)


def test_flops_are_those_that_torch_counts():
    a, b = torch.randn(3, 6, 40), torch.randn(3, 40, 5)
    x, weight = torch.randn(2, 8, 30), torch.randn(4, 8, 3)
    q = torch.randn(1, 4, 16, 8)
    with FlopCounterMode(display=False) as attention, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q)

    def work():
        torch.bmm(a, b), torch.addmm(torch.zeros(6, 5), a[0], b[0])
        F.conv1d(x, weight, padding=2, stride=2)

    rehearsal = Rehearsal(card_named("h200"))
    with FlopCounterMode(display=False) as counted:
        work()
    with rehearsal:
        work()
    assert sum(row.flops for row in rehearsal.seen) == counted.get_total_flops() > 0
    rehearsal.forget()
    with rehearsal:
        F.scaled_dot_product_attention(q, q, q)
    assert [row.flops for row in rehearsal.seen] == [attention.get_total_flops()]


def test_bfloat16_on_a_card_without_it_is_emulated_and_rounded_to_bfloat16():
    a, b = (torch.randn(8, 8).bfloat16() for _ in range(2))
    rehearsal = Rehearsal(card_named("v100"))
    with rehearsal:
        found = a @ b
    assert torch.equal(found, (a.float() @ b.float()).bfloat16())
    (row,) = rehearsal.seen
    assert (row.outcome, row.to) == ("route", "emulation in float32")


def test_a_cast_is_named_and_counted(narrowing):
    rehearsal = Rehearsal(narrowing)
    with rehearsal:
        found = torch.tensor([[1e5, 1e-9, 1.0]]) @ torch.ones(3, 2)
    assert found.dtype == torch.float32 and found.isinf().all()
    (row,) = rehearsal.seen
    assert (row.outcome, row.to, row.cast_overflowed, row.cast_flushed) == ("cast", "float16", 1, 1)
    small = Rehearsal(narrowing)
    with small:
        into = torch.zeros(2, 2)
        into.addmm_(torch.full((2, 1), 1 / 3), torch.ones(1, 2))
    assert torch.equal(into, torch.full((2, 2), 1 / 3).half().float())


def test_nothing_narrows_the_state_the_decays_or_their_sum(narrowing):
    with Rehearsal(narrowing), pytest.raises(DtypeViolation) as caught:
        chunked(**spec.example(), initial_state=None, cu_seqlens=None, policy=NumericsPolicy(), tap=None)
    text = str(caught.value)
    for part in ("gated_delta_rule", "torch_chunk.py:", "in float32", "cast it to float16", "route it to a library"):
        assert part in text


def test_a_dtype_without_arithmetic_or_rule_is_named_with_the_tensor(narrowing):
    model = load(MINIATURE)  # bfloat16
    with torch.no_grad(), Rehearsal(narrowing), pytest.raises(BackendFailure) as caught:
        model(torch.arange(9)[None])
    violation = caught.value.__cause__
    assert isinstance(violation, DtypeViolation)
    text = str(violation)
    assert text.startswith("aten::mm of linear at kernels/linear/torch_linear.py:") and "cast it to float16" in text
    assert "x [9, 128], layers.0.linear_attn.in_proj_qkv.weight [128, 776] in bfloat16" in text
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["bi-v100", "v100", "t4", "a100", "h200", "cpu"])
@pytest.mark.parametrize("product", [torch.mm, lambda a, b: torch._scaled_mm(a, b.T, torch.ones(()), torch.ones(()))])
def test_products_of_eight_bits_are_refused_as_no_profile_knows_them(name, product):
    a = torch.eye(16).to(torch.float8_e4m3fn)
    with Rehearsal(card_named(name)), pytest.raises(DtypeViolation, match=r"self \[16, 16\].* in float8_e4m3fn: card "):
        product(a, a)


@pytest.mark.parametrize("again", [False, True])
def test_entering_it_twice_counts_once(again):
    rehearsal = Rehearsal(BI_V100)
    with rehearsal, rehearsal if again else nullcontext():
        torch.ones(2, 2).half() @ torch.ones(2, 2).half()
    assert [row.calls for row in rehearsal.seen] == [1]
    torch.ones(2, 2) @ torch.ones(2, 2)  # outside: not seen
    assert [row.calls for row in rehearsal.seen] == [1]
    rehearsal.forget()
    assert not rehearsal.seen


def test_a_route_has_a_price():
    rehearsal = Rehearsal(BI_V100)
    with rehearsal:
        torch.ones(100, 100) @ torch.ones(100, 100)
    (row,) = prices(BI_V100, rehearsal.seen)
    assert row["factor"] == pytest.approx(147 / 37) and row["seconds_in_model_dtype"] == pytest.approx(2e6 / 147e12)
    assert row["seconds"] == pytest.approx(2e6 / 37e12)
