from typing import Annotated, Literal

from pydantic import Field

from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Choice, EngineOptions, Expected, Phase, Technique, Trial
from optigpu.vocabulary import Layer, Task


class OnnxStaticInt8(Technique):
    """Quantizes a classifier's convolutions and matrices as ONNX Runtime's quantize_static does, in QDQ form.

    Weights are int8 with a scale for each output, activations uint8 with one scale and zero point for each tensor, from
    the extremes over `images` random ones.
    """

    layer = Layer.QUANTIZATION
    phase = Phase.QUANTIZATION
    tasks = (Task.IMAGES,)
    backends = ("onnxruntime",)
    abilities = (Ability.CPU_ENGINE,)
    summary = "int8 weights and uint8 activations with scales from a few images, in ONNX Runtime"
    citation = (
        "Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, "
        "2018, arXiv:1712.05877"
    )
    expected = (Expected("arithmetic", "a quarter of the fp32 bytes of convolutions and matrices"),)
    choices = (Choice.WEIGHTS,)
    error_bound = 0.5
    trials = (Trial(),)

    name: Literal["onnx_static_int8"] = "onnx_static_int8"
    images: Annotated[int, Field(ge=1, le=256)] = 16

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(weights="int8", products="int8", calibrated_on=self.images)
