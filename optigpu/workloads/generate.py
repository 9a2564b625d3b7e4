"""generate: greedy decoding of a batch of prompts, prefill and decode reported apart."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from optigpu.models.facts import ModelFacts
from optigpu.workloads.base import Check, DecodingRuntime, Workload

Tokens = Annotated[int, Field(ge=1, le=131072)]


class Generate(Workload):
    """Greedy decoding of exactly `new_tokens` tokens after `prompt_tokens` random ones, for each of a batch."""

    summary: ClassVar[str] = "greedy text generation, prefill and decode reported apart"
    primary: ClassVar[str] = "tokens_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("ttft_s", "tpot_s", "tokens_per_s", "latency_s", "requests_per_s")

    kind: Literal["generate"] = "generate"
    prompt_tokens: Tokens = 128
    new_tokens: Annotated[int, Field(ge=2, le=131072)] = 128
    batch_size: int = Field(1, ge=1, le=1024)

    def check(self, model: ModelFacts) -> str | None:
        """Prompt and continuation must fit the model's context."""
        total = self.prompt_tokens + self.new_tokens
        if total > model.context:
            return (
                f"prompt_tokens + new_tokens = {total} exceeds the model's context of {model.context} tokens; "
                "ask for fewer."
            )
        return None

    def prepare(self, runtime: DecodingRuntime) -> "GenerateRequest":
        """Draws the prompts from the runtime's seed."""
        import torch

        source = torch.Generator().manual_seed(runtime.seed)
        return GenerateRequest(runtime, source, (self.batch_size, self.prompt_tokens), self.new_tokens)


class GenerateRequest:
    """The same prompts, decoded again and again."""

    def __init__(
        self, runtime: DecodingRuntime, source: Any, shape: tuple[int, int], new_tokens: int
    ) -> None:
        """`source` is the torch generator that the prompts, int64 of `shape` [batch, prompt_tokens], are drawn from."""
        import torch

        self._runtime = runtime
        self._source = source
        vocabulary = runtime.facts.vocabulary
        self._prompt = torch.randint(vocabulary, shape, generator=source).to(runtime.device.value)
        self._new_tokens = new_tokens
        self._gaps_s: list[float] = []

    def run(self) -> Mapping[str, float]:
        """One timed request; the first token counts as prefill, the others as decode."""
        gaps_s = self._runtime.generate(self._prompt, self._new_tokens).gaps_s
        self._gaps_s = gaps_s
        batch = self._prompt.shape[0]
        decode_s = sum(gaps_s[1:])
        latency_s = gaps_s[0] + decode_s
        return {
            "ttft_s": gaps_s[0],
            "tpot_s": decode_s / (self._new_tokens - 1),
            "tokens_per_s": (self._new_tokens - 1) * batch / decode_s,
            "latency_s": latency_s,
            "requests_per_s": batch / latency_s,
        }

    def check(self) -> Check:
        """Counts the tokens, and looks at the logits of the last step for NaN and infinity."""
        import torch

        generation = self._runtime.generate(self._prompt, self._new_tokens)
        request_s = sum(generation.gaps_s)
        expected = (self._prompt.shape[0], self._new_tokens)
        if tuple(generation.tokens.shape) != expected:
            shape = tuple(generation.tokens.shape)
            return Check(request_s, f"Decoding gave tokens of shape {shape} instead of {expected}.")
        logits = self._runtime.logits(torch.cat([self._prompt, generation.tokens[:, :-1]], dim=1))
        wrong = int((~torch.isfinite(logits)).sum())
        if wrong:
            return Check(
                request_s, f"{wrong} of {logits.numel()} logits of the last step are NaN or infinite."
            )
        return Check(request_s)

    def observe(self) -> None:
        """Records which kernels run."""
        self._runtime.observe(self._prompt)

    def described(self) -> Mapping[str, Sequence[float]]:
        """The time of each token after the first."""
        return {"token_s": self._gaps_s[1:]}

    def fresh(self) -> "GenerateRequest":
        """The next prompts of the same source."""
        shape = (self._prompt.shape[0], self._prompt.shape[1])
        return GenerateRequest(self._runtime, self._source, shape, self._new_tokens)
