"""Pack the Python sources of installed packages into one compressed file: the corpus of the second target.

    python -m tools.pack_sources --out sources.jsonl.xz

The text is split by package, so that nothing the drafter is measured on comes from a package the target or the drafter saw. Only
packages under permissive licences (BSD, MIT, Apache-2.0, PSF) are listed. One JSON object a line: {"package", "split", "text"}.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

# import name -> (distribution, licence). A package is in one split only.
TRAIN = {
    "torch": ("torch", "BSD-3-Clause"), "transformers": ("transformers", "Apache-2.0"), "sympy": ("sympy", "BSD-3-Clause"),
    "numpy": ("numpy", "BSD-3-Clause"), "openai": ("openai", "Apache-2.0"), "matplotlib": ("matplotlib", "PSF-based"),
    "mypy": ("mypy", "MIT"), "fontTools": ("fonttools", "MIT"), "onnxruntime": ("onnxruntime", "MIT"),
    "huggingface_hub": ("huggingface-hub", "Apache-2.0"), "onnxscript": ("onnxscript", "MIT"), "setuptools": ("setuptools", "MIT"),
    "onnx": ("onnx", "Apache-2.0"), "mpmath": ("mpmath", "BSD-3-Clause"), "fsspec": ("fsspec", "BSD-3-Clause"),
    "PIL": ("pillow", "MIT-CMU"), "anyio": ("anyio", "MIT"), "virtualenv": ("virtualenv", "MIT"), "urllib3": ("urllib3", "MIT"),
    "psutil": ("psutil", "BSD-3-Clause"), "dateutil": ("python-dateutil", "BSD-3-Clause"), "pydantic": ("pydantic", "MIT"),
}  # fmt: skip
HELD_OUT = {
    "networkx": ("networkx", "BSD-3-Clause"), "rich": ("rich", "MIT"), "_pytest": ("pytest", "MIT"), "click": ("click", "BSD-3-Clause"),
    "jinja2": ("jinja2", "BSD-3-Clause"), "pygments": ("pygments", "BSD-2-Clause"),
}  # fmt: skip
LONGEST, SHORTEST = 200_000, 400  # characters of a file; longer ones are tables


def python_files(package: str) -> list[Path]:
    """The package's source files, found without importing it."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))


def sources(package: str, limit: int, rng: random.Random) -> Iterator[str]:
    """Texts of the package in random order until ``limit`` characters are reached; copies of one text appear once."""
    files, seen, total = python_files(package), set(), 0
    rng.shuffle(files)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not SHORTEST <= len(text) <= LONGEST or text in seen:
            continue
        if total + len(text) > limit:
            return
        seen.add(text)
        total += len(text)
        yield text


def main(argv: list[str] | None = None) -> None:
    """Write the file and print characters per package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, default=8_000_000, help="characters per package")
    parser.add_argument("--held-out-limit", type=int, default=1_500_000, help="characters per held-out package")
    a = parser.parse_args(argv)
    rng, packed = random.Random(a.seed), {}
    with lzma.open(a.out, "wt", preset=6, encoding="utf-8") as out:
        for split, packages, limit in (("train", TRAIN, a.limit), ("held_out", HELD_OUT, a.held_out_limit)):
            for package, (distribution, licence) in packages.items():
                size = 0
                for text in sources(package, limit, rng):
                    out.write(json.dumps({"package": package, "split": split, "text": text}) + "\n")
                    size += len(text)
                version = importlib.metadata.version(distribution) if size else None
                packed[package] = {"version": version, "licence": licence, "split": split, "characters": size}
    a.out.with_suffix(".json").write_text(json.dumps(packed, indent=1) + "\n")
    print(json.dumps({"bytes": a.out.stat().st_size, "characters": sum(p["characters"] for p in packed.values())}))


if __name__ == "__main__":
    main()
