"""The file Triton loads: ``backends/dspine/model.py``. Which model it becomes is the configuration's parameter `kind`.

It may be copied out of the package as it is; everything it needs comes from the installed `dspine_export`.
"""

from __future__ import annotations

from typing import Any


class TritonPythonModel:
    """Triton's interface, forwarded to `text_model.TextModel` or `drafter_model.DrafterServer`."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        raise NotImplementedError

    def execute(self, requests: list[Any]) -> list[Any] | None:
        raise NotImplementedError

    def finalize(self) -> None:
        raise NotImplementedError
