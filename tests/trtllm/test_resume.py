"""``build --resume`` and the files that are the operator's to change. The engine stages are left out: they are tested elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from dspine_export.bundle import Bundle, EngineEntry, inventory, open_bundle, write_manifest
from dspine_export.errors import UsageError, VerificationError
from dspine_export.pipeline import build
from dspine_export.pipeline.progress import Silent
from dspine_export.recipes import Profile, apply_overrides

CONFIG, MODEL = "trtllm/config.yaml", "trtllm/triton/tensorrt_llm/1/model.yaml"


class Heard(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture
def bundle(shared_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A private copy that claims to have graphs."""
    out = shutil.copytree(shared_bundle.path, tmp_path / "out", ignore=shutil.ignore_patterns("__pycache__"))
    (out / "onnx").mkdir()
    (out / "onnx/draft.onnx").write_bytes(b"graph")
    write_manifest(out, shared_bundle.manifest.model_copy(update={"files": inventory(out)}))
    monkeypatch.setattr(build, "check_engine", lambda *_: None)
    monkeypatch.setattr(build, "_engines", lambda *_: [])
    resume(open_bundle(out))  # the copy lies elsewhere: its config.yaml names it from now on
    return open_bundle(out)


def resume(bundle: Bundle, *assignments: str, **options: str) -> list[str]:
    heard = Heard()
    build.resume(bundle.path, apply_overrides(bundle.manifest.recipe, assignments, **options), None, heard)  # type: ignore[arg-type]
    return heard.warnings


def edit(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path.read_text()


def test_unedited_files_are_written_anew(bundle: Bundle) -> None:
    assert resume(bundle, "profile.batch={min: 1, opt: 1, max: 2}") == []
    assert yaml.safe_load(bundle.file(CONFIG).read_text())["max_batch_size"] == 2
    assert yaml.safe_load(bundle.file(MODEL).read_text())["max_batch_size"] == 2


def test_edited_configuration_is_kept_and_named(bundle: Bundle) -> None:
    """Through any number of resumed builds: what was generated stays on record, not what was edited."""
    text = edit(bundle.file(CONFIG), "max_batch_size: 4", "max_batch_size: 64")
    for batch in (3, 2):
        (warning,) = resume(bundle, f"profile.batch={{min: 1, opt: 1, max: {batch}}}")
        assert f"kept {CONFIG}" in warning
        assert f"max_batch_size 64 (generated: {batch})" in warning
        assert bundle.file(CONFIG).read_text() == text
        assert yaml.safe_load(bundle.file(MODEL).read_text())["max_batch_size"] == batch
    open_bundle(bundle.path, check_hashes=True)


def test_edit_of_the_same_length_is_kept(bundle: Bundle) -> None:
    text = edit(bundle.file(CONFIG), "max_seq_len: 96", "max_seq_len: 64")
    for _ in range(2):
        assert "max_seq_len 64 (generated: 96)" in resume(bundle)[0]
        assert bundle.file(CONFIG).read_text() == text


def test_edited_model_yaml_gives_the_target(bundle: Bundle) -> None:
    document = yaml.safe_load(bundle.file(MODEL).read_text())
    edit(bundle.file(MODEL), document["model"], "/models/other")
    assert resume(bundle) != []
    assert "trtllm-serve /models/other" in bundle.file(CONFIG).read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- [", "not readable YAML"),
        (b"\xff\xfe", "not readable YAML"),
        (b"7\n", "7 (generated: absent)"),
        (b"", "None"),
        (b"[" * 5000, "not readable YAML"),
        (b"max_seq_len: 2026-13-99", "not readable YAML"),
        (
            b"a0: &a0 {x: 1}\n"
            + b"".join(b"a%d: &a%d {x: *a%d, y: *a%d}\n" % (i, i, i - 1, i - 1) for i in range(1, 60)),
            "aliases",
        ),
    ],
)
def test_broken_configuration_is_kept_too(bundle: Bundle, content: bytes, said: str) -> None:
    bundle.file(CONFIG).write_bytes(content)
    (warning,) = resume(bundle)
    assert said in warning
    assert bundle.file(CONFIG).read_bytes() == content


