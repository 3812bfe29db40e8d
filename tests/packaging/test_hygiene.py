"""The repository stands alone: no path of any one machine, no package-index host, nothing beside the checkout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "machine path": r"(?<![\w.])/(?:work|root|home/\w+|tmp/v|opt/\w+)/",
    "package-index host": r"pypi\.org|pythonhosted\.org|pypi\.nvidia|download\.pytorch",
    "a folder beside the repository": r"\.\./shared\b",
}
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".cu", ".cuh", ".h", ".cpp", ".cmake", ".txt", ".json", ".sh", ""}
TOP_LEVEL = {"dspine_export", "plugins", "recipes", "kernels", "tools", "tests", ".ci"}


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_repository_stands_alone(kind: str) -> None:
    pattern = re.compile(FORBIDDEN[kind])
    hits = []
    for path in tracked_files():
        if path == Path(__file__) or path.suffix not in TEXT or path.stat().st_size > 2_000_000:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not hits, f"{kind}:\n" + "\n".join(hits)


def test_only_the_agreed_top_level_folders() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in tracked_files() if len(path.relative_to(ROOT).parts) > 1}
    assert folders <= TOP_LEVEL, sorted(folders - TOP_LEVEL)
