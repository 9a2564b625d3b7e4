from typing import Literal

from pydantic import Field

from optigpu.techniques.base import CacheTechnique, EngineOptions, Expected, OnCpuEngine, Trial


class LlamaPromptBatch(OnCpuEngine, CacheTechnique):
    """Cuts prompts into passes of at most so many tokens (llama.cpp's n_ubatch, 512 without it)."""

    backends = ("llama_cpp", "ik_llama_cpp")
    summary = "llama.cpp's prompts in passes of so many tokens"
    citation = "Agrawal et al., Sarathi, 2023, arXiv:2308.16369"
    expected = (
        Expected(
            "arithmetic",
            "activations take as many rows as a pass has tokens; weights are read once for each pass, so few tokens "
            "make the first token late",
        ),
    )
    cautionary = True
    trials = (Trial({"tokens": 8}),)

    name: Literal["llama_prompt_batch"] = "llama_prompt_batch"
    tokens: int = Field(128, ge=1, le=65536)

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(together=self.tokens)
