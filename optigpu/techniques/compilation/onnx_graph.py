from typing import Literal

from optigpu.techniques.base import ON_MODELS, EngineOptions, Expected, OnCpuEngine, Phase, Technique, Trial


class OnnxGraph(OnCpuEngine, Technique):
    """Sets the session's graph optimization level: the engine's default, and the baseline's, is "all".

    "disabled" runs the graph as it was written, "basic" folds constants and removes what has no effect, "extended" also
    fuses operators, and "all" also changes the layout of tensors, for convolutions above all.
    """

    phase = Phase.COMPILATION
    tasks = ON_MODELS
    backends = ("onnxruntime",)
    summary = "how far ONNX Runtime rewrites its graph; less than its default shows what that buys"
    citation = "Microsoft, ONNX Runtime, graph optimizations, 2019, onnxruntime.ai/docs/performance"
    expected = (
        Expected(
            "aim",
            "slower than the baseline: by little for a decoder, whose graph is written fused already, and by more for "
            "convolutions",
        ),
    )
    cautionary = True
    trials = (Trial(), Trial({"level": "extended"}))

    name: Literal["onnx_graph"] = "onnx_graph"
    level: Literal["disabled", "basic", "extended", "all"] = "disabled"

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(graph=self.level)
