"""The two decode loops: the library's own `generate`, and a lean loop around one decode step.

The library's loop runs as long as nothing in the stack overrides `step` or `loop`, so that the baseline is plain
Hugging Face. Both take the most likely tokens or draw them, and mark the clock once before the prompt and once after
each token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import (
    Cache,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from optigpu.backends.runtime import Sampling, UnlikeWholeError
from optigpu.backends.torch.attention import Mode
from optigpu.backends.torch.device import Clock
from optigpu.backends.torch.kv_caches import cache_argument, new_cache, no_steps
from optigpu.models.families import family_of
from optigpu.models.loading.checkpoint import count_packed
from optigpu.surgery.sameness import STEPS, TEXT, rounding_of, told
from optigpu.techniques.base import CacheOptions, ModeOptions, Step
from optigpu.vocabulary import UnsupportedError

LOGITS_A_PASS = 2**24
"""How many logits one pass over a whole sequence may return: 64 MiB of float32."""


@dataclass(frozen=True)
class Stepless:
    """Why the steps of a plain model cannot be asked for their logits, as a sentence. `alike`: what it decodes is what
    passes over the whole text predict."""

    why: str
    alike: bool = True

    @property
    def error(self) -> UnsupportedError:
        return (UnsupportedError if self.alike else UnlikeWholeError)(self.why)


class LibraryDecoder:
    """transformers' own `generate` with its defaults but for the choice of tokens, the cache, and no end token."""

    name = "transformers generate"

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheOptions,
        modes: ModeOptions,
        mode: Mode,
        stepless: Stepless | None = None,
    ) -> None:
        """`mode` is what `score` enters, and is made of `modes`; `generate` by itself would record no gradients.
        `stepless`: of `why_no_steps`."""
        self._model = model
        self._cache = cache
        self._mode = mode
        self._stepless = stepless
        recording = modes.autograd == "grad"
        kind: Any = type(model)
        self._generate: Any = partial(kind.generate.__wrapped__, model) if recording else model.generate

    def decode(
        self, prompt: torch.Tensor, new_tokens: int, clock: Clock, sampling: Sampling | None = None
    ) -> tuple[torch.Tensor, list[Any]]:
        """Tokens [batch, new_tokens] and new_tokens + 1 marks. `prompt`: [batch, prompt_tokens] of ids.

        Without `sampling` each token is the most likely one; with it tokens are drawn with torch's random numbers,
        which the caller has seeded. The caller has entered the stack's mode.
        """
        streamer = _MarkingStreamer(clock)
        options = self._options(prompt.shape[1] + new_tokens) | {"do_sample": False}
        if sampling:  # its own top_k of 50 would be a limit that nobody set
            options |= {"do_sample": True, "top_k": 0}
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        tokens = self._generate(prompt, max_new_tokens=new_tokens, streamer=streamer, **options)
        return tokens[:, prompt.shape[1] :], streamer.marks

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        The first `prefill` tokens (0 and more) are a prompt; each other is decoded as a timed token is, and not chosen.
        Nothing else may be decoded before the iteration has ended. Raises UnsupportedError for a model without steps.
        """
        if self._cache.kind == "none":
            return whole_passes(self._model, tokens, prefill, self._mode, self._stepless)
        if self._stepless:
            raise self._stepless.error
        step = DecodeStep(self._model)
        cache = new_cache(self._model, self._cache, tokens.shape[1])
        return _forced(step, step, cache, tokens, prefill, self._mode)

    def _options(self, length: int) -> dict[str, Any]:
        if self._cache.kind == "none":
            return {"use_cache": False}
        if self._cache == CacheOptions(kind="static"):
            # The library compiles a static cache's step by itself on CUDA; compilation is a technique of its own.
            return {"cache_implementation": "static", "disable_compile": True}
        if self._cache == CacheOptions():
            return {}
        return {"past_key_values": new_cache(self._model, self._cache, length), "disable_compile": True}


class _MarkingStreamer:
    """Marks the start, and each token that it receives from `generate`, which hands it the prompt first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompt_seen = False
        self.marks = [clock.mark()]

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.marks.append(self._clock.mark())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


