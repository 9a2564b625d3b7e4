"""onnx_graph: how far ONNX Runtime rewrites its graph before it runs."""

from typing import ClassVar, Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import ON_MODELS, Basis, EngineOptions, Expected, Phase, Technique, Trial
from optigpu.vocabulary import Layer, Task


class OnnxGraph(Technique):
    """Sets the session's graph optimization level: the engine's default, and the baseline's, is "all".

    "disabled" runs the graph as it was written, "basic" folds constants and removes what has no effect, "extended" also
    fuses operators, and "all" also changes the layout of tensors, for convolutions above all.
    """

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    backends: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    summary: ClassVar[str] = (
        "how far ONNX Runtime rewrites its graph; less than its default shows what that buys"
    )
    citation: ClassVar[str] = (
        "Microsoft, ONNX Runtime, graph optimizations, 2019, onnxruntime.ai/docs/performance"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.AIM,
            "slower than the baseline: by little for a decoder, whose graph is written fused already, and by more for "
            "convolutions",
        ),
    )
    cautionary: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (Trial(), Trial({"level": "extended"}))

    name: Literal["onnx_graph"] = "onnx_graph"
    level: Literal["disabled", "basic", "extended", "all"] = "disabled"

    def engine(self, options: EngineOptions) -> EngineOptions:
        """Rewrites the graph so far."""
        return options.but(graph=self.level)
