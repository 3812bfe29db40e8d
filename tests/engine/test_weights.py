"""External weights: found wherever they lie, and never read past their end."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from dspine_export.errors import BuildError
from dspine_export.lowering.engine.weights import MappedWeights, external_weights, weight_bytes
from tests.engine.graphs import context_graph


class RecordingParser:
    """Copies what it is pointed at, as a real parser would."""

    def __init__(self) -> None:
        self.seen: dict[str, bytes] = {}

    def load_initializer(self, name: str, address: int, size: int) -> bool:
        import ctypes

        self.seen[name] = ctypes.string_at(address, size)
        return True


@pytest.mark.parametrize("data", ["context.bin", "../drafter/model.safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_arrives_at_the_parser(tmp_path: Path, data: str, dtype: str) -> None:
    contents = context_graph(tmp_path / "onnx" / "context.onnx", dtype=dtype, data=Path(data))
    model = onnx.load(tmp_path / "onnx" / "context.onnx", load_external_data=False)
    parser = RecordingParser()
    with MappedWeights(external_weights(model, tmp_path / "onnx")) as maps:
        maps.load_into(parser)
    assert parser.seen == contents
    assert weight_bytes(model) == sum(map(len, contents.values()))


def test_truncated_file_is_refused_before_parsing(tmp_path: Path) -> None:
    context_graph(tmp_path / "context.onnx")
    data = tmp_path / "context.bin"
    data.write_bytes(data.read_bytes()[:-1])
    model = onnx.load(tmp_path / "context.onnx", load_external_data=False)
    with pytest.raises(BuildError, match=r"truncated\n.*'norm'"):
        external_weights(model, tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    context_graph(tmp_path / "context.onnx")
    (tmp_path / "context.bin").unlink()
    model = onnx.load(tmp_path / "context.onnx", load_external_data=False)
    with pytest.raises(BuildError, match=r"missing\n.*context\.bin"):
        external_weights(model, tmp_path)


@pytest.mark.parametrize(("key", "bad"), [("length", "8"), ("offset", "-4")])
def test_wrong_extent_is_refused(tmp_path: Path, key: str, bad: str) -> None:
    context_graph(tmp_path / "context.onnx")
    model = onnx.load(tmp_path / "context.onnx", load_external_data=False)
    next(entry for entry in model.graph.initializer[0].external_data if entry.key == key).value = bad
    with pytest.raises(BuildError, match="'fc'"):
        external_weights(model, tmp_path)
