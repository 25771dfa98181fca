"""Bundles: what was written comes back, and what is unfinished, damaged or of another kind is refused in one line."""

import json

import pytest
import torch

from workbench import bundle
from workbench.bundle import Origin, read_bundle, write_bundle
from workbench.errors import InputError

ORIGIN = Origin(model_hash="sha256:00", backends=({"op": "routing", "backend": "x"},), policy={"chunk": 64},
                versions={"torch": "1"}, card="a card", seed=3)  # fmt: skip
TENSORS = {
    "a.safetensors": {"one": torch.arange(6.0).reshape(2, 3).bfloat16(), "view": torch.arange(8)[::2]},
    "b.safetensors": {"flags": torch.tensor([True, False])},
}


@pytest.fixture
def folder(tmp_path):
    write_bundle(tmp_path / "run", "trace", TENSORS, ORIGIN, content={"tokens": 5})
    return tmp_path / "run"


def edit(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_tensors_and_manifest_come_back(folder):
    found = read_bundle(folder, "trace")
    assert (found.origin, found.content, found.kind) == (ORIGIN, {"tokens": 5}, "trace")
    for file, group in TENSORS.items():
        assert found.tensors[file].keys() == group.keys()
        for name, tensor in group.items():
            assert found.tensors[file][name].dtype == tensor.dtype
            assert torch.equal(found.tensors[file][name], tensor)
    manifest = json.loads((folder / "manifest.json").read_text())
    expected = {"format": "workbench-bundle", "version": 1, "model_hash": "sha256:00", "card": "a card", "seed": 3,
                "complete": True}  # fmt: skip
    assert manifest.items() >= expected.items()
    assert sorted(file.name for file in folder.iterdir()) == ["a.safetensors", "b.safetensors", "manifest.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "expected format 'workbench-bundle', found 'other'"),
        ({"version": 2}, "expected version 1, found 2; read it with the workbench that wrote it"),
        ({"complete": False}, "expected complete true, found False"),
        ({"kind": "routing"}, "expected one of kind 'trace', found 'routing'"),
        ({"content": []}, r"content: expected dict, found \[\]"),
        ({"backends": 7}, "backends: expected a list of objects or null, found 7"),
        ({"backends": [1]}, r"backends: expected a list of objects or null, found \[1\]"),
        ({"policy": 5}, "policy: expected an object or null, found 5"),
        ({"versions": 3}, "versions: expected an object of texts or null, found 3"),
        ({"versions": {"torch": 2}}, "versions: expected an object of texts or null"),
        ({"model_hash": 1}, "model_hash: expected text or null, found 1"),
        ({"card": {}}, "card: expected text or null"),
        ({"seed": "3"}, "seed: expected a whole number or null, found '3'"),
        ({"seed": True}, "seed: expected a whole number or null, found True"),
        ({"kind": 1}, "kind: expected str, found 1"),
        ({"files": 1}, "files: expected dict, found 1"),
        ({"files": {"../a.safetensors": {"bytes": 1, "sha256": ""}}}, r"files: expected NAME.safetensors .*'\.\./a"),
        ({"files": {"a.safetensors": {"bytes": "1", "sha256": ""}}}, "files: expected NAME.safetensors"),
        ({"files": {"c.safetensors": {"bytes": 1, "sha256": ""}}}, "expected the file c.safetensors"),
    ],
)
def test_another_manifest_is_refused(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(InputError, match=message) as caught:
        read_bundle(folder, "trace")
    assert "\n" not in str(caught.value)


def test_unfinished_and_damaged_bundles_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match=r"expected a directory with manifest.json, found nothing there"):
        read_bundle(tmp_path / "none", "trace")
    with pytest.raises(InputError, match=r"found a file$"):
        read_bundle(folder / "manifest.json", "trace")
    file = folder / "a.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(InputError, match=f"a.safetensors: expected the {len(content)} bytes .* {len(content) - 1}; "):
        read_bundle(folder, "trace")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="found others; the file was changed or cut"):
        read_bundle(folder, "trace")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest.json: expected JSON"):
        read_bundle(folder, "trace")
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="no bundle, or one that was never finished"):
        read_bundle(folder, "trace")


def test_a_crash_before_the_manifest_leaves_what_was_there(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "save_file", full)
    with pytest.raises(InputError, match=r"cannot be written: .*No space left"):
        write_bundle(folder, "trace", {"c.safetensors": {}}, Origin())
    assert read_bundle(folder, "trace").origin == ORIGIN
    assert len(list(folder.iterdir())) == 3  # nothing of the attempt is left


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_crash_between_renames_is_an_unfinished_bundle_that_can_be_written_anew(folder, monkeypatch, renames):
    done = []

    def replace(source, target, real=bundle.os.replace):
        if len(done) == renames:
            raise OSError(5, "Input/output error")
        done.append(real(source, target))

    monkeypatch.setattr(bundle.os, "replace", replace)
    with pytest.raises(InputError, match="cannot be written"):
        write_bundle(folder, "trace", TENSORS, Origin())
    with pytest.raises(InputError, match="never finished"):
        read_bundle(folder, "trace")
    monkeypatch.undo()
    write_bundle(folder, "trace", TENSORS, ORIGIN)
    assert read_bundle(folder, "trace").origin == ORIGIN


def test_a_bundle_replaces_one_of_its_kind_and_nothing_else(folder, tmp_path):
    write_bundle(folder, "trace", {"b.safetensors": {"x": torch.zeros(1)}}, Origin())
    assert list(read_bundle(folder, "trace").tensors) == ["b.safetensors"]
    assert not (folder / "a.safetensors").exists()
    with pytest.raises(InputError, match=r"expected a new directory or a bundle of kind 'routing', found .* 'trace'"):
        write_bundle(folder, "routing", TENSORS, ORIGIN)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"found 'config.json' in it; choose another"):
        write_bundle(tmp_path / "work", "trace", TENSORS, ORIGIN)
    with pytest.raises(InputError, match="expected a directory or nothing, found a file"):
        write_bundle(tmp_path / "work" / "config.json", "trace", TENSORS, ORIGIN)
    with pytest.raises(InputError, match=r"expected names of files that end in .safetensors, found '../x.safeten"):
        write_bundle(tmp_path / "new", "trace", {"../x.safetensors": {}}, ORIGIN)
    assert not (tmp_path / "new").exists()
