from typing import Literal

from optigpu.techniques.base import EngineOptions, Expected, OnCpuEngine, Phase, Technique
from optigpu.vocabulary import Task


class TensorflowXla(OnCpuEngine, Technique):
    """Compiles the whole function of a Keras model by XLA, for the batch that it runs with."""

    phase = Phase.COMPILATION
    tasks = (Task.IMAGES,)
    backends = ("tensorflow",)
    summary = "TensorFlow's graph of a classifier compiled by XLA"
    citation = "OpenXLA, XLA: optimizing compiler for machine learning, openxla.org/xla"
    expected = (
        Expected("aim", "elementwise operators are fused; convolutions on a CPU may lose oneDNN's kernels"),
    )

    name: Literal["tensorflow_xla"] = "tensorflow_xla"

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(graph="xla")
