"""Which drafter ``--speculative-model dspine`` means: the word carries no path, so it is looked up by the target.

1. The directory or Hugging Face name in DSPINE_DRAFTER.
2. The file of drafters, ``drafters.yaml`` below ``$XDG_CONFIG_HOME/dspine-export`` (``~/.config`` by default) or wherever DSPINE_DRAFTERS
   says: a mapping from target (as it is given to vLLM, or its directory) to drafter. ``build --target vllm --register`` adds a line.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from dspine_export.errors import OutputError, UsageError

DRAFTER_VARIABLE = "DSPINE_DRAFTER"
FILE_VARIABLE = "DSPINE_DRAFTERS"
SERVING_FOLDER = "vllm"  # of a bundle
_CONFIG, _MANIFEST = "config.json", "manifest.json"


def find_drafter(target: str) -> str:
    """The drafter for ``target``, a directory or Hugging Face name.

    Raises:
        UsageError: none is known, or the file of drafters cannot be read.
    """
    named = os.environ.get(DRAFTER_VARIABLE)
    if named:
        return named
    known = read_registry()
    for candidate in (target, _absolute(target)):
        if candidate in known:
            return known[candidate]
    listed = ", ".join(sorted(known)[:8])
    raise UsageError(
        "no drafter is known for this target",
        where=f"{DRAFTER_VARIABLE} is not set, and {registry_path()}",
        got=f"lists drafters for {listed}" if known else "does not exist or is empty",
        expected=f"a line {target}: DRAFTER",
        fix=(
            f"set {DRAFTER_VARIABLE}=DRAFTER, or build the drafter with --register, or name it: "
            '--speculative-config \'{"method": "dspine", "model": "DRAFTER"}\''
        ),
    )


def registry_path() -> Path:
    """The file of drafters."""
    given = os.environ.get(FILE_VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "dspine-export" / "drafters.yaml"


def read_registry() -> dict[str, str]:
    """Target to drafter; empty where there is no file.

    Raises:
        UsageError: the file is not a mapping of strings.
    """
    path = registry_path()
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError("the file of drafters cannot be read", where=path, got=str(error)[:200]) from None
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(part, str) for item in document.items() for part in item):
        raise UsageError("the file of drafters is no list of drafters", where=path, expected="lines TARGET: DRAFTER")
    return document


def add_to_registry(target: str, drafter: Path) -> Path:
    """Make ``drafter`` the one for ``target``; returns the file, replaced as a whole.

    Raises:
        UsageError: the file is there and damaged. OutputError: it cannot be written.
    """
    known = {**read_registry(), _absolute(target): str(drafter.absolute())}
    path = registry_path()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(yaml.safe_dump(known, sort_keys=True), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError("the file of drafters cannot be written", where=path, got=error.strerror) from None
    return path


def serving_directory(model: str, folders: tuple[str, ...] = (SERVING_FOLDER, "drafter")) -> str:
    """The first of ``folders`` that a bundle has; anything but a bundle is returned as it is."""
    path = Path(model)
    if (path / _MANIFEST).is_file() and not (path / _CONFIG).is_file():
        for folder in folders:
            if (path / folder / _CONFIG).is_file():
                return str(path / folder)
    return model


def _absolute(target: str) -> str:
    return str(Path(target).absolute()) if Path(target).is_dir() else target
