"""The flight recorder: the last passes in memory, written to a bundle when a flag trips.

>>> with flight_recorder(model, "crash", steps=8) as recorder:
...     model.generate(input_ids, max_new_tokens=500)
>>> recorder.tripped, recorder.path       # ([(137, "layers.02.gdn.state"), ...], PosixPath("crash")) or ([], None)

Copies of the chosen tensors of the last `steps` passes, at most `cap_bytes` of them: the oldest passes go first, and of
a pass that is larger by itself what did not fit is listed. At the end of each pass one number is read back from the
flags (`tracing.flags`): the only time that the host waits. The first pass that trips is written with those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from workbench.bundle import Origin, open_bundle
from workbench.errors import InputError
from workbench.tracing.dump import KIND, Chosen, ChosenTap, TraceWriter, origin_of, tapping
from workbench.tracing.flags import Flags, FlagTap
from workbench.tracing.observer import is_stage, tap_names
from workbench.tracing.selection import Selection

if TYPE_CHECKING:
    from workbench.model import CausalLM

#: Bytes of tensors that a recorder holds unless told otherwise.
RING_BYTES = 1 << 28


@dataclass(slots=True)
class _Pass:
    step: int
    bytes: int = 0
    tensors: list[tuple[str, Tensor, tuple[int, int] | None, int]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)


class FlightRecorder:
    """`passes` held, `bytes` of them, `tripped` (pass, tap point) of the first bad pass, `path` of the bundle written
    last and `written`, what is in it; None before.

    `dump(path)` writes what is held at any time.
    """

    def __init__(self, model: CausalLM, path: Path | None, steps: int, cap_bytes: int, select: Selection,
                 flags: Flags, origin: Origin | None):  # fmt: skip
        self.model, self.cap_bytes, self.select, self.flags = model, cap_bytes, select, flags
        self._target, self._origin = path, origin
        self._ring: deque[_Pass] = deque()
        self._steps = steps
        self.bytes = 0
        self.tripped: list[tuple[int, str]] = []
        self.path: Path | None = None
        self.written: TraceWriter | None = None

    @property
    def passes(self) -> tuple[int, ...]:
        return tuple(held.step for held in self._ring)

    def keep(self, name: str, step: int, tensor: Tensor, tokens: tuple[int, int] | None, occurrence: int) -> None:
        """A copy of one tensor into the pass that runs; old passes make room."""
        self._open(step)
        now, size = self._ring[-1], tensor.numel() * tensor.element_size()
        while self.bytes + size > self.cap_bytes and len(self._ring) > 1:
            self._drop()
        if self.bytes + size > self.cap_bytes:
            now.left_out.append({
                "tap": name, "step": step, "occurrence": occurrence, "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape), "tokens": None if tokens is None else list(tokens), "bytes": size,
                "why": "cap",
            })  # fmt: skip
            return
        now.tensors.append((name, tensor.detach().clone(), tokens, occurrence))
        now.bytes += size
        self.bytes += size

    def ended(self, step: int) -> None:
        """The pass is over and its flags are in the ring: look at them once, and write at the first that trips."""
        if not self.tripped and self.flags.last_is_bad():
            self.tripped = [(step, tap) for _, tap in self.flags.tripped()]
            if self._target is not None:
                self.dump(self._target)

    def dump(self, path: str | Path) -> Path:
        """Write the passes held to the bundle `path`; returns it."""
        origin = origin_of(self.model) if self._origin is None else self._origin
        with open_bundle(path, KIND, origin) as unfinished:
            most = max((len(held.tensors) for held in self._ring), default=0)
            writer = TraceWriter(unfinished, self.cap_bytes, room=most + 8)
            for held in self._ring:
                for name, tensor, tokens, occurrence in held.tensors:
                    writer.add(name, held.step, tensor, tokens, occurrence)
                writer.left_out += held.left_out
            writer.close()
            last = self._ring[-1].step if self._ring else -1
            unfinished.content.update(writer.content(self.select, last + 1))
            unfinished.content["tripped"] = [{"step": step, "tap": tap} for step, tap in self.tripped]
            unfinished.content["backends_run"] = list(origin_of(self.model).backends)
        self.path, self.written = Path(path), writer
        return self.path

    def _open(self, step: int) -> None:
        if not self._ring or self._ring[-1].step != step:
            self._ring.append(_Pass(step))
            while len(self._ring) > self._steps:
                self._drop()

    def _drop(self) -> None:
        self.bytes -= self._ring.popleft().bytes


@contextmanager
def flight_recorder(
    model: CausalLM, path: str | Path | None = None, *, steps: int = 8, cap_bytes: int = RING_BYTES,
    select: Selection | None = None, origin: Origin | None = None,
) -> Iterator[FlightRecorder]:  # fmt: skip
    """Hold the last `steps` passes inside the context; write them to the bundle `path` when a flag trips.

    `path` None writes only what `FlightRecorder.dump` is asked for. `select` chooses what is held (all tap points but
    inner stages of ops by default), the flags see every tap point that is computed anyway. A pass that an exception
    ends is looked at too. Raises InputError for `steps` or `cap_bytes` below 1 and for a selection of nothing.
    """
    if steps < 1 or cap_bytes < 1:
        raise InputError(f"flight recorder: expected at least one step and one byte, found {steps} and {cap_bytes}")
    names = tap_names(model)
    select = select or Selection(tuple(name for name in names if not is_stage(name)))
    flags = Flags(names, steps=1, device=model.device)
    recorder = FlightRecorder(model, None if path is None else Path(path), steps, cap_bytes, select, flags, origin)
    flagged = FlagTap(flags, model.tap)
    chosen = Chosen(model, select, recorder.keep, recorder.ended)
    with tapping(model, ChosenTap(chosen, flagged)):
        try:
            yield recorder
        finally:
            if flags.has_open_step:
                flags.end_step()
                recorder.ended(chosen.step)

