"""gguf: weights in llama.cpp's file format, in one of its number formats."""

from typing import ClassVar, Literal

from optigpu.techniques.base import Basis, Expected, GgufType, LoadOptions, Phase, Technique, Trial
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
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.MEASURED,
            "GPT-2 decoded on two Zen 4 cores that others used as well: 240.8 tokens/s in Q4_0, 168.6 in Q8_0 and "
            "109.3 in F16, beside 25.5 in eager fp32",
            "results/vs_peers.md",
        ),
    )
    error_bound: ClassVar[float] = 0.5
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(),
        Trial({"type": "Q8_0"}, error_bound=0.1),
    )

    name: Literal["gguf"] = "gguf"
    type: GgufType = "Q4_0"

    def load(self, options: LoadOptions) -> LoadOptions:
        """Loads the weights from a GGUF file of that type."""
        return options.but(gguf=self.type)
