"""What ``build --target trtllm`` writes, and that it can be started: by the stub's `trtllm-serve`, labelled so."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dspine_export.bundle import Bundle, DrafterSummary, EngineEntry, open_bundle
from dspine_export.errors import DependencyError, UsageError
from dspine_export.pipeline.progress import Silent
from dspine_export.pipeline.request import BuildRequest
from dspine_export.pipeline.trtllm import check_trtllm, warn_unused, write_trtllm
from dspine_export.recipes import Profile, Recipe, apply_overrides
from dspine_export.trtllm.files import misplaced_drafter
from dspine_export.trtllm.legacy import LABEL
from dspine_export.trtllm.register import register_bundle
from dspine_export.trtllm.settings import ModuleSettings

from .conftest import ROOT, STUB, Package

SECTION = ROOT / "README.md"
QUICK_START = "trtllm-serve TARGET --custom_module_dirs OUT/trtllm --config OUT/trtllm/config.yaml"


def serve(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The stub's trtllm-serve, never the real one."""
    paths = os.pathsep.join((str(STUB), str(ROOT)))
    search = os.pathsep.join((str(STUB / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": search, "STUB_PYTHON": sys.executable, **environment}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = ["trtllm-serve", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_manifest_lists_the_files(shared_bundle: Bundle) -> None:
    listed = {entry.path for entry in shared_bundle.manifest.files if entry.path.startswith("trtllm/")}
    assert listed == {
        "trtllm/__init__.py",
        "trtllm/config.yaml",
        "trtllm/dspine_trtllm/__init__.py",
        "trtllm/triton/tensorrt_llm/1/model.yaml",
    }


def test_generated_package_is_configuration_only(shared_bundle: Bundle) -> None:
    """An assignment of constants, one import of our package, one call."""
    tree = ast.parse(shared_bundle.file("trtllm/dspine_trtllm/__init__.py").read_text())
    document, imported, settings, call = tree.body
    assert isinstance(document, ast.Expr)
    assert isinstance(imported, ast.ImportFrom) and imported.module == "dspine_export.trtllm"
    assert isinstance(settings, ast.Assign)
    assert ast.literal_eval(settings.value) == {
        "bundle": "../..",
        "executor": "torch",
        "max_draft_len": 7,
        "allow_unchecked": False,
    }
    assert isinstance(call, ast.Expr) and ast.unparse(call) == "register(SETTINGS, __file__)"


def test_config_yaml(package: Package, shared_bundle: Bundle) -> None:
    """The options validate under the package's rules; without block_size TensorRT-LLM would refuse the checkpoint's B."""
    document = yaml.safe_load(shared_bundle.file("trtllm/config.yaml").read_text())
    assert document["speculative_config"] == {
        "decoding_type": "DSpark",
        "speculative_model": str(shared_bundle.file("drafter")),
        "max_draft_len": 7,
        "block_size": 7,
        "mask_token_id": 319,
        "target_layer_ids": [1, 3, 5],
        "attention_backend": "VANILLA",
    }
    options = package.load("llmapi.llm_args")
    options.DSparkDecodingConfig(**document["speculative_config"])
    if package.is_stub:
        with pytest.raises(ValueError, match="block_size must equal max_draft_len; got 8 and 7"):
            options.DSparkDecodingConfig(**{**document["speculative_config"], "block_size": None})


def test_triton_model_yaml(package: Package, shared_bundle: Bundle, request_of_build: BuildRequest) -> None:
    document = yaml.safe_load(shared_bundle.file("trtllm/triton/tensorrt_llm/1/model.yaml").read_text())
    assert document.pop("triton_config") == {"max_batch_size": 0, "decoupled": True}
    assert document["model"] == str(request_of_build.target_model)
    assert document["backend"] == "pytorch"
    if package.is_stub:
        parsed = package.load("llmapi.llm_args").parse(document)
        assert parsed.kv_cache_config.free_gpu_memory_fraction == 0.8


@pytest.mark.parametrize("directory", ["trtllm", "trtllm/dspine_trtllm"])
def test_stub_server_starts(shared_bundle: Bundle, directory: str) -> None:
    result = serve(
        "TARGET",
        "--custom_module_dirs",
        shared_bundle.file(directory),
        "--config",
        shared_bundle.file("trtllm/config.yaml"),
    )
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout.strip() == "STUB trtllm-serve TARGET: draft model DSpineForCausalLM, block 8; nothing is served"
    )
    assert shared_bundle.file("trtllm/dspine_trtllm/__pycache__").is_dir()
    open_bundle(shared_bundle.path, check_hashes=True)  # the bytecode Python left there is not a foreign file


def test_moved_bundle_still_registers(shared_bundle: Bundle, tmp_path: Path) -> None:
    moved = shutil.copytree(shared_bundle.path, tmp_path / "elsewhere")
    config = moved / "trtllm/config.yaml"
    assert misplaced_drafter(moved) is None
    config.write_text(config.read_text().replace(str(shared_bundle.path), "/nowhere"))
    assert misplaced_drafter(moved) == "/nowhere/drafter"
    config.write_text(config.read_text().replace("/nowhere", str(moved)))
    result = serve("TARGET", "--custom_module_dirs", moved / "trtllm", "--config", config)
    assert result.returncode == 0, result.stderr


def test_copy_of_a_bundle_that_was_rebuilt(shared_bundle: Bundle, tmp_path: Path) -> None:
    """The other drafter still exists, but TensorRT-LLM would read its configuration for these weights."""
    copied = shutil.copytree(shared_bundle.path, tmp_path / "copy of it, ü")
    assert misplaced_drafter(copied) is None
    config = copied / "drafter/config.json"
    config.write_text(config.read_text() + "\n")
    assert misplaced_drafter(copied) == str(shared_bundle.file("drafter"))


SETTINGS = {"bundle": "../..", "executor": "torch", "max_draft_len": 7}


def test_folder_without_its_bundle(package: Package, shared_bundle: Bundle, tmp_path: Path) -> None:
    """As copied into a container image. A link to the folder works."""
    if not package.is_stub:
        pytest.skip("registers with the stub")
    torn_out, module = shutil.copytree(shared_bundle.file("trtllm"), tmp_path / "trtllm"), "dspine_trtllm/__init__.py"
    with pytest.raises(UsageError, match=r"(?s)not inside its bundle.*move or copy the whole bundle") as raised:
        register_bundle(SETTINGS, torn_out / module)
    assert f"no manifest.json in {tmp_path}" in str(raised.value)
    shutil.rmtree(torn_out)
    torn_out.symlink_to(shared_bundle.file("trtllm"))
    register_bundle(SETTINGS, torn_out / module)


def test_package_of_another_drafter(package: Package, shared_bundle: Bundle) -> None:
    if not package.is_stub:
        pytest.skip("registers with the stub")
    with pytest.raises(UsageError, match=r"(?s)max_draft_len.*got: 9.*expected: 7 .*undo the changes"):
        register_bundle({**SETTINGS, "max_draft_len": 9}, shared_bundle.file("trtllm/dspine_trtllm/__init__.py"))


def test_commands_in_comments_are_quoted(shared_bundle: Bundle, tmp_path: Path) -> None:
    out, target = tmp_path / "my out", Path("/models/my target")
    shutil.copytree(shared_bundle.file("drafter"), out / "drafter")
    write_trtllm(out, out, shared_bundle.manifest.drafter, Recipe(), [], Silent(), target)
    config = (out / "trtllm/config.yaml").read_text()
    words = shlex.split(config.splitlines()[0])
    assert words[1:] == [
        "trtllm-serve", str(target), "--custom_module_dirs", f"{out}/trtllm", "--config", f"{out}/trtllm/config.yaml"
    ]  # fmt: skip
    assert f"PYTHONPATH='{out}/trtllm'" in (out / "trtllm/triton/tensorrt_llm/1/model.yaml").read_text()


def test_options_without_effect_are_named() -> None:
    heard = Heard()
    warn_unused(apply_overrides(Recipe(), ["trtllm.legacy_layout=true", "trtllm.executor=plan"]), heard)
    warn_unused(apply_overrides(Recipe(), target="onnx"), heard)
    assert heard.warnings == []
    warn_unused(apply_overrides(Recipe(), ["trtllm.legacy_layout=true", "trtllm.executor=plan"], target="onnx"), heard)
    (warning,) = heard.warnings
    assert "trtllm.executor, trtllm.legacy_layout: without effect on --target onnx" in warning


def test_unknown_version_at_start(shared_bundle: Bundle) -> None:
    where = ("--custom_module_dirs", shared_bundle.file("trtllm"), "--config", shared_bundle.file("trtllm/config.yaml"))
    refused = serve("TARGET", *where, STUB_TRTLLM_VERSION="9.9.9")
    assert refused.returncode != 0
    assert "TensorRT-LLM 9.9.9" in refused.stderr
    assert "--allow-unchecked" in refused.stderr
    allowed = serve("TARGET", *where, STUB_TRTLLM_VERSION="9.9.9", DSPINE_TRTLLM_ALLOW_UNCHECKED="1")
    assert allowed.returncode == 0, allowed.stderr


def test_unknown_version_at_build(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9")
    with pytest.raises(DependencyError, match="signature-checked"):
        check_trtllm(Recipe())
    check_trtllm(apply_overrides(Recipe(), ["trtllm.allow_unchecked=true"]))


def engine_entry(builder: str = "tensorrt") -> EngineEntry:
    return EngineEntry(
        id="engines/e",
        builder=builder,
        builder_version="10.14.1",
        sm="sm90",
        plans={"draft": "engines/e/draft.plan", "context": "engines/e/context.plan"},
        compute_capabilities=("9.0",),
        profile=Profile(),
    )


class Heard(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture
def staging(shared_bundle: Bundle, tmp_path: Path) -> Path:
    (tmp_path / "engines/e").mkdir(parents=True)
    for name in ("draft", "context"):
        (tmp_path / f"engines/e/{name}.plan").write_bytes(name.encode())
    shutil.copytree(shared_bundle.file("drafter"), tmp_path / "drafter")
    return tmp_path


def write(
    staging: Path, drafter: DrafterSummary, *settings: str, engines: list[EngineEntry] | None = None
) -> list[str]:
    progress, recipe = Heard(), apply_overrides(Recipe(), settings)
    write_trtllm(staging, staging, drafter, recipe, engines or [], progress, Path("/models/target"))
    return progress.warnings


def test_legacy_layout(shared_bundle: Bundle, staging: Path) -> None:
    drafter = shared_bundle.manifest.drafter
    assert write(staging, drafter, "trtllm.legacy_layout=true", engines=[engine_entry()]) == []
    folder = staging / "trtllm/legacy"
    assert (folder / "rank0.engine").read_bytes() == b"draft"
    document = json.loads((folder / "config.json").read_text())
    assert document["version"] == LABEL == "TensorRT-LLM <= 1.2 file layout"
    assert "file layout only" in document["note"]
    assert document["build_config"]["max_draft_len"] == 7


def test_legacy_layout_says_what_it_cannot_be(shared_bundle: Bundle, staging: Path) -> None:
    drafter = shared_bundle.manifest.drafter
    (warning,) = write(staging, drafter, "trtllm.legacy_layout=true", engines=[engine_entry("tensorrt-rtx")])
    assert "tensorrt-rtx" in warning
    (warning,) = write(staging, drafter, "trtllm.legacy_layout=true")
    assert "--resume" in warning


def test_plan_executor(shared_bundle: Bundle, staging: Path) -> None:
    drafter = shared_bundle.manifest.drafter
    (warning,) = write(staging, drafter, "trtllm.executor=plan")
    assert "no engine yet" in warning
    assert '"executor": "plan"' in (staging / "trtllm/dspine_trtllm/__init__.py").read_text()
    with pytest.raises(UsageError, match="DSpine drafters"):
        write(staging, drafter.model_copy(update={"transfer_rank": None}), "trtllm.executor=plan")


def test_resume_keeps_the_target(shared_bundle: Bundle, staging: Path) -> None:
    write(staging, shared_bundle.manifest.drafter)
    write_trtllm(staging, staging, shared_bundle.manifest.drafter, Recipe(), [], Silent())
    assert (
        yaml.safe_load((staging / "trtllm/triton/tensorrt_llm/1/model.yaml").read_text())["model"] == "/models/target"
    )


def test_unreadable_drafter_config_is_announced(shared_bundle: Bundle, staging: Path) -> None:
    path = staging / "drafter/config.json"
    document = json.loads(path.read_text())
    del document["model_type"]
    path.write_text(json.dumps(document))
    (warning,) = write(staging, shared_bundle.manifest.drafter)
    assert "model_type" in warning


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"bundle": ".", "executor": "torch"}, "max_draft_len"),
        ({"bundle": ".", "executor": "torch", "max_draft_len": 7, "more": 1}, "more"),
        ({"bundle": ".", "executor": "jax", "max_draft_len": 7}, "jax"),
        ({"bundle": ".", "executor": "torch", "max_draft_len": True}, "max_draft_len"),
    ],
)
def test_damaged_settings(values: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ModuleSettings.parse(values, Path("here"))


def test_readme_commands(shared_bundle: Bundle, request_of_build: BuildRequest) -> None:
    """Every trtllm-serve command of the README, executed by the STUB: the real package cannot be installed here."""
    text = SECTION.read_text(encoding="utf-8") if SECTION.is_file() else ""
    commands = re.findall(r"^trtllm-serve .+$", text, re.MULTILINE) or [QUICK_START]
    for command in commands:
        words = command.replace("OUT", str(shared_bundle.path)).replace("TARGET", str(request_of_build.target_model))
        result = serve(*words.split()[1:])
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        assert result.stdout.startswith("STUB trtllm-serve")
