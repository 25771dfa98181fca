"""What happens at a call: the chosen backend runs, is counted, and where it fails the rule below holds for every op.

A failure is an error that names op, backend and every input. Only where the user asked for it (`strict=False`,
`--lenient`) the call is repeated once, from inputs as they were; if it fails again, a backend that the user named is an
error, and one that was chosen automatically is replaced by the next of the order: warned of, counted, attested. Inputs
that may be half updated (recurrent state, convolution window, what a backend declares in `mutates`) are copied before a
lenient call and restored before it is repeated; so are tensors of torch.inference_mode(), of which torch does not tell
whether they were changed. A call that ran out of memory is not repeated here: `recovery` frees what it can and repeats
the whole step. What an observer raises is the observer's; it sees the part of a call that failed, then the whole call.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import BackendError, BackendFailure, BackendWarning, Unserved, WorkbenchError, one_line
from workbench.kernels.out_of_memory import chain_of, is_out_of_memory
from workbench.kernels.registry import Backend, Call, Resolution, operation_named, resolve
from workbench.kernels.requirements import dtype_name
from workbench.numerics import PRESETS, NumericsPolicy

if TYPE_CHECKING:
    from workbench.cards import Card
    from workbench.taps import Ranges, Tap

#: Inputs that carry state from call to call, by op: a backend that breaks off may leave them half updated.
STATE_INPUTS = {
    "gated_delta_rule": ("initial_state",), "causal_conv": ("window",), "gdn_decode": ("window", "state"),
}  # fmt: skip

#: Between the reasons of calls that share a row of the attestation.
ALSO = "; also "

#: Ways through a backend's kernels that one row of the attestation tells in words; JSON has all.
PATHS_SHOWN = 4

#: Inputs that no card's cast narrows: rounding them is raised to a power by exp, or adds up over the sequence.
KEPT_WIDE = frozenset({"log_decay", "initial_state", "A_log", "dt_bias", "state"})


@dataclass(frozen=True, slots=True)
class Attestation:
    """Which backend served an op, how often, why it was chosen, and what was refused before it.

    `retries` calls were repeated after a failure; `replaced` are backends that another took the place of, with their
    errors; `routed` calls were sent to another library, `cast` calls had inputs cast, by a rule of the card. `paths`
    are the ways through its kernels that the backend took (`Backend.path`), with the number of calls; empty where it
    has one way.
    """

    op: str
    backend: str
    device: str
    dtype: str
    tokens: str
    calls: int
    reason: str
    refused: tuple[tuple[str, str], ...]
    retries: int = 0
    replaced: tuple[tuple[str, str], ...] = ()
    routed: int = 0
    cast: int = 0
    paths: tuple[tuple[str, int], ...] = ()

    def in_words(self) -> str:
        """``linear=torch_onednn in float32, 40 calls of 2 and more tokens: named by the user; refused: ...``."""
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        counts = {"repeated after a failure": self.retries, "routed": self.routed, "with inputs cast": self.cast}
        shown = [f"{path} ({count} of them)" if len(self.paths) > 1 else path for path, count in self.paths]
        more = [f"{len(shown) - PATHS_SHOWN} more ways"] if len(shown) > PATHS_SHOWN else []
        parts = [
            *shown[:PATHS_SHOWN],
            *more,
            self.reason,
            *(f"refused: {name}: {why}" for name, why in self.refused if (name, why) not in self.replaced),
            *(f"took the place of {name}, which {error}" for name, error in self.replaced),
            *(f"{count} {what}" for what, count in counts.items() if count),
        ]
        tokens = f"{self.tokens} token{'' if self.tokens == '1' else 's'}"
        return one_line(f"{self.op}={self.backend} in {self.dtype}, {calls} of {tokens}: {'; '.join(parts)}")

    def to_json(self) -> dict[str, object]:
        """Plain JSON values; what did not happen is left out."""
        row: dict[str, object] = {
            "op": self.op, "backend": self.backend, "device": self.device, "dtype": self.dtype, "tokens": self.tokens,
            "calls": self.calls, "reason": self.reason, "refused": [list(pair) for pair in self.refused],
        }  # fmt: skip
        rare = {"retries": self.retries, "replaced": [list(pair) for pair in self.replaced], "routed": self.routed,
                "cast": self.cast, "paths": [list(pair) for pair in self.paths]}  # fmt: skip
        return row | {name: value for name, value in rare.items() if value}


class Site:
    """One kind of call of one op: the backend that serves it, and what came of it. Called with the op's arguments."""

    __slots__ = (
        "call", "calls", "card", "failed", "is_named", "past", "path", "paths", "resolution", "retries", "run",
        "strict",
    )  # fmt: skip

    def __init__(self, call: Call, requested: str | None, card: Card | None, strict: bool):
        self.call, self.card, self.strict = call, card, strict
        self.is_named = requested is not None
        self.calls = self.retries = 0
        self.failed: dict[str, str] = {}
        self.paths: dict[str, int] = {}
        self.past: list[Attestation] = []  # of backends that were replaced
        self._take(resolve(call, requested, card))

    def _take(self, resolution: Resolution) -> None:
        self.resolution, self.path = resolution, resolution.backend.path
        cast = resolution.cast
        self.run = resolution.backend.run if cast is None else _casting(resolution.backend, self.call.dtype, cast)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        of_observer: Sequence[Exception] = ()
        if named and named.get("tap") is not None and not torch.compiler.is_compiling():
            of_observer = []
            named["tap"] = _HeardTap(named["tap"], of_observer)
        if not self.strict:
            return self._lenient(args, named, of_observer)
        try:
            found = self.run(*args, **named)
            if self.path is not None:
                self._note_path(args, named)
            return found
        except Exception as error:
            self._raise_unless_of_backend(error, of_observer)
            raise self._failure(error, args, named) from error

    def _note_path(self, args: tuple, named: dict[str, Any]) -> None:
        path = self.path(*args, **named)
        self.paths[path] = self.paths.get(path, 0) + 1

    def flags(self, watch: Tap | None) -> dict[str, Tensor]:
        """The argument ``flags`` for a backend that raises the words of `watch` itself; empty for every other.

        `watch` is an observer; one that keeps flags has ``flag_rows(names)``, the words of neighbouring points or None,
        and takes those that it gives away as written. A lenient call has none: what breaks off may leave some raised.
        """
        names = self.resolution.backend.flags
        rows = getattr(watch, "flag_rows", None) if names and self.strict else None
        words = None if rows is None else rows(names)
        return {} if words is None else {"flags": words}

    def _raise_unless_of_backend(self, error: Exception, of_observer: Sequence[Exception]) -> None:
        """Pass on what is no failure of this backend: of an observer, of an op inside this one, unusable input."""
        for link in chain_of(error, with_context=False):
            if any(link is raised for raised in of_observer):
                raise link
        is_of_backend = isinstance(error, BackendError) and not isinstance(error, BackendFailure | Unserved)
        if isinstance(error, WorkbenchError) and not is_of_backend:
            raise error

    def _lenient(self, args: tuple, named: dict[str, Any], of_observer: Sequence[Exception]) -> Any:
        kept = _Kept(self, args, named)
        repeated = False
        while True:
            resolution = self.resolution
            try:
                found = self.run(*args, **named)
                if self.path is not None:
                    self._note_path(args, named)
                return found
            except Exception as error:  # whatever it is, it is told: repeated, replaced or raised
                self._raise_unless_of_backend(error, of_observer)
                kept.restore(error)
                if is_out_of_memory(error):  # nothing is freed in between, and another backend needs memory as well
                    raise self._failure(error, args, named) from error
                if repeated and self.is_named:
                    raise self._failure(error, args, named, again=True) from error
                if not repeated:
                    self._say(f"failed and is tried once more from restored inputs: {_said(error)}")
                    self.retries += 1
                elif resolution is self.resolution:  # else another thread has replaced it meanwhile
                    self._replace(error, args, named)
            repeated = not repeated
            if not repeated:
                kept = _Kept(self, args, named)  # the next backend may write to other inputs

    def _replace(self, error: Exception, args: tuple, named: dict[str, Any]) -> None:
        """Take the next backend of the automatic order; an error where there is none."""
        gone = self.resolution.backend.name
        self.failed[gone] = f"failed twice at call: {_said(error)}"
        try:
            chosen = resolve(self.call, None, self.card, self.failed)
        except Unserved as none_left:
            raise self._failure(error, args, named, f"; {none_left}", again=True) from error
        self._say(f"failed twice and is replaced by {chosen.backend.name} from here on: {_said(error)}")
        self.calls -= 1
        if self.calls:
            self.past.append(self._row())
            self.retries, self.paths = 0, {}
        self.calls = 1  # a retry of the only call is told with who served it
        self._take(chosen)

    def _say(self, what: str) -> None:
        text = one_line(f"op {self.call.op}: backend {self.resolution.backend.name} {what}")
        warnings.warn(text, BackendWarning, stacklevel=6)

    def _failure(
        self, error: Exception, args: tuple, named: dict[str, Any], more: str = "", again: bool = False,
    ) -> BackendFailure:
        op, name = self.call.op, self.resolution.backend.name
        late = (
            " CUDA tells of errors late: repeat with CUDA_LAUNCH_BLOCKING=1 to be sure of the op;"
            if self.call.tensor_device == "cuda" else ""
        )  # fmt: skip
        inputs = _by_name(self.resolution.backend, args, named)
        given = "; ".join(_shown(key, value) for key, value in inputs.items() if key not in ("tap", "chain"))
        again = "a second time " if again else ""
        text = (
            f"op {op}: backend {name} failed {again}at call: {_said(error)}{more}; given {given};{late} next: name "
            f"another with --backend {op}=NAME (`workbench backends --op {op}` lists them), or hold this one to its "
            f"contract with `workbench conformance {op} --backend {name}`"
        )
        return BackendFailure(text, op, name)

    def attested(self) -> list[Attestation]:
        """What ran here since the last `forget`, a row for each backend that served."""
        return self.past + ([self._row()] if self.calls else [])

    def forget(self) -> None:
        """Forget the counts; the choice stays."""
        self.past, self.calls, self.retries, self.paths = [], 0, 0, {}

    def _row(self) -> Attestation:
        resolution, call = self.resolution, self.call
        replaced = tuple((name, why) for name, why in self.failed.items() if name != resolution.backend.name)
        return Attestation(
            call.op, resolution.backend.name, call.tensor_device, dtype_name(call.dtype),
            "1" if call.tokens == 1 else "2 and more", self.calls, resolution.reason, resolution.refused, self.retries,
            replaced, self.calls if resolution.routed else 0, self.calls if resolution.cast else 0,
            tuple(self.paths.items()),
        )  # fmt: skip


