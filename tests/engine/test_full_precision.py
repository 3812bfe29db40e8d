"""float32 products stay float32: the environment says so before TensorRT is loaded, unless the user has said something else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dspine_export.lowering.engine.full_precision import VARIABLE, rule_out_tf32, tf32_warning

ROOT = Path(__file__).parents[2]
SEEN_AT_IMPORT = f"import os\n__version__ = os.environ.get('{VARIABLE}', 'nothing')\nBuilder = OnnxParser = None\n"
BUILD = """
    import hashlib, sys
    from dspine_export.lowering.engine.backend import open_backend

    backend = open_backend("tensorrt-rtx")
    trt = backend.module
    for change in ("clear_flag", "set_flag"):
        builder = trt.Builder(backend.logger)
        network = builder.create_network(0)
        one, other = network.add_input("x", trt.float32, (4, 64)), network.add_input("w", trt.float32, (64, 32))
        product = network.add_matrix_multiply(one, trt.MatrixOperation.NONE, other, trt.MatrixOperation.NONE)
        network.mark_output(product.get_output(0))
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        getattr(config, change)(trt.BuilderFlag.TF32)
        print(hashlib.sha256(bytes(builder.build_serialized_network(network, config))).hexdigest())
"""


def run(code: str, value: str | None, *paths: Path) -> list[str]:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    if value is not None:
        environment[VARIABLE] = value
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize(("value", "seen"), [(None, "0"), ("0", "0"), ("1", "1")])
@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_rtx"])
def test_set_before_the_library_is_imported(tmp_path: Path, name: str, value: str | None, seen: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(SEEN_AT_IMPORT)
    code = (
        f"from dspine_export.lowering.engine.discovery import select; print(select('{name.replace('_', '-')}').version)"
    )
    assert run(code, value, tmp_path) == [seen]


def test_looking_for_nothing_changes_nothing() -> None:
    code = f"import os, dspine_export.lowering.engine.backend, dspine_export.runtime.plan_check; print('{VARIABLE}' in os.environ)"
    assert run(code, None) == ["False"]


def test_the_real_library_reads_it() -> None:
    """It outweighs the builder's flag in both directions, and set by us it makes the plan that it makes when the shell sets it."""
    pytest.importorskip("tensorrt_rtx")
    ours, shells, users = run(BUILD, None), run(BUILD, "0"), run(BUILD, "1")
    assert ours == shells
    assert len(set(ours)) == len(set(users)) == 1 and ours != users


def test_warning_unless_it_is_ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert f"{VARIABLE} is not set" in str(tf32_warning())
    rule_out_tf32()
    assert tf32_warning() is None
    monkeypatch.setenv(VARIABLE, "1")
    rule_out_tf32()
    assert "is set to '1'" in str(tf32_warning()) and f"start with {VARIABLE}=0" in str(tf32_warning())
