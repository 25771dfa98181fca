"""The ops of the model. Each has a contract (`spec`), an arbiter (`reference`) and backends, one file each.

`Kernels` is one user's choice of backends: the model holds one and calls its methods, whose signatures are those of
the contracts. The functions below it are the same ops for use without a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.errors import BackendError
from workbench.kernels import alignment as _alignment
from workbench.kernels import attention as _attention
from workbench.kernels import causal_conv as _causal_conv
from workbench.kernels import experts as _experts
from workbench.kernels import gated_delta_rule as _gated_delta_rule
from workbench.kernels import gdn_decode as _gdn_decode
from workbench.kernels import linear as _linear
from workbench.kernels import norms as _norms
from workbench.kernels import routing as _routing
from workbench.kernels.alignment.spec import Alignment
from workbench.kernels.dispatch import Attestation, Site, merged
from workbench.kernels.machine import Machine, rehearsed_machine
from workbench.kernels.outside import OutsideTap, outside
from workbench.kernels.registry import Call, backend_named, parse_selection
from workbench.kernels.rehearsal import Rehearsal, Seen
from workbench.kernels.workspace import Workspace
from workbench.numerics import NumericsPolicy, resolve_policy
from workbench.taps import Tap

if TYPE_CHECKING:
    from workbench.cards import Card


#: In which router logits and softmax may be asked for.
ROUTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Kernels:
    """Backends chosen per op, resolved before the call, counted.

    `requested` maps an op to the backend named by the user; `policy` goes to every gated delta rule call;
    `router_dtype` is the dtype of router logits and softmax, None for logits in the model's and softmax in fp32 or
    better; `workspace` is scratch memory for the ops that take some (`experts.spec.declare_scratch`), used where no
    gradient is recorded; `strict=False` repeats a call that failed and may replace its backend (see `dispatch`);
    `card` is the profile of a card to rehearse: backends are chosen, and calls routed and cast, as on that card. A
    named backend of the gated delta rule that computes by one policy (`Backend.policy`) has it if none is given.

    Raises BackendError, at the first call that it concerns, when a named backend refuses or no backend can serve, and
    BackendFailure when a backend fails while it runs.

    `watch`, of the methods that have it, is the observer of what the op returns: where it keeps flags, a backend that
    raises their words in its own kernels does so (`Site.flags`), and nothing reads the result once more.
    """

    def __init__(
        self, requested: Mapping[str, str] | str | None = None, policy: NumericsPolicy | str | None = None,
        router_dtype: torch.dtype | None = None, workspace: Workspace | None = None, *, strict: bool = True,
        card: Card | None = None,
    ):  # fmt: skip
        if requested is None or isinstance(requested, str):
            selection = parse_selection(requested)
            requested = selection.backends
            if selection.policy is not None:
                if policy is not None and resolve_policy(policy) != resolve_policy(selection.policy):
                    raise BackendError(
                        f"policy: the backend names {selection.policy!r} and the policy itself is another; name one"
                    )
                policy = selection.policy
        if not isinstance(requested, Mapping):
            raise BackendError(
                f"backend: expected [OP=]NAME[:POLICY] or a mapping of op to name, found {type(requested).__name__}"
            )
        self.requested = dict(requested)
        named = self.requested.get(_gated_delta_rule.spec.OP)
        if policy is None and named is not None:
            policy = backend_named(_gated_delta_rule.spec.OP, named).policy
        self.policy = resolve_policy(policy)
        if router_dtype not in (None, *ROUTER_DTYPES):
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ROUTER_DTYPES)
            raise BackendError(f"router_dtype: expected one of {names}, found {router_dtype}")
        self.router_dtype, self.workspace = router_dtype, workspace
        self.strict, self.card = strict, card
        self._machine: Machine | None = None if card is None else rehearsed_machine(card)
        self._rehearsal: Rehearsal | None = None
        self._sites: dict[tuple, Site] = {}

    def altered(self, **changes: object) -> Kernels:
        """The same choice with some of the constructor's arguments changed; counts begin anew."""
        settings: dict = {
            "requested": self.requested, "policy": self.policy, "router_dtype": self.router_dtype,
            "workspace": self.workspace, "strict": self.strict, "card": self.card,
        }  # fmt: skip
        return Kernels(**(settings | changes))

    def _backend(
        self, op: str, tokens: int, x: Tensor, *others: Tensor | None, packed: bool = False,
        weight_shape: tuple[int, ...] = (),
    ) -> Site:  # fmt: skip
        # Any input may be the only one to train: a backend without a backward pass would drop its gradient silently.
        needs_grad = torch.is_grad_enabled() and (
            x.requires_grad or any(other is not None and other.requires_grad for other in others)
        )
        key = (op, tokens, packed, needs_grad, x.dtype, x.device, weight_shape)
        site = self._sites.get(key)
        if site is None:
            device = x.device.type if self._machine is None else self._machine.device
            call = Call(
                op, device, x.dtype, tokens, packed, needs_grad, self.policy, tuple(weight_shape), self._machine,
                x.device.type,
            )  # fmt: skip
            with nullcontext() if self.card is None else outside():
                site = self._sites[key] = Site(call, self.requested.get(op), self.card, self.strict)
        return site

    def rehearsal(self) -> AbstractContextManager:
        """What a pass of a model runs in: the limits of the card's primitives (`rehearsal`); nothing without a card."""
        if self.card is None:
            return nullcontext()
        if self._rehearsal is None:
            self._rehearsal = Rehearsal(self.card)
        return self._rehearsal

    @property
    def rehearsed(self) -> list[Seen]:
        """What the passes asked of the rehearsed card so far: products by op, dtype and outcome; empty without one."""
        return [] if self._rehearsal is None else self._rehearsal.seen

    def watched_by(self, tap: Tap | None) -> Tap | None:
        """`tap` as a pass of a model is to call it: outside of the card's limits where one is rehearsed."""
        return tap if tap is None or self.card is None else OutsideTap(tap)

    @property
    def calls(self) -> list[Call]:
        """Every kind of call that was made so far, as backends were asked about it."""
        return [site.call for site in self._sites.values()]

    def attestation(self) -> list[Attestation]:
        """What ran so far, one row per op, backend, dtype, device and phase (one token, or more)."""
        return merged(row for site in self._sites.values() for row in site.attested())

    def reset_attestation(self) -> None:
        """Forget the counts (the choices stay)."""
        for site in self._sites.values():
            site.forget()

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, tap: Tap | None = None,
        watch: Tap | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `gated_delta_rule.spec`."""
        run = self._backend(
            "gated_delta_rule", q.shape[1], q, k, v, log_decay, beta, initial_state, packed=cu_seqlens is not None,
            weight_shape=(v.shape[2], q.shape[3], v.shape[3]),
        )  # fmt: skip
        return run(
            q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
            policy=self.policy, tap=tap, **run.flags(watch),
        )  # fmt: skip

    def gdn_decode(
        self, qkv: Tensor, z: Tensor, raw_beta: Tensor, raw_gate: Tensor, *, conv_weight: Tensor, A_log: Tensor,
        dt_bias: Tensor, norm_weight: Tensor, window: Tensor, state: Tensor, eps: float, slots: Tensor | None = None,
        in_place: bool = False, tap: Tap | None = None, watch: Tap | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `gdn_decode.spec`."""
        run = self._backend(
            "gdn_decode", 1, qkv, z, raw_beta, raw_gate, conv_weight, A_log, dt_bias, norm_weight, window, state,
            weight_shape=state.shape[1:],
        )  # fmt: skip
        return run(
            qkv, z, raw_beta, raw_gate, conv_weight=conv_weight, A_log=A_log, dt_bias=dt_bias, norm_weight=norm_weight,
            window=window, state=state, eps=eps, slots=slots, in_place=in_place, policy=self.policy, tap=tap,
            **run.flags(watch),
        )  # fmt: skip

    def fuses_decode(self, qkv: Tensor, state: Tensor, watch: Tap | None) -> bool:
        """Whether a layer's decode step is to be asked of `gdn_decode`, and not of the ops that it is made of.

        It is where a backend is named for it, and on a GPU where the automatic choice is one that does more than call
        those ops. A backend that is named for one of them serves it: ``reference``, which stands for all ops, too. An
        observer sees the ops, since one launch shows nothing in between; but for one that keeps flags, where the named
        backend raises those of what it computes.
        """
        named = self.requested.get(_gdn_decode.spec.OP)
        parts = {self.requested.get(part) for part in _gdn_decode.spec.PARTS}
        if named is None:
            if parts != {None} or watch is not None or self.card is not None or qkv.device.type == "cpu":
                return False
        elif named in parts:
            return False
        elif watch is None:
            return True
        site = self._backend("gdn_decode", 1, qkv, state, weight_shape=state.shape[1:])
        return site.resolution.backend.name != "torch_composed" if watch is None else bool(site.flags(watch))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `linear.spec`."""
        run = self._backend("linear", x.numel() // x.shape[-1], x, weight, weight_shape=weight.shape)
        return run(x, weight)

    def causal_conv(
        self, x: Tensor, weight: Tensor, *, window: Tensor | None = None, cu_seqlens: Tensor | None = None,
        watch: Tap | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `causal_conv.spec`."""
        packed = cu_seqlens is not None
        run = self._backend("causal_conv", x.shape[1], x, weight, window, packed=packed, weight_shape=weight.shape)
        return run(x, weight, window=window, cu_seqlens=cu_seqlens, **run.flags(watch))

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """See `norms.spec`."""
        return self._backend("rms_norm", x.shape[1], x, weight)(x, weight, eps=eps)

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, watch: Tap | None = None
    ) -> Tensor:
        """See `norms.spec`."""
        run = self._backend("gated_rms_norm", x.shape[1], x, gate, weight)
        return run(x, gate, weight, eps=eps, **run.flags(watch))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_lengths: Sequence[int] | None = None,
        cu_seqlens: Tensor | None = None, tap: Tap | None = None,
    ) -> Tensor:  # fmt: skip
        """See `attention.spec`."""
        sizes = (q.shape[2], *k.shape[2:])
        run = self._backend("attention", q.shape[1], q, k, v, packed=cu_seqlens is not None, weight_shape=sizes)
        return run(q, k, v, scale=scale, key_lengths=key_lengths, cu_seqlens=cu_seqlens, tap=tap)

    def routing(
        self, logits: Tensor, *, top_k: int, normalise: bool, watch: Tap | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `routing.spec`; the softmax is taken in `router_dtype`."""
        run = self._backend("routing", logits.shape[0], logits)
        return run(logits, top_k=top_k, normalise=normalise, dtype=self.router_dtype, **run.flags(watch))

    def alignment(self, experts: Tensor, num_experts: int, block: int = 1) -> Alignment:
        """See `alignment.spec`."""
        return self._backend("alignment", experts.shape[0], experts)(experts, num_experts=num_experts, block=block)

    def experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, watch: Tap | None = None
    ) -> Tensor:
        """See `experts.spec`; a backend that sorts its pairs asks `alignment` for it, which has its own backends."""
        run = self._backend("experts", x.shape[0], x, weights, gate_up, down, weight_shape=gate_up.shape)
        scratch = None if torch.is_grad_enabled() else self.workspace
        chain = _experts.spec.Chain(self.alignment, scratch)
        return run(x, weights, experts, gate_up, down, chain=chain, **run.flags(watch))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy | str | None = None, tap: Tap | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule by itself, inputs checked: see `gated_delta_rule.spec` for shapes and dtypes.

    `policy` a NumericsPolicy, a preset's name or a file; `backend` a name, or None for the automatic choice. Raises
    InputError for shapes, devices and boundaries that do not fit, and for a log decay above 0 or of -inf anywhere,
    which reads the values: one host sync that `Kernels.gated_delta_rule`, as models call it, does not have.
    """
    _gated_delta_rule.spec.check(
        q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    _gated_delta_rule.spec.check_gates(log_decay)
    kernels = Kernels({} if backend is None else {"gated_delta_rule": backend}, policy)
    return kernels.gated_delta_rule(
        q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, tap=tap
    )


def routing(
    logits: Tensor, *, top_k: int, normalise: bool = True, dtype: torch.dtype | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The router by itself, inputs checked: see `routing.spec` for shapes and dtypes.

    `dtype` is that of the softmax (`ROUTER_DTYPES`). Raises InputError for a `top_k` above the number of experts and
    for logits without a softmax (NaN, +inf), naming the token: host syncs that a model's own calls do not have.
    """
    _routing.spec.check(logits, top_k=top_k)
    kernels = Kernels({} if backend is None else {"routing": backend}, router_dtype=dtype)
    return kernels.routing(logits, top_k=top_k, normalise=normalise)


def experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, backend: str | None = None
) -> Tensor:
    """The routed experts by themselves, inputs checked: see `experts.spec` for shapes and dtypes.

    `backend` is ``[OP=]NAME`` of `experts` and `alignment`, None for the automatic choice. Raises InputError for
    shapes, dtypes, devices and expert numbers that do not fit: host syncs that a model's own calls do not have.
    """
    _experts.spec.check(x, weights, experts, gate_up, down)
    return Kernels(backend).experts(x, weights, experts, gate_up, down)