class DecodeStep:
    """The plain decode step that techniques wrap: one forward pass over one token of each sequence.

    Called with tokens [batch, 1], position [1, 1] (the index of these tokens in their sequences) and a transformers
    Cache, which it updates in place; returns the next tokens [batch, 1] and their logits [batch, vocabulary].
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._wants_mask = family_of(model.config.model_type).needs_mask
        self._cache = cache_argument(model)

    def __call__(
        self, tokens: torch.Tensor, position: torch.Tensor, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = None
        if self._wants_mask and cache.is_compileable:
            # OPT makes a mask as long as what is cached, which a compiled graph cannot know; a full one is equal.
            layer: Any = cache.layers[0]
            shape = (tokens.shape[0], layer.max_cache_len)
            mask = torch.ones(shape, device=tokens.device, dtype=torch.int64)
        logits = self.model(
            input_ids=tokens,
            position_ids=position,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache: cache},
        ).logits[:, -1]
        return logits.argmax(dim=-1, keepdim=True), logits

    def prefill(self, prompt: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """Fills the cache with the prompt ([batch, length]) and returns the first tokens and their logits."""
        whole = self.model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{self._cache: cache}).logits
        logits = whole[:, -1]
        return logits.argmax(dim=-1, keepdim=True), logits


Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The next tokens [batch, 1] from the most likely ones [batch, 1] and the logits [batch, vocabulary] of a step."""


def drawing(sampling: Sampling) -> Choose:
    """Draws tokens by the operations of transformers' `generate` in their order, so that both loops draw the same."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    def draw(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # neither of the two looks at the tokens so far
        scores = warpers(cast(torch.LongTensor, tokens), logits.to(torch.float32, copy=True))
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1)

    return draw


class LeanDecoder:
    """Prefill, then one call of the step for each token; nothing waits for the device in between.

    A static cache is kept and reset between requests, so that its addresses stay what a compiled graph knows.
    """

    name = "lean loop"

    def __init__(
        self, model: PreTrainedModel, cache: CacheOptions, wrap: Callable[[Step], Step], mode: Mode
    ) -> None:
        if cache.kind == "none":
            raise UnsupportedError(
                "A technique that replaces the decode step needs a key-value cache; leave no_kv_cache out."
            )
        self._model = model
        self._options = cache
        self._mode = mode
        self._plain = DecodeStep(model)
        self._step = wrap(self._plain)
        self._kept: tuple[Cache, int, int] | None = None

    def decode(
        self, prompt: torch.Tensor, new_tokens: int, clock: Clock, sampling: Sampling | None = None
    ) -> tuple[torch.Tensor, list[Any]]:
        """As LibraryDecoder's; reset and prefill belong to the time to the first token."""
        # Cloned, since a CUDA graph writes its result where the last one stood.
        choose: Choose = drawing(sampling) if sampling else lambda tokens, _: tokens.clone()
        marks = [clock.mark()]
        cache = self._cache(prompt.shape[0], prompt.shape[1] + new_tokens)
        token = choose(*self._plain.prefill(prompt, cache))
        position = _position(prompt, prompt.shape[1])
        tokens = [token]
        marks.append(clock.mark())
        for _ in range(new_tokens - 1):
            token = choose(*self._step(token, position, cache))
            position = position + 1
            tokens.append(token)
            marks.append(clock.mark())
        return torch.cat(tokens, dim=1), marks

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """As LibraryDecoder's, by the very step that is timed, with the cache that it is timed with."""
        with self._mode():
            cache = self._cache(*tokens.shape)
        return _forced(self._plain, self._step, cache, tokens, prefill, self._mode)

    def _cache(self, batch: int, length: int) -> Cache:
        if self._options.kind != "static":
            return new_cache(self._model, self._options, length)
        if self._kept is None or self._kept[1] != batch or self._kept[2] < length:
            self._kept = new_cache(self._model, self._options, length), batch, length
        else:
            self._kept[0].reset()
        return self._kept[0]


