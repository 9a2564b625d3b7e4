"""onnx_static_int8: int8 weights and activations of a classifier in ONNX Runtime, with scales fixed before."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Basis, Choice, EngineOptions, Expected, Phase, Technique, Trial
from optigpu.vocabulary import Layer, Task


class OnnxStaticInt8(Technique):
    """Quantizes a classifier's convolutions and matrices as ONNX Runtime's quantize_static does, in QDQ form.

    Weights are int8 with a scale for each output, activations uint8 with one scale and zero point for each tensor, from
    the extremes over `images` random ones.
    """

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.QUANTIZATION
    tasks: ClassVar[tuple[Task, ...]] = (Task.IMAGES,)
    backends: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    summary: ClassVar[str] = (
        "int8 weights and uint8 activations with scales from a few images, in ONNX Runtime"
    )
    citation: ClassVar[str] = (
        "Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, "
        "2018, arXiv:1712.05877"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(Basis.ARITHMETIC, "a quarter of the fp32 bytes of convolutions and matrices"),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.WEIGHTS,)
    error_bound: ClassVar[float] = 0.5
    trials: ClassVar[tuple[Trial, ...]] = (Trial(),)

    name: Literal["onnx_static_int8"] = "onnx_static_int8"
    images: Annotated[int, Field(ge=1, le=256)] = 16

    def engine(self, options: EngineOptions) -> EngineOptions:
        """Stores and multiplies int8; the scales come from so many images."""
        return options.but(weights="int8", products="int8", calibrated_on=self.images)
