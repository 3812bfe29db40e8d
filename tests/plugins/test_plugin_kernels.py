"""The kernels themselves, run on the CPU by the emulation beside this file and compared with the float64 reference.

The same checks run on a GPU through tools/check_plugins_gpu.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from dspine_plugins.build import HARNESS_NAME
from dspine_plugins.harness.cases import CASES, Case
from dspine_plugins.harness.check import check
from dspine_plugins.harness.golden import check_golden
from dspine_plugins.toolchain import find_headers

from tests.plugins.emulation.emulate import build_emulated, rewrite

SMALL = [case for case in CASES if not case.timed]
BY_NAME = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def libraries(plugin_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The harness and the plugin library with emulated kernels."""
    if shutil.which("g++") is None:
        pytest.skip("no host compiler")
    directory = tmp_path_factory.mktemp("emulated")
    return plugin_directory / HARNESS_NAME, build_emulated(directory, find_headers())


@DTYPES
@BY_NAME
def test_adjacent_injection(libraries: tuple[Path, Path], case: Case, dtype: torch.dtype) -> None:
    check("AdjacentInjection", case, dtype, *libraries, device="cpu")


@DTYPES
@BY_NAME
def test_transition_scores(libraries: tuple[Path, Path], case: Case, dtype: torch.dtype) -> None:
    check("TransitionScores", case, dtype, *libraries, device="cpu")


@BY_NAME
def test_lattice_walk(libraries: tuple[Path, Path], case: Case) -> None:
    assert check("LatticeWalk", case, torch.float32, *libraries, device="cpu") == "exact"


@pytest.mark.parametrize("name", ["b4_mha_k1", "b8_gqa", "b16_qwen_ratio"])
def test_golden_cases(libraries: tuple[Path, Path], name: str) -> None:
    check_golden(Path(__file__).parents[1] / "golden" / name, *libraries, device="cpu")


@pytest.mark.parametrize("op", ["AdjacentInjection", "TransitionScores", "LatticeWalk"])
def test_a_launch_that_does_nothing_fails_the_check(libraries: tuple[Path, Path], op: str) -> None:
    with pytest.raises(AssertionError):
        check(op, SMALL[0], torch.float32, *libraries, device="cpu", skip_launch=True)


def test_launches_are_rewritten() -> None:
    source = "k<T><<<static_cast<unsigned>(a * (b + 1)), kThreads, staged ? bytes : 0, stream>>>(\n    p, f(x));"
    assert rewrite(source) == (
        "emulation::launch(static_cast<unsigned>(a * (b + 1)), kThreads, staged ? bytes : 0, [&] { k<T>(\n    p, f(x)); });"
    )
