"""tensorflow_xla asks the engine to compile its graph."""

from optigpu.techniques.base import engine_options
from optigpu.techniques.compilation.tensorflow_xla import TensorflowXla
from tests.engine.tiny_models import assert_needs_hook


def test_the_graph_is_compiled_by_xla() -> None:
    technique = TensorflowXla()

    def claim() -> None:
        assert engine_options((technique,)).graph == "xla"

    assert_needs_hook(technique, "engine", claim)
