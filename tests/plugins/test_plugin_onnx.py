"""Plugin nodes through TensorRT-RTX's ONNX parser and builder, on a machine without a GPU.

How the parser finds a creator for a node (TensorRT-RTX 1.7.1, whose parser is that of TensorRT 11): the plugin name is the node's
op_type and the version its `plugin_version` attribute, "1" if absent. The namespace is the `plugin_namespace` attribute; when that is
absent, or names nothing, the node's domain is tried. So nodes in domain "dspine" need neither attribute there. The parser of
TensorRT 10 knows only the attributes, which are harmless elsewhere. A local function of the same name in the model takes precedence
over the plugin: a model with function bodies builds without plugins, silently.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from dspine_plugins import PluginLibrary

from dspine_export.ops_schema import DOMAIN, OPS
from tests.plugins.processes import HERE, run_python

DRIVER = (HERE / "rtx_driver.py").read_text(encoding="utf-8")
ENGINES = [f"{op.op_type}.{dtype}" for op in OPS for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def results(
    plugins: PluginLibrary, rtx_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the driver found, from one process: importing the builder takes longer than the builds."""
    models = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(HERE / "onnx_models.py"), str(models)], check=True, env=rtx_environment)
    result = run_python(DRIVER, plugins.path, models, environment=rtx_environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(json.loads(result.stdout.splitlines()[-1]), stderr=result.stderr)


def test_creators_match_the_schema(results: dict[str, Any]) -> None:
    wanted = [[op.op_type, DOMAIN, "1", list(op.attributes)] for op in OPS]
    assert sorted(results["creators"]) == sorted(wanted)


@pytest.mark.parametrize("name", ENGINES)
def test_engine_is_built_from_the_plugin(results: dict[str, Any], name: str) -> None:
    model = results["models"][name]
    assert model["errors"] == []
    assert model["layers"] == ["PLUGIN_V3"]
    assert model["plan_bytes"] > 1000
    assert model["plan_names_the_plugin"]


@pytest.mark.parametrize("name", ENGINES)
def test_output_types_and_dynamic_batch(results: dict[str, Any], name: str) -> None:
    op_type, dtype = name.split(".")
    op = next(op for op in OPS if op.op_type == op_type)
    types = {"T": {"float32": "FLOAT", "bfloat16": "BF16"}[dtype], "float32": "FLOAT", "int64": "INT64"}
    outputs = results["models"][name]["outputs"]
    assert [output["type"] for output in outputs] == [types[operand.dtype] for operand in op.outputs]
    assert all(output["shape"][0] == -1 and -1 not in output["shape"][1:] for output in outputs)


def test_namespace_attribute_or_domain(results: dict[str, Any]) -> None:
    models = results["models"]
    assert models["attributes"]["layers"] == ["PLUGIN_V3"]
    assert models["other_domain_attributes"]["layers"] == ["PLUGIN_V3"]
    assert any("Plugin not found" in error for error in models["other_domain"]["errors"])


def test_function_body_hides_the_plugin(results: dict[str, Any]) -> None:
    assert "PLUGIN_V3" not in results["models"]["function_body"]["layers"]


def test_missing_attribute_fails_at_parse_time(results: dict[str, Any]) -> None:
    assert results["models"]["no_eps"]["errors"]
    assert "[dspine] TransitionScores: attribute eps is missing" in results["stderr"]
