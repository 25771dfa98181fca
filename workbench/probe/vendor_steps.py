"""The part of the probe that looks into libraries: known vendors, the one named, and bridges."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import BackendError
from workbench.probe import compiler
from workbench.probe.child import Task, run_tasks, told
from workbench.probe.headers import header_folders, inventory
from workbench.probe.libraries import (
    Library,
    LibraryFault,
    Place,
    holds,
    libraries_below,
    local_functions,
    names_by_nm,
    package_folders,
    read_library,
)
from workbench.probe.steps import FAIL, PASS, SKIP, Failed, Step
from workbench.probe.symbols import Function, functions

if TYPE_CHECKING:
    from workbench.probe.bridges import Bridge
    from workbench.probe.vendors import Vendor, Wanted

#: Libraries and names that a step shows.
SHOWN = 8


class VendorSteps:
    """All steps about libraries on one machine; `registered` are the backends that bridges became, as ``op=name``."""

    def __init__(self, device: str, places: Sequence[Place], search: Sequence[Path], patience_s: float,
                 started: Callable[[str], None]):  # fmt: skip
        self.device, self.places, self.search = device, places, search
        self.patience_s, self.started = patience_s, started
        self.registered: list[str] = []
        self._read: dict[Path, Library | LibraryFault] = {}

    def probed(self, vendor: str | None, symbols: tuple[str, ...], bridges: tuple[Bridge, ...]) -> list[Step]:
        from workbench.probe.vendors import VENDORS, vendor_named

        named = None if vendor is None else vendor_named(vendor, symbols)
        steps = [self.own_bridge()]
        searched = [place for place in self.places if place.how.startswith("--search")]
        if self.search:
            steps.append(self._searched(searched, named))
        for known in [*([] if named is None else [named]), *VENDORS.values()]:
            if known.name == (named and named.name) and known is not named:
                continue
            steps += self.of_vendor(known, known is named)
        for bridge in bridges:
            candidates = searched if named is None else [*searched, *self._libraries_of(named, True)]
            steps.append(self.of_bridge(bridge, list(dict.fromkeys(candidates))))
        return steps

    def registered_bridges(self, bridges: Sequence[Bridge]) -> list[Step]:
        """Only the bridges, each in the library that it names or in what was searched."""
        searched = [place for place in self.places if place.how.startswith("--search")]
        return [self.of_bridge(bridge, searched) for bridge in bridges]

    def library(self, path: Path) -> Library | LibraryFault:
        """A library's tables, read once."""
        if path not in self._read:
            try:
                self._read[path] = read_library(path)
            except LibraryFault as fault:
                self._read[path] = fault
        return self._read[path]

    def own_bridge(self) -> Step:
        """A bridge to a function of torch itself: the same steps as for a vendor's, on a library that is there."""
        import torch

        from workbench.probe.bridges import Bridge

        bridge = Bridge(
            name="torch_mm_bridge", op="linear", symbol="at::_ops::mm_out::call",
            signature=("at::Tensor const&", "at::Tensor const&", "at::Tensor&"), arguments=("x", "weight_t", "y"),
            returns="at::Tensor&", source="ATen/ops/mm_ops.h of torch",
        )  # fmt: skip
        path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        name = "bridge to torch's mm"
        if not path.is_file():
            return Step(name=name, outcome=SKIP, found=f"no {path}: this torch keeps its functions elsewhere")
        if compiler.find_compiler() is None:
            return Step(name=name, outcome=SKIP, found=compiler.no_compiler(),
                        next_step="install g++ or clang, or name one in $CXX; bridges need it")  # fmt: skip
        return self.of_bridge(bridge, [Place(path, "torch")], name, [])

    def _searched(self, searched: Sequence[Place], named: Vendor | None) -> Step:
        """The libraries below --search: how many, which are broken, which known functions they have."""
        from workbench.probe.vendors import VENDORS

        begun = time.monotonic()
        self.started("searched libraries")
        name = f"libraries below {', '.join(map(str, self.search))}"
        if not searched:
            return Step(name=name, outcome=FAIL, found="no file named *.so or *.so.N", cause_id="no_library",
                        next_step="name the folder that has them, or the file itself")  # fmt: skip
        wanted = [w for v in ([named] if named else VENDORS.values()) for w in v.wanted]
        faults, hits = [], []
        for place in searched:
            found = self.library(place.path)
            if isinstance(found, LibraryFault):
                faults.append(found)
            else:
                hits += [f"{place.path}: {f.shown}" for w in wanted for f in self._matching(found, w.symbols)]
        seconds = time.monotonic() - begun
        if faults:
            return Step(
                name=name, outcome=FAIL, found=f"{len(faults)} of {len(searched)} cannot be used: {faults[0]}",
                cause_id=faults[0].cause_id, next_step=_repair(faults[0]), details=tuple(map(str, faults[1:SHOWN])),
                seconds=seconds,
            )  # fmt: skip
        known = f"{len(hits)} known functions" if len(hits) != 1 else "1 known function"
        return Step(name=name, outcome=PASS, found=f"{len(searched)} read, {known}", details=tuple(hits[:SHOWN]),
                    seconds=seconds)  # fmt: skip

    def _libraries_of(self, vendor: Vendor, is_named: bool) -> list[Place]:
        """Libraries whose path tells that they are the vendor's; of one that was named also what was searched."""
        roots = [str(folder) + os.sep for folder in package_folders()]
        found = []
        for place in self.places:
            path = str(place.path)
            inside = next((path.removeprefix(root) for root in roots if path.startswith(root)), path)
            is_searched = is_named and place.how.startswith("--search")
            if is_searched or any(word in f"/{inside}" for word in vendor.libraries):
                found.append(place)
        unreadable: list[str] = []
        for folder in map(Path, vendor.folders):
            if folder.is_dir():
                found += [Place(path, str(folder)) for path in libraries_below(folder, unreadable)
                          if any(word in str(path) for word in vendor.libraries)]  # fmt: skip
        return list({os.path.realpath(place.path): place for place in found}.values())

    def _matching(self, library: Library, symbols: Sequence[str]) -> list[Function]:
        """Functions that the library exports under one of the names, the wanted order first."""
        last = {symbol.rpartition("::")[2] for symbol in symbols}
        names = [s.name for s in library.symbols if s.is_defined and s.is_function and any(w in s.name for w in last)]
        found = functions(names)
        return [f for symbol in symbols for f in found if _is_named(f, symbol)]

    def of_vendor(self, vendor: Vendor, is_named: bool) -> list[Step]:
        """Libraries, Python module, and of each function symbol, binding and bridge; one SKIP where nothing is here."""
        self.started(vendor.name)
        places = self._libraries_of(vendor, is_named)
        is_there = [m for m in vendor.modules if importlib.util.find_spec(m.partition(".")[0]) is not None]
        # `vllm.corex_gdn` is no module of vllm's own: its being installed says nothing.
        is_there = [m for m in is_there if "." not in m or m.partition(".")[0] == vendor.name or places]
        if not places and not is_there:
            found = f"not here: no Python module {' or '.join(vendor.modules)}, no library named like it"
            if not is_named:
                return [Step(name=vendor.name, outcome=SKIP, found=found)]
            return [Step(name=vendor.name, outcome=FAIL, found=found, cause_id="vendor_absent",
                         next_step="name the folder of its libraries with --search, and put its Python package on "
                         "PYTHONPATH; without it name our own backends (`workbench backends`)")]  # fmt: skip
        steps, libraries = self._vendor_libraries(vendor, places)
        (module,) = run_tasks(
            [Task(name=f"{vendor.name}: Python module", function="workbench.probe.bindings:imports",
                  arguments={"modules": list(vendor.modules)}, cause_id="binding_import_fails",
                  next_step="the text is the module's own; install what it lacks, or link to its library by a bridge")],
            limit_s=self.patience_s, started=self.started,
        )  # fmt: skip
        steps.append(module)
        bindings: list[Step | None] = [None] * len(vendor.wanted)
        if module.outcome == PASS:
            bindings = list(run_tasks(
                [Task(name=f"{vendor.name} {w.binding}: Python binding", op=w.op,
                      function="workbench.probe.bindings:has_function", cause_id="binding_lacks_function",
                      arguments={"modules": list(vendor.modules), "name": w.binding},
                      next_step=f"declare a bridge to the library's own function (docs/probe.md), or {_instead(w)}")
                 for w in vendor.wanted],
                limit_s=self.patience_s, started=self.started,
            ))  # fmt: skip
        for wanted, binding in zip(vendor.wanted, bindings, strict=True):
            steps += self._function(vendor, wanted, binding, module, libraries)
        return steps

    def _vendor_libraries(self, vendor: Vendor, places: Sequence[Place]) -> tuple[list[Step], list[Library]]:
        """The steps about a vendor's files, and those that can be used."""
        name = f"{vendor.name}: libraries"
        if not places:
            return [Step(name=name, outcome=SKIP, found="none found whose path names it",
                         next_step="name their folder with --search")], []  # fmt: skip
        steps, good, details = [], [], []
        for place in places:
            found = self.library(place.path)
            if isinstance(found, LibraryFault):
                steps.append(Step(name=f"{vendor.name}: {place.path.name}", outcome=FAIL, found=str(found),
                                  cause_id=found.cause_id, next_step=_repair(found)))  # fmt: skip
                continue
            try:
                details.append(f"{place.path} ({place.how}): {_agreed(found)}")
            except LibraryFault as fault:
                steps.append(Step(name=f"{vendor.name}: {place.path.name}", outcome=FAIL, found=str(fault),
                                  cause_id=fault.cause_id, next_step=_repair(fault)))  # fmt: skip
                continue
            good.append(found)
        if good:
            steps.insert(0, Step(name=name, outcome=PASS, found=f"{len(good)} of {len(places)} can be linked against",
                                 details=tuple(details[:SHOWN])))  # fmt: skip
        return steps, good

    def _function(
        self, vendor: Vendor, wanted: Wanted, binding: Step | None, module: Step, libraries: Sequence[Library]
    ) -> list[Step]:
        """Symbol, binding and bridge of one function: one of the last two must serve."""
        name = f"{vendor.name} {wanted.binding}"
        has_binding = binding is not None and binding.outcome == PASS
        found = [(library, f) for library in libraries for f in self._matching(library, wanted.symbols)]
        symbol = self._symbol_step(name, wanted, found, libraries, has_binding)
        bridge = self._bridge_step(f"{name}: bridge", vendor, wanted, found, has_binding)
        if binding is None:
            why = "there is none" if module.outcome == SKIP else "it does not import"
            # An absent symbol is told as such; a library without any way into it is what is left to tell.
            is_fault = bridge.outcome != PASS and module.outcome == SKIP and symbol.outcome != FAIL and bool(libraries)
            binding = Step(name=f"{name}: Python binding", op=wanted.op, found=f"no Python module to ask: {why}",
                           outcome=FAIL if is_fault else SKIP, cause_id="binding_absent" if is_fault else None,
                           next_step=_instead(wanted) if is_fault else None)  # fmt: skip
        elif binding.outcome == FAIL and bridge.outcome == PASS:
            binding = replace(binding, outcome=SKIP, cause_id=None, next_step=None,
                              found=f"{binding.found}; the bridge serves in its place")  # fmt: skip
        return [symbol, binding, bridge]

    def _symbol_step(
        self, name: str, wanted: Wanted, found: Sequence[tuple[Library, Function]], libraries: Sequence[Library],
        has_binding: bool,
    ) -> Step:  # fmt: skip
        name = f"{name}: symbol"
        if not wanted.symbols:
            names = [f"{lib.path.name}: {f.shown}" for lib in libraries
                     for f in functions(s.name for s in lib.symbols if s.is_defined and s.is_function)
                     if wanted.word in f.shown]  # fmt: skip
            return Step(
                name=name, op=wanted.op, outcome=SKIP, details=tuple(names[:SHOWN]),
                found=f"the name of its C++ function is not known; {len(names)} functions with {wanted.word!r} in "
                "their names are exported",
                next_step="a bridge to one of them can be declared, docs/probe.md" if names else None,
            )  # fmt: skip
        if found:
            library, first = found[0]
            kind = "a C name" if first.arguments is None else "mangled"
            more = "" if len(found) == 1 else f", and {len(found) - 1} more of that name"
            return Step(name=name, op=wanted.op, outcome=PASS,
                        found=f"{library.path.name} exports {first.shown} ({kind}){more}",
                        details=tuple(f"{lib.path}: {f.mangled} = {f.shown}" for lib, f in found[:SHOWN]))  # fmt: skip
        near = _near(libraries, sorted({symbol.rpartition("::")[2] for symbol in wanted.symbols}))
        text = f"{' or '.join(wanted.symbols)}: exported by none of the vendor's libraries ({len(libraries)} read)"
        if has_binding or not libraries:
            why = "; its Python binding is there" if has_binding else ""
            return Step(name=name, op=wanted.op, outcome=SKIP, found=text + why, details=tuple(near[:SHOWN]))
        return Step(name=name, op=wanted.op, outcome=FAIL, found=text, details=tuple(near[:SHOWN]),
                    cause_id="symbol_absent", next_step=_instead(wanted))  # fmt: skip

    def _bridge_step(
        self, name: str, vendor: Vendor, wanted: Wanted, found: Sequence[tuple[Library, Function]], has_binding: bool
    ) -> Step:
        """A bridge by one of the vendor's declarations, where one describes what was found."""
        from workbench.probe.bridges import SUPPORTED, is_supported

        if not found:
            return Step(name=name, op=wanted.op, outcome=SKIP, found="no symbol to link to")
        declared = [b for b in vendor.bridges if any(_is_named(f, b.symbol) for _, f in found)]
        refused: list[str] = []
        for bridge in declared:
            for library, function in found:
                if _is_named(function, bridge.symbol):
                    folders = header_folders(library.path, package_folders())
                    step = self._built(name, bridge, function, library.path, folders)
                    if not isinstance(step, str):
                        # A binding that serves makes the bridge a second way; a fault of it is still a fault.
                        return step
                    refused.append(step)
        library, function = found[0]
        headers = inventory(header_folders(library.path, package_folders()), function.last_name)
        bad = [type_ for type_ in function.arguments or () if not is_supported(type_)]
        why = "no bridge is declared for it"
        if bad:
            why = f"its argument {bad[0]} cannot be bridged; a bridge takes {SUPPORTED}"
        known = "; ".join(dict.fromkeys(refused)) or f"{function.shown}: {why}"
        types = f"its types {function.signature}"
        if function.arguments is None:
            types = "its types, from the vendor's documentation,"
        next_step = (
            "write a function around it that a bridge can call, or another binding" if bad else
            f"write {types} into a TOML file, table [[bridge]] (docs/probe.md), and probe with --bridge FILE"
        )  # fmt: skip
        outcome = SKIP if has_binding else FAIL
        return Step(name=name, op=wanted.op, outcome=outcome, found=f"{known}; {headers.told()}", next_step=next_step,
                    cause_id="signature_unknown" if outcome == FAIL else None)  # fmt: skip

    def of_bridge(
        self, bridge: Bridge, places: Sequence[Place], name: str | None = None, folders: list[Path] | None = None
    ) -> Step:
        """A bridge that must work, the user's own or ours to torch, in one of `places` or the library that it names."""
        name = name or f"bridge {bridge.name}"
        self.started(name)
        if bridge.library:
            places = [Place(Path(bridge.library), "the bridge's own")]
        faults: list[LibraryFault] = []
        refused: list[str] = []
        for place in places:
            library = self.library(place.path)
            if isinstance(library, LibraryFault):
                faults.append(library)
                continue
            for function in self._matching(library, (bridge.symbol,)):
                near = header_folders(place.path, package_folders()) if folders is None else folders
                step = self._built(name, bridge, function, place.path, near)
                if not isinstance(step, str):
                    return step
                refused.append(step)
        unread = tuple(map(str, faults[:SHOWN]))
        if refused:
            return Step(name=name, op=bridge.op, outcome=FAIL, found=refused[0], details=(*refused[1:SHOWN], *unread),
                        cause_id="signature_differs",
                        next_step="correct the declaration to the signature found")  # fmt: skip
        if bridge.library and faults:
            return Step(name=name, op=bridge.op, outcome=FAIL, found=unread[0], cause_id=faults[0].cause_id,
                        next_step=_repair(faults[0]))  # fmt: skip
        where = f"none of {len(places)} searched" if places else "nothing: no library was named by --search or --vendor"
        return Step(name=name, op=bridge.op, outcome=FAIL, found=f"{bridge.symbol} is exported by {where}",
                    cause_id="symbol_absent", details=unread,
                    next_step="name the folder of the library with --search, and the function as its symbols have it "
                    "(`nm -DC FILE`)")  # fmt: skip

    def _built(
        self, name: str, bridge: Bridge, function: Function, library: Path, folders: Sequence[Path]
    ) -> Step | str:
        """Headers, compile, link, call, register, run by name; where the declaration does not fit, the reason."""
        from workbench.probe.bridges import build_bridge, refusal, register_bridge

        begun = time.monotonic()
        headers = inventory(folders, function.last_name)
        reason = refusal(bridge, function, headers.declarations)
        if reason is not None:
            return reason
        details = [f"{function.mangled} = {function.shown}, in {library}"]
        details += [headers.told()] if folders else []

        def end(outcome: str, found: str, next_step: str | None = None, cause_id: str | None = None,
                more: Sequence[str] = ()) -> Step:  # fmt: skip
            return Step(name=name, op=bridge.op, outcome=outcome, found=found, next_step=next_step, cause_id=cause_id,
                        details=(*details, *more), seconds=time.monotonic() - begun)  # fmt: skip

        command = compiler.find_compiler()
        if command is None:
            return end(FAIL, compiler.no_compiler(), "install g++ or clang, or name one in $CXX", "no_compiler")
        try:
            built = build_bridge(bridge, function, library, command)
        except compiler.BuildError as error:
            cause = "link_fails" if error.is_link else "compile_fails"
            next_step = "a library that the vendor's needs is missing beside it: put its folder on LD_LIBRARY_PATH" \
                if error.is_link else "repair the compiler, or name another in $CXX"
            return end(FAIL, str(error), next_step, cause, error.lines)
        how = "from the cache" if built.was_cached else f"compiled and linked in {built.seconds:.1f} s"
        details += [built.note] if built.note else []
        if self.device not in bridge.devices:
            return end(SKIP, f"{how}; not called: it is declared for {' and '.join(bridge.devices)}, and this is "
                       f"{self.device}", "run on the machine with the card")  # fmt: skip
        dtype = bridge.dtypes[0] if bridge.dtypes else "float32"
        (tried,) = run_tasks(
            [Task(name=name, function="workbench.probe.bridges:try_bridge", op=bridge.op, cause_id="bridge_fails",
                  arguments={"bridge": bridge.to_json(), "path": str(built.path), "library": str(library),
                             "device": self.device, "dtype": dtype},
                  next_step="hold the arguments against the vendor's header; correct the declaration")],
            limit_s=self.patience_s,
        )  # fmt: skip
        if tried.outcome != PASS:
            return replace(tried, details=(*details, *tried.details), found=f"{how}; {tried.found}",
                           seconds=time.monotonic() - begun)  # fmt: skip
        try:
            register_bridge(bridge, built.path, library)
            said = self._by_name(bridge, dtype)
        except (BackendError, Failed) as error:
            return end(FAIL, f"{how}; {tried.found}; as a backend: {told(error)}",
                       "choose another name, or correct the declaration", "bridge_fails")  # fmt: skip
        self.registered.append(f"{bridge.op}={bridge.name}")
        return end(PASS, f"{how}; {tried.found}; {said}")

    def _by_name(self, bridge: Bridge, dtype: str) -> str:
        """The op through the registry, with the bridge named: what the attestation says of it."""
        import torch

        from workbench.kernels import Kernels
        from workbench.probe.frames import FRAMES

        kernels = Kernels({bridge.op: bridge.name})
        args, named = FRAMES[bridge.op].sample(torch.device(self.device), getattr(torch, dtype))
        with torch.no_grad():
            getattr(kernels, bridge.op)(*args, **named)
        (row,) = kernels.attestation()
        return f"attested: {row.calls} call of op {row.op} by backend {row.backend}, {row.reason}"


