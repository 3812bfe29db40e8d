"""One finding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "absent", "warning", "broken"]


@dataclass(frozen=True)
class Check:
    """``absent`` means an optional part is not installed; ``broken`` means something needed, or installed, cannot work."""

    name: str
    status: Status
    detail: str
    fix: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; ``fix`` only where there is one."""
        return {key: value for key, value in asdict(self).items() if value is not None}
