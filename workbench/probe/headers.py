"""Headers beside a library: which of them declare a function, and what they say it returns.

A C++ symbol's name holds the types of its arguments and not that of its result, which a header alone can tell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".h", ".hpp", ".hh", ".hxx", ".cuh", ".inl")
#: Headers read for one library: torch alone has 9,000, a vendor's package some dozens.
MOST = 3000
#: Words of a declaration in front of the result's type.
SPECIFIERS = re.compile(r'extern\s+"C"|\b(?:extern|static|inline|constexpr|virtual|[A-Z][A-Z0-9_]+)\b|__attribute__\s*'
                        r"\(\(.*?\)\)|\[\[.*?\]\]")  # fmt: skip
COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A function's declaration in a header: `returns` is the result's type as the demangler would write it."""

    path: Path
    line: int
    text: str
    returns: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """Headers found: their number, the folders that have them, and the declarations of the function asked for."""

    count: int
    folders: tuple[Path, ...]
    declarations: tuple[Declaration, ...]
    is_cut: bool = False
    unreadable: int = 0

    def told(self) -> str:
        """One sentence."""
        if not self.count:
            return "no header beside the library"
        where = ", ".join(map(str, self.folders[:3])) + (" and others" if len(self.folders) > 3 else "")
        more = f", only the first {MOST} read" if self.is_cut else ""
        more += f", {self.unreadable} of them cannot be read" if self.unreadable else ""
        if not self.declarations:
            return f"{self.count} headers in {where}{more}, none declares it"
        first = self.declarations[0]
        return f"{self.count} headers in {where}{more}; {first.path.name}:{first.line}: {first.text}"


def header_folders(library: Path, packages: Iterable[Path] = ()) -> list[Path]:
    """Where headers of a library may be: its package, or an include folder beside it or one up."""
    real = Path(os.path.realpath(library))
    for root in packages:
        if real.is_relative_to(root.resolve()):
            top = root.resolve() / real.relative_to(root.resolve()).parts[0]
            return [top] if top.is_dir() else []
    near = (real.parent / "include", real.parent.parent / "include")
    beside = [real.parent] if any(p.suffix in SUFFIXES for p in real.parent.iterdir()) else []
    return [folder for folder in (*near, *beside) if folder.is_dir()]


def inventory(folders: Iterable[Path], name: str) -> Inventory:
    """All headers below `folders`, and what they declare under `name`, a function's name without namespaces."""
    count, unreadable, is_cut = 0, 0, False
    having: list[Path] = []
    found: list[Declaration] = []
    for folder in dict.fromkeys(folders):
        for parent, inner, names in os.walk(folder):
            inner.sort()
            headers = [n for n in sorted(names) if n.endswith(SUFFIXES)]
            having += [Path(parent)] if headers else []
            for header in headers:
                if count == MOST:
                    is_cut = True
                    break
                count += 1
                try:
                    found += _declarations(Path(parent, header), name)
                except OSError:  # counted and told: another header may have it
                    unreadable += 1
    return Inventory(count, tuple(having), tuple(found), is_cut, unreadable)


def _declarations(path: Path, name: str) -> list[Declaration]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if name not in text:
        return []
    # Comments become spaces of the same shape, so that line numbers stay.
    text = COMMENTS.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    # The call's own text first and what stands before it second: the other way round takes a time that grows with the
    # square of a header's length.
    pattern = rf"\b{re.escape(name)}(?=\s*(\([^;{{]*\))\s*(?:noexcept\s*)?[;{{])"
    found = []
    for match in re.finditer(pattern, text):
        begin = match.start()
        while begin and (text[begin - 1].isalnum() or text[begin - 1].isspace() or text[begin - 1] in '_:<>,"&*'):
            begin -= 1
        # A declaration begins a line: what shares one with the end of something else is none.
        first_line = text.find("\n", begin, match.start()) + 1 if begin else 0
        if begin and not first_line:
            continue
        written = text[first_line : match.start()]
        returns = type_name(SPECIFIERS.sub(" ", written))
        if returns and returns.split()[-1] not in ("return", "new", "else"):
            start = first_line + len(written) - len(written.lstrip())
            line = text.count("\n", 0, start) + 1
            found.append(Declaration(path, line, " ".join(f"{written}{name}{match.group(1)}".split()), returns))
    return found


def type_name(text: str) -> str:
    """A type with the spaces, the place of const and the names that the demangler uses."""
    text = " ".join(text.replace("torch::Tensor", "at::Tensor").split())
    text = re.sub(r"^const ([\w:]+)", r"\1 const", text)
    text = {"int64_t": "long", "int32_t": "int", "long int": "long"}.get(text, text)
    return re.sub(r"\s*([*&])", r"\1", text)