def _is_named(function: Function, symbol: str) -> bool:
    """Whether a function is meant by a name: whole, or its end after ::."""
    return function.name == symbol or function.name.endswith(f"::{symbol}") or function.last_name == symbol


def _near(libraries: Sequence[Library], words: Sequence[str]) -> list[str]:
    """Names that hold one of the words and are not what was looked for, each with why."""
    near = []
    for library in libraries:
        for is_defined, why in ((True, ""), (False, " (wanted from another library, not in this one)")):
            names = (s.name for s in library.symbols if s.is_defined == is_defined and any(w in s.name for w in words))
            near += [f"{library.path.name}: {f.shown}{why}" for f in functions(names)]
        if holds(library.path, words):
            known = {s.name for s in library.symbols}
            try:
                own = local_functions(library.path)
            except LibraryFault as fault:
                near.append(str(fault))
                continue
            inside = (n for n in own if n not in known and any(w in n for w in words))
            near += [
                f"{library.path.name}: {f.shown} (there, and not exported: nothing can link to it)"
                for f in functions(inside)
            ]
    return near


def _agreed(library: Library) -> str:
    """What nm says to the table that was read. Raises LibraryFault where the two differ."""
    by_nm = names_by_nm(library.path)
    defined = library.defined
    if by_nm is None:
        return f"{len(defined)} symbols (nm is not installed, so not read twice)"
    if by_nm != defined:
        odd = sorted(by_nm ^ defined)
        raise LibraryFault(f"{library.path}: pyelftools finds {len(defined)} defined symbols and nm {len(by_nm)}; "
                           f"{len(odd)} differ, first {odd[0]}", "tables_disagree")  # fmt: skip
    return f"{len(defined)} symbols, nm finds the same"


def _repair(fault: LibraryFault) -> str:
    return {
        "wrong_architecture": "install the package for this machine's architecture",
        "unreadable_library": "name a file that is there and that this user may read",
        "tool_broken": "repair or remove the nm that is first on the PATH",
        "tables_disagree": "the file is damaged or packed: compare its checksum with the vendor's and copy it again",
    }.get(fault.cause_id, "copy or install the file again, and compare its checksum with the vendor's")


def _instead(wanted: Wanted) -> str:
    if wanted.op is None or wanted.instead is None:
        return "take another build of the library, or another backend for the op that needs it"
    return (
        f"replace this link alone, --backend {wanted.op}={wanted.instead}: the others of the chain can stay the "
        "vendor's"
    )
