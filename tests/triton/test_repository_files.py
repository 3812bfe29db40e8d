"""What an operator starts: launch script, container files, and the plan flavour, which the server loads by itself."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import yaml

from dspine_export.bundle import open_bundle
from dspine_export.bundle.manifest import EngineEntry
from dspine_export.recipes.schema import Profile

from .conftest import Invoke, Served
from .written import configuration


def test_plan_flavour(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    """A bundle that TensorRT itself built a plan for, as far as its manifest tells."""
    bundle = shutil.copytree(tiny.bundle, tmp_path / "bundle")
    folder = bundle / "engines" / "tensorrt-10.14-sm_90"
    folder.mkdir(parents=True)
    for entry in ("context", "draft"):
        (folder / f"{entry}.plan").write_bytes(entry.encode())
    (bundle / "plugins").mkdir(exist_ok=True)
    for name in ("libdspine_trt_plugins.so", "libdspine_trt_autoreg.so"):
        (bundle / "plugins" / name).touch()
    manifest = open_bundle(bundle).manifest
    from dspine_export.bundle import inventory, write_manifest

    engine = EngineEntry(
        id="engines/tensorrt-10.14-sm_90",
        builder="tensorrt",
        builder_version="10.14",
        sm="sm_90",
        plugin_library="plugins/libdspine_trt_plugins.so",
        plans={entry: f"engines/tensorrt-10.14-sm_90/{entry}.plan" for entry in ("context", "draft")},
        compute_capabilities=("9.0",),
        profile=Profile(),
    )
    write_manifest(bundle, manifest.model_copy(update={"engines": (engine,), "files": inventory(bundle)}))
    output = tmp_path / "r"
    result = invoke("triton-repo", bundle, "--target-model", tiny.target, "-o", output, "--flavor", "plan")
    assert result.code == 0, result.err
    config = configuration(output, "dspine_draft_plan")
    assert config.platform == "tensorrt_plan"
    contract_inputs = manifest.entries["draft"].inputs
    assert [tensor.name for tensor in config.input] == [spec.name for spec in contract_inputs]
    assert [list(tensor.dims) for tensor in config.input] == [
        [size if isinstance(size, int) else -1 for size in spec.shape] for spec in contract_inputs
    ]
    assert (output / "model_repository" / "dspine_draft_plan" / "1" / "model.plan").read_bytes() == b"draft"
    launch = (output / "launch.sh").read_text()
    assert 'tensorrt,plugins="$(realpath bundle/plugins/libdspine_trt_autoreg.so)"' in launch
    assert "${DSPINE_MODELS:-dspine_context_plan dspine_draft_plan}" in launch
    assert seen_by_the_server(output, tmp_path) == "0"
    assert seen_by_the_server(output, tmp_path, NVIDIA_TF32_OVERRIDE="1") == "1"


def seen_by_the_server(repository: Path, folder: Path, **variables: str) -> str:
    """NVIDIA_TF32_OVERRIDE as launch.sh hands it to the server, here a script."""
    server = folder / "server" / "bin" / "tritonserver"
    server.parent.mkdir(parents=True, exist_ok=True)
    server.write_text('#!/bin/sh\nprintf %s "$NVIDIA_TF32_OVERRIDE"\n')
    server.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "NVIDIA_TF32_OVERRIDE"}
    environment |= {"TRITON_HOME": str(folder / "server"), "PYTHON": sys.executable, **variables}
    started = subprocess.run(
        [repository / "launch.sh"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return started.stdout


def test_container_files(made: Path) -> None:
    compose = yaml.safe_load((made / "docker-compose.yaml").read_text())["services"]["tritonserver"]
    assert compose["command"] == ["/repository/launch.sh"]
    assert (made / compose["build"] / "Dockerfile").is_file()
    deployment, service = yaml.safe_load_all((made / "k8s" / "deployment.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    values = yaml.safe_load((made / "k8s" / "values.yaml").read_text())
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe] == values[probe]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/models/dspine/ready"
    program = container["livenessProbe"]["exec"]["command"][1]
    assert (made / Path(program).relative_to("/repository")).is_file()
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == names
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert "&id" not in (made / "k8s" / "deployment.yaml").read_text(), "no anchors: people edit it"


def test_gpu_deployment_asks_for_one(tiny: Served, tmp_path: Path, invoke: Invoke) -> None:
    output = tmp_path / "r"
    assert invoke("triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", output, "--device", "cuda").code == 0
    compose = yaml.safe_load((output / "docker-compose.yaml").read_text())["services"]["tritonserver"]
    assert compose["deploy"]["resources"]["reservations"]["devices"]
    values = yaml.safe_load((output / "k8s" / "values.yaml").read_text())
    assert values["resources"]["limits"] == {"nvidia.com/gpu": 1}


def test_launch_script_says_what_is_missing(made: Path, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_HOME": str(tmp_path / "none")}
    run = subprocess.run([made / "launch.sh"], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, "set TRITON_HOME" in run.stderr) == (4, True)
    server = tmp_path / "triton" / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    server.write_text("#!/bin/sh\nexit 3\n")
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    environment = os.environ | {"TRITON_HOME": str(tmp_path / "triton"), "PYTHON": str(python)}
    run = subprocess.run([made / "launch.sh"], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, "no dspine_export" in run.stderr) == (4, True)
    environment["PYTHON"] = sys.executable
    run = subprocess.run([made / "launch.sh"], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 3, "the server's exit status is the script's"
