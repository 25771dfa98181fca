"""`workbench.load`: a checkpoint on disk becomes a model in memory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from workbench.cards import Card, card_named
from workbench.checkpoint import expected_tensors, read_checkpoint
from workbench.errors import CheckpointError, InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.numerics import NumericsPolicy

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name; None stays None. Raises InputError for anything that weights cannot have."""
    if name is None or (isinstance(name, torch.dtype) and name in DTYPES.values()):
        return name
    if not isinstance(name, str) or name not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {str(name)!r}")
    return DTYPES[name]


def device_named(name: str | torch.device) -> torch.device:
    """A device that this machine has: cpu, cuda or cuda:N. Raises InputError for any other."""
    kind, separator, number = str(name).partition(":")
    is_cuda = kind == "cuda" and (number.isascii() and number.isdecimal() if separator else True)
    if not is_cuda and str(name) != "cpu":
        raise InputError(f"device: expected cpu, cuda or cuda:N, found {str(name)!r}")
    count = torch.cuda.device_count() if is_cuda else 0
    if is_cuda and int(number or 0) >= count:
        raise InputError(f"device {name}: expected a CUDA device of this machine, which has {count}; use cpu")
    return torch.device(name)


def load(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    backend: str | None = None,
    policy: NumericsPolicy | str | None = None,
    *,
    router_dtype: str | torch.dtype | None = None,
    strict: bool = True,
    card: Card | str | Path | None = None,
    allow_missing: str | Collection[str] = (),
    allow_unexpected: str | Collection[str] = (),
    expert_layout: str | None = None,
) -> CausalLM:
    """Read a checkpoint directory into a model in eval mode.

    dtype   None keeps what the files hold, or takes the card's; A_log and dt_bias are fp32 in any case
    device  cpu, cuda or cuda:N
    backend ``[OP=]NAME[:POLICY]``, comma separated; None chooses automatically before each call
    router_dtype
            float32, bfloat16 or float16 of router logits and softmax; None for logits in the model's dtype and a
            softmax in fp32 or better
    strict  False repeats a call of an op that failed, and may replace a backend that nobody named (`kernels.dispatch`)
    card    a card to rehearse: its profile, its name (`cards.known_cards`) or a TOML file. Passes then run under its
            limits on `device`, and `dtype` None is the card's `model_dtype`
    policy  how the gated delta rule is evaluated: NumericsPolicy, a preset's name, or a JSON file
    allow_* globs of tensor names; what may be missing is the multi-token-prediction head as a whole (``mtp.*``)
    expert_layout how the files hold experts, a name of `checkpoint.LAYOUTS`; None detects it, needed where shapes leave
            it open

    The model carries `checkpoint_accounting` (every tensor of the files, by class) and `narrowing` (per tensor: how
    many values overflowed or were flushed to zero by the cast). Raises CheckpointError, ConfigError, BackendError,
    PolicyError, InputError (dtype, device, card), each in one line; nothing is half loaded.
    """
    card = card_named(card) if isinstance(card, (str, Path)) else card
    kernels = Kernels(backend, policy, dtype_named(router_dtype), strict=strict, card=card)
    dtype = card.model_dtype if card is not None and dtype is None else dtype
    device = device_named(device)
    if not isinstance(path, (str, Path)):
        raise InputError(f"checkpoint: expected a path, found {type(path).__name__}")
    checkpoint = read_checkpoint(
        path, dtype=dtype_named(dtype), allow_missing=allow_missing, allow_unexpected=allow_unexpected,
        expert_layout=expert_layout,
    )  # fmt: skip
    missing = sorted(set(expected_tensors(checkpoint.config)) - set(checkpoint.tensors))
    if missing:
        raise CheckpointError(
            f"{path}: expected every tensor to run the model, found {len(missing)} missing, first {missing[0]}; "
            "read_checkpoint can inspect such files, only the whole of mtp.* may be missing here"
        )
    with torch.device("meta"):  # no time and no memory for weights that the files replace
        model = CausalLM(checkpoint.config, kernels)
    model.load_state_dict(checkpoint.tensors, strict=True, assign=True)
    model.checkpoint_accounting = checkpoint.accounting
    model.narrowing = checkpoint.accounting.narrowing
    return model.to(device).eval()
