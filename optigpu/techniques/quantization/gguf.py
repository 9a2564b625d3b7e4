"""gguf: weights in llama.cpp's file format, in one of its number formats."""

from typing import ClassVar, Literal

from optigpu.techniques.base import GgufType, LoadOptions, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer


class Gguf(Technique):
    """Runs the model from a GGUF file whose matrices have that type; a float16 key-value cache comes with it.

    llama.cpp quantizes the file without an importance matrix. Vectors stay in float32, and llama.cpp gives some
    matrices more bits than the name says: a tied embedding is Q6_K in a file of 4 bits.
    """

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.QUANTIZATION
    backends: ClassVar[tuple[str, ...]] = ("llama_cpp",)
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)
    summary: ClassVar[str] = "llama.cpp's weights of 4, 8 or 16 bits, from a GGUF file written for it"
    citation: ClassVar[str] = "Gerganov et al., llama.cpp, 2023, github.com/ggml-org/llama.cpp"
    expected: ClassVar[str] = (
        "on a CPU, decoding of GPT-2 at about 9x (4 bits), 6x (8 bits) or 4x (16 bits) of eager fp32 in torch"
    )

    name: Literal["gguf"] = "gguf"
    type: GgufType = "Q4_0"

    def load(self, options: LoadOptions) -> LoadOptions:
        """Loads the weights from a GGUF file of that type."""
        return options.but(gguf=self.type)
