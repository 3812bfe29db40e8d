"""JSON from untrusted files: bounded in size, strict about duplicates and non-finite numbers, never a traceback."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from dspine_export.errors import CheckpointError

MAX_CONFIG_BYTES = 16 * 1024 * 1024


class _Refused(ValueError):
    """A JSON document that is well formed but not acceptable."""


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Refused(f"key {key!a} appears twice")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise _Refused(f"{name} is not JSON")


def parse_json_object(data: bytes, where: object) -> dict[str, Any]:
    """Parse UTF-8 `data` into a dict, refusing duplicate keys, NaN/Infinity, absurd nesting and anything but an object."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError("JSON is nested too deeply", where=where) from None
    except ValueError as error:
        raise CheckpointError(
            "Not valid JSON", where=where, got=ascii(str(error))[:300], expected="a JSON object in UTF-8"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            "JSON document is not an object", where=where, got=type(value).__name__, expected="an object {...}"
        )
    return value


def require_regular_file(path: Path) -> int:
    """Size in bytes of the regular file at `path` (links followed); a directory, pipe or device is refused before it is opened."""
    try:
        info = path.stat()
    except FileNotFoundError:
        raise CheckpointError(
            "File not found", where=path, fix="check the path, or download the checkpoint again"
        ) from None
    except OSError as error:
        raise CheckpointError("File cannot be read", where=path, got=error.strerror) from None
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError("Not a regular file", where=path)
    return info.st_size


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read `path` as a JSON object of at most `max_bytes`."""
    size = require_regular_file(path)
    if size > max_bytes:
        raise CheckpointError(
            "JSON file is too large", where=path, got=f"{size} bytes", expected=f"at most {max_bytes} bytes"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError("File cannot be read", where=path, got=error.strerror) from None
    return parse_json_object(data, path)
