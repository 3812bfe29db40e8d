"""A wheel, a plain install and an editable install all make ``kernels/``, ``plugins/`` and ``recipes/`` importable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("dspine_export", "kernels", "plugins", "recipes")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
PROBE = """
import importlib.resources as resources, json
import dspine_export, dspine_kernels, dspine_plugins, dspine_recipes
def names(package):
    return sorted(entry.name for entry in resources.files(package).iterdir())
print(json.dumps({
    "origin": dspine_export.__file__, "version": dspine_export.__version__,
    "recipes": [name for name in names("dspine_recipes") if name.endswith(".yaml")], "plugins": names("dspine_plugins"),
}))
"""


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds setuptools alone, so that builds need no network and see no installed dspine-export."""
    import setuptools

    site = Path(setuptools.__file__).parents[1]
    folder = tmp_path_factory.mktemp("backend")
    for source in (*site.glob("setuptools*"), *site.glob("_distutils_hack"), *site.glob("pkg_resources")):
        (folder / source.name).symlink_to(source)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the package's sources: building must not litter the checkout."""
    copy = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "build", "*.so")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    venv.create(tmp_path / "env", with_pip=False)
    return tmp_path / "env" / "bin" / "python"


def run(command: list[str | Path], cwd: Path, **extra: str) -> str:
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(environment: Path, cwd: Path, backend: Path, *arguments: str | Path) -> None:
    base = [sys.executable, "-m", "pip", "--python", environment, "--disable-pip-version-check"]
    run([*base, *arguments, "--no-deps", "--no-build-isolation", "--no-index"], cwd, PYTHONPATH=str(backend))


def probe(environment: Path, cwd: Path) -> dict[str, Any]:
    found = json.loads(run([environment, "-c", PROBE], cwd, PYTHONPATH=""))
    return dict(found)


@pytest.mark.parametrize("kind", ["wheel", "plain", "editable"])
def test_install(kind: str, source: Path, environment: Path, backend: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    if kind == "wheel":
        pip(environment, source, backend, "wheel", ".", "--wheel-dir", outside)
        pip(environment, outside, backend, "install", next(outside.glob("*.whl")))
    else:
        pip(environment, source, backend, "install", *(["--editable"] if kind == "editable" else []), ".")
    if kind != "editable":
        shutil.rmtree(source)
    found = probe(environment, outside)
    assert str(found["origin"]).startswith(str(source if kind == "editable" else environment.parents[1]))
    assert found["recipes"] == sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
    assert (environment.parent / "dspine-export").is_file()
    assert {path.name for path in (ROOT / "plugins").glob("CMakeLists.txt")} <= set(found["plugins"])
