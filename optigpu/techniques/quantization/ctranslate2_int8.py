"""ctranslate2_int8: weights and products of 8 bits in CTranslate2."""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.models.tensors import Matrix, Part
from optigpu.ops.layouts import ctranslate2_int8_bytes
from optigpu.techniques.base import Basis, Choice, EngineOptions, Expected, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer

if TYPE_CHECKING:
    from optigpu.models.tensors import StoredWeights


class Ctranslate2Int8(Technique):
    """Stores the embedding, the head and the layers as int8 with a scale for each row, and rounds activations to int8.

    What else is computed stays in float32.
    """

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.QUANTIZATION
    backends: ClassVar[tuple[str, ...]] = ("ctranslate2",)
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    choices: ClassVar[tuple[Choice, ...]] = (Choice.WEIGHTS,)
    summary: ClassVar[str] = "CTranslate2 with weights and products of 8 bits"
    citation: ClassVar[str] = "Klein et al., OpenNMT, 2020, arXiv:2005.12398; github.com/OpenNMT/CTranslate2"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(Basis.ARITHMETIC, "a quarter of fp32's bytes to read at each step of decoding"),
    )
    error_bound: ClassVar[float] = 0.2

    name: Literal["ctranslate2_int8"] = "ctranslate2_int8"

    def engine(self, options: EngineOptions) -> EngineOptions:
        """CTranslate2 has a type of that name."""
        return options.but(weights="int8_float32")

    def stored(self, weights: "StoredWeights", device: DeviceKind) -> "StoredWeights":
        """Every matrix but that of the positions."""
        return weights.but(matrices=tuple(_packed(matrix, weights.tied) for matrix in weights.matrices))


def _packed(matrix: Matrix, tied: bool) -> Matrix:
    if matrix.part is Part.POSITIONS or (matrix.part is Part.HEAD and tied):
        return matrix
    return replace(matrix, bytes=ctranslate2_int8_bytes(matrix.outputs, matrix.inner))
