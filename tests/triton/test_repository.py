"""`triton-repo` without a server: layout, configurations, sources, errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dspine_export.bundle import open_bundle
from dspine_export.errors import DependencyError
from dspine_export.triton import contract, model_config
from dspine_export.triton.options import FLAVORS, RepositoryOptions

from .conftest import ROOT, Invoke, Served
from .written import configuration, parameters


def test_layout(made: Path) -> None:
    models = {path.name for path in (made / "model_repository").iterdir()}
    assert models == {"dspine", "dspine_drafter", "tensorrt_llm", "vllm_dspine"}
    assert (made / "backends" / "dspine" / "model.py").is_file()
    for name in ("README.md", "client.py", "docker-compose.yaml", "k8s/values.yaml", "grafana/dashboard.json"):
        assert (made / name).is_file(), name
    for script in ("launch.sh", "perf.sh"):
        assert os.access(made / script, os.X_OK)
        subprocess.run(["bash", "-n", made / script], check=True)
    assert not [path for path in made.parent.iterdir() if path.name.startswith(".")], "staging or lock left behind"


def test_every_folder_of_the_model_repository_is_a_model(made: Path) -> None:
    """An empty one would fail the whole start."""
    for folder in (made / "model_repository").iterdir():
        assert configuration(made, folder.name).name == folder.name
        assert any((folder / "1").iterdir())


def test_text_model(made: Path) -> None:
    config = configuration(made, "dspine")
    assert (config.backend, config.max_batch_size) == ("dspine", 0)
    assert config.model_transaction_policy.decoupled
    assert [tensor.name for tensor in config.input] == [tensor.name for tensor in contract.TEXT_INPUTS]
    assert [tensor.name for tensor in config.output] == [tensor.name for tensor in contract.TEXT_OUTPUTS]
    assert set(parameters(config)) == {parameter.name for parameter in contract.TEXT_PARAMETERS}


def test_drafter_model(made: Path) -> None:
    config = configuration(made, "dspine_drafter")
    assert config.sequence_batching.HasField("oldest")
    assert [control.name for control in config.sequence_batching.control_input] == ["START", "END", "CORRID"]
    assert not config.model_transaction_policy.decoupled
    hidden = next(tensor for tensor in config.input if tensor.name == "target_hidden")
    assert list(hidden.dims) == [-1, 2 * 32], "two taps of a model of width 32"
    assert parameters(config)["kind"] == "drafter"


@pytest.mark.parametrize("model", ["dspine", "dspine_drafter"])
def test_paths_are_relative_and_lead_somewhere(made: Path, model: str) -> None:
    start = made / "model_repository"
    given = parameters(configuration(made, model))
    assert open_bundle(start / given["bundle"], check_hashes=True).manifest.drafter.block_size == 4
    assert (start / given["target_model"] / "config.json").is_file()
    assert not [value for value in given.values() if value.startswith("/")]


def test_text_is_printed_by_protobuf_and_survives_odd_values(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    odd = 'a"} parameters { key: "b\\ ü'
    output = tmp_path / "odd"
    result = invoke(
        "triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", output, "--set", f"dtype={odd}"
    )  # fmt: skip
    assert result.code == 0, result.err
    given = parameters(configuration(output, "dspine"))
    assert given["dtype"] == odd
    assert "b\\ ü" not in given


def test_options_reach_the_configuration(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    output = tmp_path / "r"
    chosen = "--name writer --max-batch-size 3 --max-seq-len 99 --instances 2 --no-decoupled --device cuda:1 --set max_queue=5"
    result = invoke("triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", output, *chosen.split())
    assert result.code == 0, result.err
    config = configuration(output, "writer")
    given = parameters(config)
    assert (given["max_slots"], given["max_seq_len"], given["max_queue"], given["device"]) == ("3", "99", "5", "cuda:1")
    assert not config.model_transaction_policy.decoupled
    assert [(group.count, group.kind) for group in config.instance_group] == [(2, 3)], "two of KIND_MODEL"
    assert configuration(output, "writer_drafter").sequence_batching.oldest.max_candidate_sequences == 3
    assert "${DSPINE_MODELS:-writer}" in (output / "launch.sh").read_text()
    assert 'default="writer"' in (output / "client.py").read_text()


def test_vllm_arguments(made: Path) -> None:
    arguments = json.loads((made / "model_repository" / "vllm_dspine" / "1" / "model.json").read_text())
    speculation = arguments["speculative_config"]
    assert speculation == {"method": "dspine", "model": "vllm", "num_speculative_tokens": 3}
    for path in (arguments["model"], speculation["model"]):
        assert (made / path / "config.json").is_file(), "relative to the server's working directory"
    assert configuration(made, "vllm_dspine").backend == "vllm"


def test_llmapi_model(made: Path) -> None:
    folder = made / "model_repository" / "tensorrt_llm" / "1"
    document = yaml.safe_load((folder / "model.yaml").read_text())
    assert document["triton_config"] == {"max_batch_size": 0, "decoupled": True}
    assert document["speculative_config"]["max_draft_len"] == 3
    assert (made / document["speculative_config"]["speculative_model"]).is_dir()


def test_llmapi_model_registers_the_drafter_and_becomes_nvidias(made: Path, tmp_path: Path) -> None:
    nvidia = tmp_path / "nvidia"
    nvidia.mkdir()
    (nvidia / "helpers.py").write_text("word = 'theirs'\n")
    (nvidia / "model.py").write_text("from helpers import word\nclass TritonPythonModel:\n    made_by = word\n")
    assert (made / "bundle" / "trtllm" / "dspine_trtllm" / "__init__.py").is_file()
    registration = made / "bundle" / "trtllm" / "dspine_trtllm"
    shutil.rmtree(registration)
    registration.with_suffix(".py").write_text("print('registered')\n")  # the real one needs TensorRT-LLM
    model = made / "model_repository" / "tensorrt_llm" / "1" / "model.py"
    code = f"import runpy; print(runpy.run_path({str(model)!r})['TritonPythonModel'].made_by)"
    environment = os.environ | {"LLMAPI_MODEL": str(nvidia)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["registered", "theirs"], run.stderr
    environment["LLMAPI_MODEL"] = str(tmp_path)
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "set LLMAPI_MODEL" in run.stderr


def test_llmapi_flavour_of_a_bundle_without_its_module(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    bundle = tmp_path / "bundle"
    plain = ("build", tiny.bundle / "drafter", "--target-model", tiny.target, "--no-verify", "--target", "onnx")
    assert invoke(*plain, "-o", bundle).code == 0
    result = invoke("triton-repo", bundle, "--target-model", tiny.target, "-o", tmp_path / "r", "--flavor", "llmapi")
    assert (result.code, "--target trtllm" in result.err) == (2, True)


@pytest.mark.parametrize("files", ["link", "copy", "reference"])
def test_where_bundle_and_target_are(tiny: Served, tmp_path: Path, invoke: Invoke, files: str) -> None:
    output = tmp_path / "r"
    assert not invoke(
        "triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", output, "--files", files
    ).code  # fmt: skip
    source, inside = tiny.target / "model.safetensors", output / "target" / "model.safetensors"
    if files == "reference":
        assert not inside.exists()
        given = parameters(configuration(output, "dspine"))
        assert os.path.samefile(output / "model_repository" / given["bundle"], tiny.bundle)
        assert os.path.samefile(output / "model_repository" / given["target_model"], tiny.target)
    else:
        assert os.path.samefile(source, inside) == (files == "link")
        assert source.read_bytes() == inside.read_bytes()


def test_repository_can_be_moved(made: Path, tmp_path: Path) -> None:
    before = str(made)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    made.rename(moved)
    test_paths_are_relative_and_lead_somewhere(moved, "dspine")
    texts = [
        path
        for path in moved.rglob("*")
        if path.is_file() and path.suffix in {"", ".py", ".sh", ".pbtxt", ".yaml", ".json", ".md"}
    ]
    # The bundle's own TensorRT-LLM files name the bundle; a repository's do not.
    assert not [path for path in texts if "bundle" not in path.parts and before in path.read_text(errors="ignore")]


def test_target_reached_through_links_and_with_foreign_weights(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    """A Hugging Face cache: every file a link; weights in other formats beside them stay where they are."""
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for path in tiny.target.iterdir():
        (cache / path.name).symlink_to(path)
    (cache / "pytorch_model.bin").write_bytes(b"pickle")
    (cache / ".cache").mkdir()
    output = tmp_path / "r"
    assert invoke("triton-repo", tiny.bundle, "--target-model", cache, "-o", output).code == 0
    names = {path.name for path in (output / "target").iterdir()}
    assert names == {path.name for path in tiny.target.iterdir()}
    assert not any(path.is_symlink() for path in output.rglob("*"))


def test_existing_output(made: Path, tiny: Served, invoke: Invoke) -> None:
    again = ("triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", made)
    refused = invoke(*again)
    assert refused.code == 7
    assert "already holds a triton repository" in refused.err
    inode = made.stat().st_ino
    assert invoke(*again, "--force").code == 0
    assert made.stat().st_ino != inode
    assert not (made / "model_repository" / "vllm_dspine").exists(), "the old repository was replaced whole"
    (made / "notes.txt").write_text("mine")
    refused = invoke(*again, "--force")
    assert refused.code == 7 and "notes.txt" in refused.err


def test_force_never_replaces_a_bundle_by_a_repository(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    output = shutil.copytree(tiny.bundle, tmp_path / "bundle")
    refused = invoke("triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", output, "--force")
    assert refused.code == 7
    assert open_bundle(output, check_hashes=True)


def test_damaged_bundle(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    bundle = shutil.copytree(tiny.bundle, tmp_path / "bundle")
    file = bundle / "onnx" / "draft.onnx"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused = invoke("triton-repo", bundle, "--target-model", tiny.target, "-o", tmp_path / "r")
    assert refused.code == 6
    assert "was changed" in refused.err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--flavor", "onnx"], 2, "dspine, llmapi, vllm, plan"),
        (["--name", "a/b"], 2, "--name"),
        (["--name", "vllm_dspine", "--flavor", "vllm", "--flavor", "dspine"], 2, "same name"),
        (["--device", "tpu"], 2, "cuda:N"),
        (["--max-batch-size", "0"], 2, "--max-batch-size"),
        (["--max-seq-len", "1"], 2, "--max-seq-len"),
        (["--instances", "-1"], 2, "--instances"),
        (["--files", "symlink"], 2, "reference"),
        (["--set", "max_queu=4"], 2, "max_queue"),
        (["--set", "bundle=x"], 2, "no such parameter"),
        (["--set", "max_queue"], 2, "NAME=VALUE"),
        (["--flavor", "plan"], 2, "build --resume"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(
    tiny: Served, tmp_path: Path, invoke: Invoke, arguments: list[str], code: int, says: str
) -> None:  # fmt: skip
    result = invoke("triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", tmp_path / "r", *arguments)
    assert (result.code, says in result.err) == (code, True), result.err
    assert not (tmp_path / "r").exists()


def test_missing_arguments_and_sources(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("triton-repo", tiny.bundle, "-o", tmp_path / "r").code == 2
    assert invoke("triton-repo", tiny.bundle, "--target-model", tiny.target).code == 2
    assert invoke("triton-repo", tmp_path, "--target-model", tiny.target, "-o", tmp_path / "r").code == 2
    assert invoke("triton-repo", tiny.bundle, "--target-model", tmp_path / "no", "-o", tmp_path / "r").code == 3


def test_json(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    output = tmp_path / "r"
    result = invoke("triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", output, "--json")
    document = json.loads(result.out)
    assert document["ok"] is True
    assert document["models"] == ["dspine", "dspine_drafter"]
    assert document["served"] == ["dspine"]
    assert document["repository"] == str(output)
    failed = invoke("triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", output, "--json")
    assert json.loads(failed.out)["exit_code"] == failed.code == 7


def test_without_the_client_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tritonclient", "tritonclient.grpc", "tritonclient.grpc.model_config_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyError, match=re.escape("dspine-export[triton]")):
        model_config.messages()


def test_flavours_are_the_documented_ones() -> None:
    assert FLAVORS == ("dspine", "llmapi", "vllm", "plan")
    assert RepositoryOptions().served_names == (contract.TEXT_MODEL,)


def test_build_writes_a_repository_into_its_bundle(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    bundle = tmp_path / "bundle"
    result = invoke(
        "build", tiny.bundle / "drafter", "--target-model", tiny.target, "-o", bundle, "--target", "onnx", "--no-verify",
        "--triton", "--max-batch-size", "3", "--dtype", "float32",
    )  # fmt: skip
    assert result.code == 0, result.err
    repository = bundle / "triton"
    given = parameters(configuration(repository, "dspine"))
    assert given["max_slots"] == "3"
    assert os.path.samefile(repository / "model_repository" / given["bundle"], bundle)
    assert os.path.samefile(repository / "model_repository" / given["target_model"], tiny.target)
    (repository / "model_repository" / "dspine" / "config.pbtxt").write_text("mine")
    assert open_bundle(bundle, check_hashes=True), "an operator may edit it"
    output = tmp_path / "r"
    assert invoke("triton-repo", bundle, "--target-model", tiny.target, "-o", output).code == 0
    assert not (output / "bundle" / "triton").exists(), "the bundle's own repository stays behind"
    assert open_bundle(output / "bundle", check_hashes=True)
    refused = invoke("build", "--resume", bundle, "--triton")
    assert (refused.code, "triton" in refused.err) == (2, True)


def test_readme_command(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    """The README's own line, with its three names filled in."""
    (line,) = re.findall(r"^dspine-export (triton-repo .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    names = {"OUT": str(tiny.bundle), "TARGET": str(tiny.target), "REPOSITORY": str(tmp_path / "r")}
    assert invoke(*(names.get(word, word) for word in line.split())).code == 0
    assert (tmp_path / "r" / "launch.sh").is_file()
