"""The file Triton loads: ``backends/dspine/model.py``. Which model it becomes is the configuration's parameter `kind`.

It may be copied out of the package as it is; everything it needs comes from the installed `dspine_export`.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any


class TritonPythonModel:
    """Triton's interface, forwarded to `text_model.TextModel` or `drafter_model.DrafterModel`."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Adds what the configuration leaves out."""
        from dspine_export.triton.backend.complete import complete

        return complete(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the pair. Whatever is unfit fails the load with an explanation instead of a traceback."""
        from dspine_export.errors import DspineError
        from dspine_export.triton.backend.parameters import read_parameters

        pb_utils: Any = import_module("triton_python_backend_utils")  # exists inside the server only
        config = json.loads(args["model_config"])
        self._model: Any = None
        try:
            parameters = read_parameters(config, Path(args["model_repository"]))
            if parameters.text("kind") == "drafter":
                from dspine_export.triton.backend.drafter_model import DrafterModel

                self._model = DrafterModel(pb_utils, config, parameters)
            else:
                from dspine_export.triton.backend.text_model import TextModel

                names = args["model_name"], args["model_version"], args.get("model_instance_name", "")
                self._model = TextModel(pb_utils, config, parameters, *names)
        except DspineError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """See the two models."""
        responses: list[Any] | None = self._model.execute(requests)
        return responses

    def finalize(self) -> None:
        """Lets running requests finish, within limits."""
        if self._model is not None:
            self._model.close()
            self._model = None