def merged(rows: Iterable[Attestation]) -> list[Attestation]:
    """One row per op, backend, device, dtype and phase: counts added, every reason and refusal kept once.

    Reasons that differ by numbers alone (of tokens, of a limit) are one, told with those of the first call.
    """
    groups: dict[tuple, Attestation] = {}
    for row in rows:
        key = (row.op, row.backend, row.device, row.dtype, row.tokens)
        before = groups.get(key)
        if before is not None:
            reasons = _distinct([*before.reason.split(ALSO), *row.reason.split(ALSO)])
            row = Attestation(
                *key, before.calls + row.calls, ALSO.join(reasons), _distinct(before.refused + row.refused),
                before.retries + row.retries,
                tuple(dict.fromkeys(before.replaced + row.replaced)), before.routed + row.routed,
                before.cast + row.cast, _counted(before.paths + row.paths),
            )  # fmt: skip
        groups[key] = row
    return [groups[key] for key in sorted(groups)]


def _distinct(texts: Iterable[Any]) -> tuple:
    """Texts, or pairs of them, without those that another one differs from by its numbers alone; the first stays."""
    found: dict[str, Any] = {}
    for text in texts:
        found.setdefault(re.sub(r"\d+", "#", str(text)), text)
    return tuple(found.values())


def _counted(pairs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for text, count in pairs:
        counts[text] = counts.get(text, 0) + count
    return tuple(counts.items())


class _Kept:
    """What a lenient call may have to restore, and a watch over what it must not change."""

    def __init__(self, site: Site, args: tuple, named: dict[str, Any]):
        backend = site.resolution.backend
        self.site = site
        inputs = _by_name(backend, args, named)
        wanted = {*STATE_INPUTS.get(site.call.op, ()), *backend.mutates}
        tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
        # Tensors of torch.inference_mode() have no version by which a change would show.
        is_copied = {key: key in wanted or value.is_inference() for key, value in tensors.items()}
        self.copies = [(value, value.detach().clone()) for key, value in tensors.items() if is_copied[key]]
        self.versions = {key: (value, value._version) for key, value in tensors.items() if not is_copied[key]}

    def restore(self, error: Exception) -> None:
        """Put the copies back. Raises BackendFailure where an input was changed that nobody said would be."""
        for key, (tensor, version) in self.versions.items():
            if tensor._version != version:
                op, name = self.site.call.op, self.site.resolution.backend.name
                raise BackendFailure(
                    f"op {op}: backend {name} failed at call, {_said(error)}, after it changed its input {key} in "
                    f"place, which it does not declare in `mutates`: the call cannot be repeated; declare it", op, name,
                ) from error  # fmt: skip
        for tensor, copy in self.copies:
            _put_back(tensor, copy)


def _put_back(tensor: Tensor, copy: Tensor) -> None:
    """Write a copy of a tensor into its memory, as if nothing had been written there."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:  # expanded: one place in memory for all of the axis
            tensor, copy = tensor.narrow(axis, 0, 1), copy.narrow(axis, 0, 1)
    # Not through the tensor itself: an unchanged value that a backward pass needs would count as changed.
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.data.copy_(copy)


class _HeardTap:
    """The observer `tap`; what it raises is kept in `raised`, so that nobody blames the backend that called it."""

    def __init__(self, tap: Tap, raised: list[Exception]):
        self._tap, self._raised = tap, raised

    def __getattr__(self, name: str) -> object:
        return getattr(self._tap, name)  # what an observer says of itself: `sees_inside`, `takes_parts`

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        try:
            return self._tap(name, tensor)
        except Exception as error:
            self._raised.append(error)
            raise

    def see_ranges(self, name: str, ranges: Ranges) -> None:
        try:
            self._tap.see_ranges(name, ranges)
        except Exception as error:
            self._raised.append(error)
            raise

    def scope(self, prefix: str) -> _HeardTap | None:
        scoped = self._tap.scope(prefix)
        return None if scoped is None else _HeardTap(scoped, self._raised)


def _casting(backend: Backend, wide: torch.dtype, narrow: torch.dtype) -> Callable[..., Any]:
    """The op with its inputs of dtype `wide` as `narrow`, but those that are kept wide, and its results as `wide`."""

    def narrowed(key: str, value: Any) -> Any:
        is_given = isinstance(value, Tensor) and value.dtype == wide and key not in KEPT_WIDE
        return value.to(narrow) if is_given else value

    def cast(*args: Any, **named: Any) -> Any:
        names = _by_name(backend, args, {})
        found = backend.run(
            *(narrowed(key, value) for key, value in names.items()),
            **{key: narrowed(key, value) for key, value in named.items()},
        )
        parts = found if isinstance(found, tuple) else (found,)
        widened = tuple(x.to(wide) if isinstance(x, Tensor) and x.dtype == narrow else x for x in parts)
        return widened if isinstance(found, tuple) else widened[0]

    return cast


def _by_name(backend: Backend, args: tuple, named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments under the names of the op's contract, which its arbiter has."""
    contract = operation_named(backend.op).backends.get("reference", backend)
    names = [
        name for name, parameter in inspect.signature(contract.run).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    names += [f"argument {i}" for i in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(named)


def _said(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}") if str(error) else type(error).__name__


def _shown(name: str, value: Any) -> str:
    if isinstance(value, NumericsPolicy):
        return f"{name} {next((key for key, known in PRESETS.items() if known == value), 'of its own')}"
    if not isinstance(value, Tensor):
        simple = isinstance(value, str | int | float | bool | tuple | list | None)
        return f"{name} {value!r}" if simple else f"{name} a {type(value).__name__}"
    return f"{name} {list(value.shape)} {dtype_name(value.dtype)} on {value.device} strides {list(value.stride())}"
