"""The vendor's matrix product of ixformer, `matmul`: float16 alone.

    y = matmul(input, other, out, transa, transb, alpha, beta)

With another dtype its C code prints ``matmul.cu:149 'Expected input.dtype() == kHalf'`` on stderr: refused before the
call, and read from stderr after it. Where it has no ``transb`` the weight is transposed by a copy at each call. Names
are those of the field notes and of the vendor's 3.2.3 images; not seen on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, Ordered, foreign
from workbench.kernels.vendor_errors import native_stderr

PRODUCT = "ixformer:matmul"
REQUIRES = Requires(devices=("cuda",), dtypes=(torch.float16,), symbols=(PRODUCT,))

_FACTORS = (Given("input", ("a", "x", "mat1")), Given("other", ("b", "weight", "mat2")))
FORMS = {PRODUCT: ((*_FACTORS, Given("transb", ("trans_b",))), Ordered(_FACTORS))}


def supports(call: Call) -> str | None:
    return "has no backward pass" if call.needs_grad else None


def run(x: Tensor, weight: Tensor) -> Tensor:
    """See `spec`."""
    product = foreign(PRODUCT, FORMS[PRODUCT])
    is_transposed = product.places("transb")
    rows = row_major(x.reshape(-1, x.shape[-1]))
    with native_stderr(PRODUCT):
        y = product(input=rows, other=row_major(weight if is_transposed else weight.T), transb=True)
    return y.reshape(*x.shape[:-1], weight.shape[0])
