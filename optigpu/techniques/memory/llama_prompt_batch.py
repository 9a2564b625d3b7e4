"""llama_prompt_batch: how many tokens of a prompt go through llama.cpp's or ik_llama.cpp's layers at once."""

from typing import ClassVar, Literal

from pydantic import Field

from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Basis, EngineOptions, Expected, Phase, Technique, Trial
from optigpu.vocabulary import Layer


class LlamaPromptBatch(Technique):
    """Cuts prompts into passes of at most so many tokens (llama.cpp's n_ubatch, 512 without it)."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.CACHE
    backends: ClassVar[tuple[str, ...]] = ("llama_cpp", "ik_llama_cpp")
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    summary: ClassVar[str] = "llama.cpp's prompts in passes of so many tokens"
    citation: ClassVar[str] = "Agrawal et al., Sarathi, 2023, arXiv:2308.16369"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "activations take as many rows as a pass has tokens; weights are read once for each pass, so few tokens "
            "make the first token late",
        ),
    )
    cautionary: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (Trial({"tokens": 8}),)

    name: Literal["llama_prompt_batch"] = "llama_prompt_batch"
    tokens: int = Field(128, ge=1, le=65536)

    def engine(self, options: EngineOptions) -> EngineOptions:
        """Says how many tokens a pass has."""
        return options.but(together=self.tokens)