def test_unreadable_model_yaml_is_refused_before_anything_is_built(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's place comes from it."""
    monkeypatch.setattr(build, "check_engine", lambda *_: pytest.fail("too late"))
    for content in (
        b"a: [",
        b"\xff\xfe",
        b"7\n",
        b"backend: pytorch\n",
        b"model: &a [*a]",
        b"[" * 5000,
        b"a: 2026-13-99",
    ):
        bundle.file(MODEL).write_bytes(content)
        with pytest.raises(UsageError, match=r"(?s)model\.yaml cannot be read.*delete it and resume") as raised:
            resume(bundle)
        assert f"where: {bundle.file(MODEL)}" in str(raised.value)
        assert bundle.file(MODEL).read_bytes() == content


def test_comment_is_an_edit(bundle: Bundle) -> None:
    edit(bundle.file(CONFIG), "# ", "# mine: ")
    assert "comments only" in resume(bundle)[0]


def test_deleted_configuration_is_written_anew(bundle: Bundle) -> None:
    text = bundle.file(CONFIG).read_text()
    edit(bundle.file(CONFIG), "max_batch_size: 4", "max_batch_size: 64")
    bundle.file(CONFIG).unlink()
    open_bundle(bundle.path, check_hashes=True)
    assert resume(bundle) == []
    assert bundle.file(CONFIG).read_text() == text


def test_generated_package_is_not_the_operators(bundle: Bundle) -> None:
    edit(bundle.file("trtllm/dspine_trtllm/__init__.py"), '"torch"', '"torch" ')
    with pytest.raises(VerificationError, match=r"dspine_trtllm/__init__\.py"):
        resume(bundle)


def test_damaged_engines_do_not_stand_in_the_way(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that every plan's refusal names repairs it; another damaged engine is left out, an intact one kept."""
    engines = tuple(make_engine(bundle, name) for name in ("here", "other", "intact"))
    write_manifest(
        bundle.path, bundle.manifest.model_copy(update={"engines": engines, "files": inventory(bundle.path)})
    )
    bundle.file("engines/here/draft.plan").write_bytes(b"cut")
    bundle.file("engines/other/draft.plan").unlink()
    with pytest.raises(VerificationError, match=r"here/draft\.plan"):
        open_bundle(bundle.path)
    monkeypatch.setattr(
        build,
        "_engines",
        lambda recipe, library, staging, stages: [make_engine(Bundle(staging, bundle.manifest), "here")],
    )
    (warning,) = resume(bundle)
    assert "left out engines/other" in warning
    repaired = open_bundle(bundle.path, check_hashes=True)
    assert [engine.id for engine in repaired.manifest.engines] == ["engines/intact", "engines/here"]
    assert not (bundle.path / "engines/other").exists()


def make_engine(bundle: Bundle, name: str) -> EngineEntry:
    folder = bundle.path / "engines" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for entry in ("draft", "context"):
        (folder / f"{entry}.plan").write_bytes(entry.encode())
    plans = {entry: f"engines/{name}/{entry}.plan" for entry in ("draft", "context")}
    values = {"builder": "tensorrt", "builder_version": "10.14.1", "sm": "sm90", "compute_capabilities": ("9.0",)}
    return EngineEntry(id=f"engines/{name}", plans=plans, profile=Profile(), **values)  # type: ignore[arg-type]


def test_bundle_of_graphs_gets_the_folder(bundle: Bundle) -> None:
    """``--resume OUT --target trtllm``; the bundle does not know where its target lies, and says so."""
    shutil.rmtree(bundle.path / "trtllm")
    recipe = apply_overrides(bundle.manifest.recipe, target="onnx")
    write_manifest(bundle.path, bundle.manifest.model_copy(update={"recipe": recipe, "files": inventory(bundle.path)}))
    plain = open_bundle(bundle.path)
    assert resume(plain) == []
    assert not (bundle.path / "trtllm").exists()
    (warning,) = resume(plain, target="trtllm")
    assert "TARGET_MODEL" in warning
    added = open_bundle(bundle.path, check_hashes=True)
    assert added.manifest.recipe.build.target == "trtllm"
    assert {entry.path for entry in added.manifest.files} >= {CONFIG, MODEL, "trtllm/dspine_trtllm/__init__.py"}
