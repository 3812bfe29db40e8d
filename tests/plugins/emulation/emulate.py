"""Builds the plugin library with its kernels compiled for the CPU, so that they run in tests on a machine without a GPU.

The headers beside this file stand in for CUDA's. Two constructs that no header can provide are rewritten in the sources: kernel
launches, and dynamic shared memory.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dspine_plugins
from dspine_plugins.build import LIBRARY_NAME

HEADERS = Path(__file__).parent
SOURCES = Path(dspine_plugins.__file__).parent
DEFINES = ('-DDSPINE_VERSION_STRING="0"', '-DDSPINE_ARCHITECTURES="0"', '-DDSPINE_SOURCE_HASH=""')

_LAUNCH = re.compile(r"(?P<kernel>\w+(?:<\w+>)?)\s*<<<(?P<setting>.*?)>>>\((?P<arguments>.*?)\);", re.DOTALL)
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(?P<type>\w+) (?P<name>\w+)\[\];")


def rewrite(source: str) -> str:
    """Turns CUDA C++ into C++ that the stand-in headers understand."""

    def launch(match: re.Match[str]) -> str:
        grid, block, shared, _stream = _split_arguments(match["setting"])
        return f"emulation::launch({grid}, {block}, {shared}, [&] {{ {match['kernel']}({match['arguments']}); }});"

    def dynamic(match: re.Match[str]) -> str:
        return f"auto* {match['name']} = reinterpret_cast<{match['type']}*>(emulation::dynamicShared());"

    return _DYNAMIC.sub(dynamic, _LAUNCH.sub(launch, source))


def _split_arguments(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "(<") - (character in ")>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def build_emulated(directory: Path, tensorrt_headers: Path) -> Path:
    """Compiles every source of the plugin library with the host compiler; returns the library."""
    library = directory / LIBRARY_NAME
    includes = ["-I", str(HEADERS), "-I", str(SOURCES / "include"), "-I", str(SOURCES / "src" / "kernels")]
    flags = [
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-w",
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        *DEFINES,
        *includes,
    ]
    objects: list[Path] = []
    commands = []
    for source in sorted((SOURCES / "src").glob("kernels/*.cu")) + sorted((SOURCES / "src").glob("trt/*.cpp")):
        unit = source
        if source.suffix == ".cu":
            unit = directory / f"{source.stem}.cpp"
            unit.write_text(rewrite(source.read_text(encoding="utf-8")), encoding="utf-8")
        objects.append(directory / f"{source.stem}.o")
        headers = ["-isystem", str(tensorrt_headers)] if source.suffix == ".cpp" else []
        commands.append(["g++", *flags, *headers, "-c", str(unit), "-o", str(objects[-1])])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    subprocess.run(["g++", "-shared", *map(str, objects), "-o", str(library)], check=True)
    return library
