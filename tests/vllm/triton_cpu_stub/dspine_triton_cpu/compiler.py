"""The compiler half of the backend; reached only when TRITON_INTERPRET is not set."""

from typing import Any, NoReturn

from triton.backends import compiler as triton_compiler


class InterpreterOnly(triton_compiler.BaseBackend):
    """Answers Triton's questions about the backend and refuses to compile."""

    @staticmethod
    def supports_target(target: triton_compiler.GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def load_dialects(self, context: Any) -> None:
        """No dialects: nothing is compiled."""

    def get_module_map(self) -> dict[str, Any]:
        return {}

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise NotImplementedError("this backend interprets: set TRITON_INTERPRET=1")

    def add_stages(self, stages: dict[str, Any], options: object, language: object) -> NoReturn:
        raise NotImplementedError("this backend interprets: set TRITON_INTERPRET=1")
