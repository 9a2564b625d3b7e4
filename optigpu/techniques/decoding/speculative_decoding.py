from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.models.described import StoredWeights, decoder_shape, facts_of
from optigpu.models.reference import parse_reference
from optigpu.surgery.extras import other_vocabulary
from optigpu.techniques.base import Expected, Loop, Model, Notes, Phase, Technique, Trial
from optigpu.vocabulary import DeviceKind, as_value_error

NGRAM = 3
_OWN_CACHE = "guesses are verified with the library's growing cache, from which wrong ones are taken back"


class SpeculativeDecoding(Technique):
    """Verifies up to `lookahead` guessed tokens in one forward pass and keeps those that greedy decoding would choose.

    Without a `draft` the guesses are what followed the last `ngram` tokens (or fewer) when they were last seen in the
    sequence. A `draft` is the reference of a smaller model with the same vocabulary, which guesses greedily; it comes
    in the same dtype, and nothing else of the stack is applied to it. One sequence at a time.

    With native_decode the operator guesses and verifies, in the arithmetic of its decode step, and a draft is packed as
    the model is. It guesses less, down to nothing, while wrong guesses cost more time than right ones save.

    The output is that of greedy decoding. The first request of a process is decoded by the plain loop as well and
    compared; a token of another choice is accepted as a tie only where the plain model's own rounding explains it.
    """

    phase = Phase.DECODING
    summary = "several tokens are guessed and verified in one pass, with the output of greedy decoding"
    citation = (
        "Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2022, arXiv:2211.17192; Saxena, "
        "Prompt Lookup Decoding, 2023, github.com/apoorvumang/prompt-lookup-decoding"
    )
    expected = (
        Expected(
            "literature", "2x to 3x with a good draft, for T5-XXL", "Leviathan et al., 2022, arXiv:2211.17192"
        ),
        Expected(
            "aim",
            "2x to 3x at batch 1 where most guesses are right, as in text that repeats its prompt; slower "
            "where they are wrong. Models with random weights repeat themselves, so presets overstate the "
            "gain",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "guesses are verified against a cache",
        "static_kv_cache": _OWN_CACHE,
        "int8_kv_cache": _OWN_CACHE,
        "sliding_kv_cache": _OWN_CACHE,
        "torch_compile": "passes have as many tokens as were guessed, and a compiled step has one",
        "export_aot": "passes have as many tokens as were guessed, and an exported step has one",
        "cuda_graphs": "passes have as many tokens as were guessed, and a recorded step has one",
        "grad_enabled": "guesses that were wrong would keep their gradients",
    }
    trials = (Trial(), Trial({"draft": "bundled:tiny"}))
    only_when_asked = True  # What it buys depends on the text

    name: Literal["speculative_decoding"] = "speculative_decoding"
    draft: str | None = Field(None, max_length=200, examples=["bundled:tiny"])
    lookahead: int = Field(5, ge=1, le=64)
    ngram: int = Field(NGRAM, ge=1, le=16)

    @field_validator("draft")
    @classmethod
    def _canonical_reference(cls, draft: str | None) -> str | None:
        return None if draft is None else str(as_value_error(parse_reference, draft))

    @model_validator(mode="after")
    def _either_way(self) -> Self:
        if self.draft is not None and self.ngram != NGRAM:
            raise ValueError(
                "ngram applies only to guesses from the sequence itself; leave out either ngram or draft"
            )
        return self

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        drafting = facts_of(parse_reference(self.draft)) if self.draft else None
        if drafting is None or model is None:
            return None
        return other_vocabulary(str(self.draft), drafting.vocabulary, model.vocabulary)

    def fits(self, workload: Any) -> str | None:
        """Sequences of a batch would go on at different lengths."""
        sizes = (getattr(workload, "batch_size", 1), *getattr(workload, "batch_sizes", ()))
        if max(sizes) > 1:
            return "speculative_decoding decodes one sequence at a time; set batch_size to 1."
        return super().fits(workload)

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """A draft is loaded beside the model, in its dtype."""
        if self.draft is None:
            return weights
        draft = decoder_shape(parse_reference(self.draft)).stored(weights.width)
        return weights.but(other_bytes=weights.other_bytes + draft.bytes)

    def loop(self, loop: Loop, model: Model, notes: Notes) -> Loop:
        """Guesses and verifies.

        Raises UnsupportedError, with the model left as it was, when the draft cannot be loaded or has another
        vocabulary.
        """
        from optigpu.surgery import speculation

        drafting = None if self.draft is None else speculation.load_draft(self.draft, model, notes)
        # A loop of another technique may verify guesses by itself.
        speculated: Callable[..., Loop] | None = getattr(loop, "speculated", None)
        if speculated is None:
            draft = (
                speculation.PromptLookup(self.ngram) if drafting is None else speculation.DraftModel(drafting)
            )
            made: Loop = speculation.SpeculativeLoop(loop, model, draft, self.lookahead, notes)
        else:
            made = speculated(drafting, self.ngram, self.lookahead)
        if drafting is not None:
            model.add_module("speculative_draft", drafting)  # in memory as well, and counted
        notes.record(speculation=self.draft or f"prompt lookup of up to {self.ngram} tokens")
        return made
