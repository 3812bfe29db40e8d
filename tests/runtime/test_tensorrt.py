"""What can be checked of the TensorRT executor without a GPU: every refusal, and the calls it makes on a stand-in engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspine_export.bundle import Bundle, EngineEntry
from dspine_export.errors import DependencyError, DspineWarning, UsageError
from dspine_export.recipes.schema import Profile
from dspine_export.runtime import tensorrt_executor
from dspine_export.runtime.plan_check import CheckedEngine
from dspine_export.runtime.plan_runner import PlanRunner, load_plan
from dspine_export.runtime.tensorrt_executor import TensorrtExecutor, load_plugins, open_tensorrt
from tests.runtime.conftest import Opened

ID = "engines/tensorrt-rtx-1.7.1-sm89"


def entry(**changes: Any) -> EngineEntry:
    plans = {name: f"{ID}/{name}.plan" for name in ("context", "draft")}
    values = {"id": ID, "builder": "tensorrt-rtx", "builder_version": "1.7.1", "sm": "sm89", "plans": plans}
    return EngineEntry(**values | {"compute_capabilities": ("8.9",), "profile": Profile()} | changes)  # type: ignore[arg-type]


def test_without_a_gpu(tiny: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, executor = tiny
    bundle = Bundle(tmp_path, SimpleNamespace(engines=(entry(),), files=()))  # type: ignore[arg-type]
    monkeypatch.setattr(tensorrt_executor, "device_compute_capability", lambda: None)
    with pytest.raises(DependencyError):
        open_tensorrt(bundle, executor.config, target.embed_tokens, target.lm_head)
    fitting = CheckedEngine(entry(), {}, has_plugins=False)
    monkeypatch.setattr(tensorrt_executor, "choose_engine", lambda _bundle, _device: fitting)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DependencyError, match="This torch cannot use the GPU"):
        open_tensorrt(bundle, executor.config, target.embed_tokens, target.lm_head)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="needs the target on the GPU"):
        open_tensorrt(bundle, executor.config, target.embed_tokens, target.lm_head)


class StandInEngine:
    """The calls of an engine and its context, answered by the torch executor's own computation on the CPU."""

    def __init__(self, tensors: dict[str, tuple[str, str]], compute: Any, most: int = 64) -> None:
        self.names, self.tensors, self.compute, self.most = list(tensors), tensors, compute, most
        self.num_io_tensors = len(tensors)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def create_execution_context(self) -> StandInEngine:
        return self

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self.tensors[name][0])

    def get_tensor_mode(self, name: str) -> str:
        return self.tensors[name][1]

    def get_tensor_profile_shape(self, _name: str, _profile: int) -> list[tuple[int, ...]]:
        return [(1,), (1,), (self.most,)]

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return max(shape) <= self.most

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, _name: str) -> tuple[int, ...]:
        return (self.shapes["a"][0], 2)

    def execute_async_v3(self, _stream: int) -> bool:
        return bool(self.compute)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> PlanRunner:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=7))
    backend = SimpleNamespace(
        module=SimpleNamespace(TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out")),
        log=SimpleNamespace(excerpt=lambda: "said nothing"),
    )
    engine = StandInEngine({"a": ("FLOAT", "in"), "out": ("INT64", "out")}, compute=True)
    return PlanRunner(backend, None, engine, torch.device("cpu"))  # type: ignore[arg-type]


def test_runner_binds_by_name(runner: PlanRunner) -> None:
    a = torch.zeros(3, 4).T  # not contiguous
    out = runner.run({"a": a, "not in the plan": a})
    engine: Any = runner._engine
    assert engine.shapes == {"a": (4, 3)} and out["out"].shape == (4, 2) and out["out"].dtype == torch.int64
    assert engine.addresses["out"] == out["out"].data_ptr()


def test_captured_run_keeps_its_context(runner: PlanRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later runs, of whatever shape, must not touch the context a CUDA graph was captured from."""
    engine: Any = runner._engine
    contexts = iter([SimpleNamespace(name=n, **_calls(engine)) for n in range(3)])
    monkeypatch.setattr(engine, "create_execution_context", lambda: next(contexts))
    capturing = False
    monkeypatch.setattr(runner, "_is_captured", lambda: capturing)
    warm: Any = runner._context
    runner.run({"a": torch.zeros(2)})
    capturing = True
    runner.run({"a": torch.zeros(2)})
    assert runner._captured == [warm]
    capturing = False
    for size in (3, 4):
        runner.run({"a": torch.zeros(size)})
    assert runner._context.name == 0 and runner._captured == [warm]


def _calls(engine: Any) -> dict[str, Any]:
    names = ("set_input_shape", "set_tensor_address", "infer_shapes", "get_tensor_shape", "execute_async_v3")
    return {name: getattr(engine, name) for name in names}


def test_runner_refusals(runner: PlanRunner) -> None:
    with pytest.raises(UsageError, match="does not fit the plan"):
        runner.run({"a": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(UsageError, match="outside the plan's profile"):
        runner.run({"a": torch.zeros(65)})
    runner._engine.compute = False
    with pytest.raises(DependencyError, match="could not execute"):
        runner.run({"a": torch.zeros(2)})


def test_executor_over_plans(tiny: Opened) -> None:
    """Two stand-in plans that compute with the torch model: padding to the smallest call, limits from the profile."""
    target, reference = tiny
    calls: list[tuple[int, ...]] = []

    class Plan:
        def __init__(self, name: str) -> None:
            self.name, self.dtypes = name, {"keys": torch.float32}

        def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
            if self.name == "context":
                calls.append(tuple(feeds["target_hidden"].shape))
                keys, values = reference.project(feeds["target_hidden"], feeds["start_positions"])  # type: ignore[attr-defined]
                return {"new_keys": keys, "new_values": values}
            state = reference.new_state(feeds["keys"].shape[0])
            state.keys, state.values, state.lengths = feeds["keys"], feeds["values"], feeds["context_lengths"]
            return dict(vars(reference.draft_from(state, feeds["anchor_ids"], feeds["temperature"], feeds["uniforms"])))

    sizes = {"batch": (1, 1, 2), "context": (16, 32, 64), "tokens": (4, 4, 8)}
    profile = Profile.model_validate({k: dict(zip(("min", "opt", "max"), v, strict=True)) for k, v in sizes.items()})
    plans: Any = {"context": Plan("context"), "draft": Plan("draft")}
    executor = TensorrtExecutor(reference.config, entry(profile=profile), plans, target.embed_tokens, target.lm_head)
    hidden, heat, uniforms = torch.randn(2, 13, 64), torch.zeros(2), torch.zeros(2, 3)
    outputs = []
    for each in (executor, reference):
        state = each.new_state(2)
        each.append_context(state, hidden, torch.tensor([13, 9]))
        each.append_context(state, hidden[:, :1], torch.tensor([1, 1]))
        outputs.append(each.draft_from(state, torch.tensor([7, 8]), heat, uniforms).tokens)
        if each is executor:
            assert state.capacity == 64
    assert torch.equal(*outputs)
    assert [shape[1] for shape in calls] == [8, 5, 4]
    assert executor.max_context == 64 and executor.max_batch == 2
    with pytest.raises(UsageError, match="another dtype"):
        TensorrtExecutor(
            reference.config, entry(profile=profile), plans, target.embed_tokens.bfloat16(), target.lm_head
        )


def test_the_bindings_have_what_is_called() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    engine = "create_execution_context num_io_tensors get_tensor_name get_tensor_dtype get_tensor_mode get_tensor_profile_shape"
    context = "set_input_shape set_tensor_address infer_shapes get_tensor_shape execute_async_v3"
    used = {
        trt.Runtime: "deserialize_cuda_engine get_engine_validity",
        trt.ICudaEngine: engine,
        trt.IExecutionContext: context,
        trt.TensorIOMode: "INPUT OUTPUT",
        trt.DataType: "FLOAT BF16 HALF INT64 INT32 BOOL",
    }
    assert not [
        f"{owner.__name__}.{name}"
        for owner, names in used.items()
        for name in names.split()
        if not hasattr(owner, name)
    ]


def test_a_damaged_plan_is_refused_by_the_real_library(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    from dspine_export.lowering.engine.backend import open_backend

    path = tmp_path / "draft.plan"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(DependencyError, match=r"(?s)MALFORMED_ENGINE.*build --resume"):
        load_plan(open_backend("tensorrt-rtx"), path, torch.device("cuda"))
    path.write_bytes(b"")
    with pytest.raises(DependencyError, match=r"(?s)an empty file.*build --resume"):
        load_plan(open_backend("tensorrt-rtx"), path, torch.device("cuda"))


def test_a_value_of_the_users_is_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    from dspine_export.lowering.engine.backend import open_backend

    backend, path = open_backend("tensorrt-rtx"), tmp_path / "draft.plan"
    path.touch()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.warns(DspineWarning, match="TF32_OVERRIDE is set to '1'"), pytest.raises(DependencyError):
        load_plan(backend, path, torch.device("cuda"))


def test_plugins_that_the_bundle_lacks(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, SimpleNamespace(engines=(entry(),), files=()))  # type: ignore[arg-type]
    with pytest.raises(DependencyError, match=f"(?s)does not hold.*build --resume {tmp_path}"):
        load_plugins(bundle, CheckedEngine(entry(), {}, has_plugins=True), SimpleNamespace())  # type: ignore[arg-type]