def why_no_steps(model: PreTrainedModel) -> Stepless | None:
    """Why the steps of a plain model cannot be asked for their logits, or None.

    A model that the table of families does not hold is asked itself: steps after a short text, and a pass over all of
    it, predict the same, and what follows a token changes nothing. Raises UnsupportedError if no pass runs.
    """
    family = model.config.model_type
    if family_of(family).decoder or count_packed(model):
        return None

    def unfit(why: str) -> str:
        return f"transformers cannot run this {family} model here: {why}; correct its config.json."

    def refused(why: str) -> str:
        return no_steps(model, f"do not go on from a cache of transformers ({why})")

    try:
        step = DecodeStep(model)
    except UnsupportedError as error:
        return Stepless(str(error))
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(1, TEXT + STEPS + 1, device=model.device)[None] % vocabulary
    with told(unfit):
        wanted = torch.cat(list(whole_passes(model, tokens, TEXT, torch.no_grad)))
        alone = next(whole_passes(model, tokens[:, : TEXT + 1], TEXT, torch.no_grad))
    if _differ(model, alone, wanted[:1]):
        return Stepless(no_steps(model, "predict a token by those behind it as well"), alike=False)
    try:
        with told(refused):
            cache = new_cache(model, CacheOptions(), TEXT + STEPS)
            found = torch.cat(list(_forced(step, step, cache, tokens, TEXT, torch.no_grad)))
    except UnsupportedError as error:
        return Stepless(str(error))
    if _differ(model, found, wanted):
        return Stepless(
            no_steps(model, "predict other tokens from a cache than from the whole text"), alike=False
        )
    return None


def _differ(model: PreTrainedModel, found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """By more than rounding; in 16 bits a router may choose another expert, which no bound of rounding holds."""
    return model.dtype == torch.float32 and float((found - wanted).abs().max()) > rounding_of(model, wanted)


def whole_passes(
    model: PreTrainedModel, tokens: torch.Tensor, first: int, mode: Mode, stepless: Stepless | None = None
) -> Iterator[torch.Tensor]:
    """As `score`, by passes over the whole sequence so far, uncached, each for as many positions as LOGITS_A_PASS
    allows: for one where what follows may change a prediction."""
    batch, length = tokens.shape
    most = LOGITS_A_PASS if stepless is None or stepless.alike else 0
    at_once = max(1, most // (batch * model.config.get_text_config(decoder=True).vocab_size))
    for start in range(first, length, at_once):
        end = min(start + at_once, length)
        # The mode is left before each yield: it would hold for the caller as well.
        with mode():
            logits = model(input_ids=tokens[:, :end], use_cache=False, logits_to_keep=end - start).logits
        # Some families return the logits of all positions whatever they are asked for.
        for index in range(start - end, 0):
            yield logits[:, index].detach().float()


def _forced(
    plain: DecodeStep, step: Step, cache: Cache, tokens: torch.Tensor, prefill: int, mode: Mode
) -> Iterator[torch.Tensor]:
    """`prefill` tokens through the plain step at once, the others through `step` one after the other."""
    with mode():
        if prefill:
            plain.prefill(tokens[:, :prefill], cache)
        position = _position(tokens, prefill)
    for index in range(prefill, tokens.shape[1]):
        with mode():
            # A compiled step knows the strides of the tokens that it is given.
            token = tokens[:, index : index + 1].clone(memory_format=torch.contiguous_format)
            # A CUDA graph writes its result where the last one stood.
            logits = step(token, position, cache)[1].detach().to(torch.float32, copy=True)
            position = position + 1
        yield logits


def _position(like: torch.Tensor, index: int) -> torch.Tensor:
    return torch.full((1, 1), index, dtype=torch.int64, device=like.device)
