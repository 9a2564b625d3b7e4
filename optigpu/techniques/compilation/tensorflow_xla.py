"""tensorflow_xla: the model's function compiled by XLA."""

from typing import ClassVar, Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Basis, EngineOptions, Expected, Phase, Technique
from optigpu.vocabulary import Layer, Task


class TensorflowXla(Technique):
    """Compiles the whole function of a Keras model by XLA, for the batch that it runs with."""

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    tasks: ClassVar[tuple[Task, ...]] = (Task.IMAGES,)
    backends: ClassVar[tuple[str, ...]] = ("tensorflow",)
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    summary: ClassVar[str] = "TensorFlow's graph of a classifier compiled by XLA"
    citation: ClassVar[str] = "OpenXLA, XLA: optimizing compiler for machine learning, openxla.org/xla"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.AIM, "elementwise operators are fused; convolutions on a CPU may lose oneDNN's kernels"
        ),
    )

    name: Literal["tensorflow_xla"] = "tensorflow_xla"

    def engine(self, options: EngineOptions) -> EngineOptions:
        """Compiles the graph."""
        return options.but(graph="xla")
