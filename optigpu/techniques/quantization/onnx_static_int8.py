from typing import Annotated, Literal

from pydantic import Field

from optigpu.techniques.base import EngineOptions, Expected, OnCpuEngine, Trial, WeightsTechnique
from optigpu.vocabulary import Task


class OnnxStaticInt8(OnCpuEngine, WeightsTechnique):
    """Quantizes a classifier's convolutions and matrices as ONNX Runtime's quantize_static does, in QDQ form.

    Weights are int8 with a scale for each output, activations uint8 with one scale and zero point for each tensor, from
    the extremes over `images` random ones.
    """

    tasks = (Task.IMAGES,)
    backends = ("onnxruntime",)
    summary = "int8 weights and uint8 activations with scales from a few images, in ONNX Runtime"
    citation = (
        "Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, "
        "2018, arXiv:1712.05877"
    )
    expected = (Expected("arithmetic", "a quarter of the fp32 bytes of convolutions and matrices"),)
    error_bound = 0.5
    trials = (Trial(),)

    name: Literal["onnx_static_int8"] = "onnx_static_int8"
    images: Annotated[int, Field(ge=1, le=256)] = 16

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(weights="int8", products="int8", calibrated_on=self.images)
