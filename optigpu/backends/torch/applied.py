"""A model with the whole stack applied, with torch tensors as arguments and results.

A decoder decodes; other models run in single forward passes, over a prompt or over images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.profiler import profile
from transformers import PreTrainedModel

from optigpu.backends.runtime import Sampling
from optigpu.backends.serving import Slots
from optigpu.backends.torch import cache_options, load_options, mode_options, overriding
from optigpu.backends.torch.attention import activities_of, attention_names, mode_of, require_kernel, within
from optigpu.backends.torch.decoding import LeanDecoder, LibraryDecoder, whole_passes, why_no_steps
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.kv_caches import cache_argument, cache_facts, new_cache, require_cacheable
from optigpu.backends.torch.slots import TorchSlots
from optigpu.hardware.device_kinds import KINDS, torch_name
from optigpu.models.described import Facts
from optigpu.models.loading.footprint import parameters_of, share_gone
from optigpu.models.loading.load import (
    count_weights,
    has_attention,
    load_image_model,
    load_model,
    loaded_facts,
    loaded_image_facts,
)
from optigpu.models.loading.self_written import forked_random, sampled
from optigpu.models.reference import ModelReference, parse_reference
from optigpu.techniques.base import (
    CacheOptions,
    Choice,
    Forward,
    LoadOptions,
    Loop,
    ModeOptions,
    Step,
    Technique,
)
from optigpu.vocabulary import DeviceKind, Task, UnsupportedError

APPLYING = "applying"


class AppliedModel(TorchDevice):
    """A model with an applied stack.

    `reference` is None for a model that the caller had loaded; `instead` is what a stack loaded in its place, if it
    did; `weights` counts the weights before the stack changed them; `quantized` is the share that it quantized.
    """

    reference: ModelReference | None
    instead: ModelReference | None = None
    model: Any
    modes: ModeOptions
    weights: int
    quantized: float | None = None

    def attention_kernels(self, run: Callable[[], object]) -> list[str]:
        """Which attention kernels `run` executes; slow, and so never within a timed request.

        Notes the dtypes of operands of torch's matrix products, and whether a GPU computed. Within compiled code only
        what Inductor left as an operator call is visible. Raises UnsupportedError when the kernels are not the one that
        the stack asks for.
        """
        with profile(activities=activities_of(self.device), record_shapes=True) as profiler:
            run()
        results = profiler.profiler.kineto_results if profiler.profiler else None
        events = results.events() if results else []
        attention = attention_names({event.key for event in profiler.key_averages()})
        require_kernel(self.modes.attention_kernel, attention)
        products = [
            _DTYPES.get(dtype) for each in events if each.name() in _PRODUCTS for dtype in each.dtypes()
        ]
        there = None
        if KINDS[self.device].activity:
            there = computed_there(
                any(event.device_type().name != "CPU" for event in events),
                [bool(event.kernels) for event in profiler.events() or [] if event.name in _LAUNCHING],
            )
        self.notes.record(product_dtypes=sorted({*filter(None, products)}), device_kernels=there)
        return attention

    def _change_model(self, stack: tuple[Technique, ...], progress: Callable[[str], None]) -> None:
        """Changes parts of the loaded model: what `modules` of all techniques left, `finish` lays out."""
        progress(APPLYING)
        self.notes.doing = lambda how_far: progress(f"{APPLYING}: {how_far}")
        for technique in stack:
            quantizes = Choice.WEIGHTS in technique.chosen()
            before = parameters_of(self.model) if quantizes else {}
            technique.modules(self.model, self.notes)
            if quantizes:
                self.quantized = share_gone(before, self.model, self.weights)
        for technique in stack:
            technique.finish(self.model, self.notes)

    def _record_options(self, options: LoadOptions) -> None:
        self.notes.record(
            dtype=options.dtype,
            autograd=self.modes.autograd,
            versions={"transformers": transformers.__version__},
            **({"autocast": self.modes.autocast} if self.modes.autocast else {}),
        )


def load_decoder(
    reference: ModelReference, options: LoadOptions, device: DeviceKind, seed: int
) -> PreTrainedModel:
    return load_model(
        parse_reference(options.instead) if options.instead else reference,
        device=torch_name(place_of(options, device)),
        dtype=options.dtype,
        attention=options.attention,
        seed=seed,
        packed=options.packed,
    )


def place_of(options: LoadOptions, device: DeviceKind) -> DeviceKind:
    """Where a model is loaded that will run on `device`."""
    return device if options.placement == "device" else DeviceKind.CPU


@dataclass(frozen=True)
class Decoded:
    """A generated batch: tokens, int64 [batch, new_tokens], and the seconds to the first and between the others."""

    tokens: torch.Tensor
    gaps_s: list[float]


class DecodingModel(AppliedModel):
    """A decoder with a resolved stack applied, hook by hook in the order of the phases."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        stack: tuple[Technique, ...],
        device: DeviceKind,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        """`model`: a reference, or a loaded model on the device, of which a stack no longer changes the loading."""
        super().__init__(device, seed)
        progress("loading")
        options, cache, self.modes = load_options(stack), cache_options(stack), mode_options(stack)
        if isinstance(model, str):
            self.reference = parse_reference(model)
            self.model = load_decoder(self.reference, options, device, seed)
            if options.instead:
                self.instead = parse_reference(options.instead)
                self.notes.record(loaded_instead={"model": str(self.instead)})
        else:
            self.reference, self.model = None, model
            options = options.but(dtype=str(model.dtype).removeprefix("torch."))
        self.facts = loaded_facts(self.model, self.instead or self.reference)
        self.weights = count_weights(self.model)
        self._mode = mode_of(self.modes, device)
        require_cacheable(self.model, cache)
        self._stepless = why_no_steps(self.model)
        self._change_model(stack, progress)
        self._decoder = self._make_decoder(stack, cache)
        self._decode: Loop = self._decoder.decode
        for technique in stack:
            self._decode = technique.loop(self._decode, self.model, self.notes)
        self._replacing = overriding(stack, "loop")
        self._record_options(options)
        self.notes.record(
            attn_implementation=self.model.config._attn_implementation,
            decode_loop=self._decoder.name,
            **cache_facts(cache, self.facts),
        )
        self.decoded: tuple[int, int] | None = None
        self._places: TorchSlots | None = None

    def generate(self, prompt: torch.Tensor, new_tokens: int) -> Decoded:
        """Greedy decoding of exactly `new_tokens` tokens. `prompt`: [batch, prompt_tokens] of ids."""
        with self._mode():
            tokens, marks = self._decode(prompt, new_tokens, self.clock)
        self._remember(prompt.shape[0], prompt.shape[1] + new_tokens)
        return Decoded(tokens, self.clock.seconds(marks))

    def draw(self, prompt: torch.Tensor, new_tokens: int, sampling: Sampling) -> Decoded:
        """As `generate`, drawn by chance; leaves torch's random state. Raises UnsupportedError for a loop of a
        technique."""
        if self._replacing:
            raise UnsupportedError(
                f"{' + '.join(self._replacing)} replaces the decode loop by a greedy one; leave it out, or leave "
                "temperature and top_p out."
            )
        with forked_random(torch.device(torch_name(self.device))), self._mode():
            torch.manual_seed(sampling.seed)
            tokens, marks = self._decoder.decode(prompt, new_tokens, self.clock, sampling)
        self._remember(prompt.shape[0], prompt.shape[1] + new_tokens)
        return Decoded(tokens, self.clock.seconds(marks))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after `tokens`, float32 [batch, vocabulary]; raises UnsupportedError as `score` does."""
        return next(self._scored(tokens, tokens.shape[1] - 1))

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        The first `prefill` tokens are a prompt, the others go one by one through the step that is timed. Raises
        UnsupportedError where a technique replaced the decode loop by one without a `score` of its own.
        """
        self._remember(tokens.shape[0], tokens.shape[1] + 1)
        return self._scored(tokens, prefill)

    def slots(self, count: int, length: int, block_tokens: int) -> Slots:
        """Places for sequences that join and leave; raises UnsupportedError where a loop of a technique has none."""
        loop: Any = self._decode
        serves = hasattr(loop, "slots")
        if self._replacing and not serves:
            raise UnsupportedError(
                f"{' + '.join(self._replacing)} replaces the decode loop by one of whole batches; leave it out, or "
                "measure generate."
            )
        self.notes.record(
            kv_cache="paged", kv_cache_block_tokens=block_tokens, decode_loop="continuous batching"
        )
        if serves:  # a technique's loop; it enters the stack's mode itself
            places: Slots = loop.slots(count, length, block_tokens)
            return places
        if self._places is None or not self._places.emptied(count, length, block_tokens):
            self._places = TorchSlots(self.model, self._mode, count, length, block_tokens)
        return self._places

    @property
    def steps_are_passes(self) -> bool:
        """Whether a timed step is a pass of the model, and no technique's own loop."""
        return not self._replacing

    def whole(self, tokens: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """Like `score`, by passes over the whole sequence, without a cache or a technique's step."""
        return whole_passes(self.model, tokens, first, self._mode, self._stepless)

    def sample(self, rows: int, length: int) -> torch.Tensor:
        """Sequences drawn from the model at temperature 1 with the seed, int64 [rows, length]."""
        return sampled(self.model, self.facts.vocabulary, rows, length, self.seed)

    def observe(self, prompt: torch.Tensor) -> None:
        self.notes.record(attention_kernels=self.attention_kernels(lambda: self.generate(prompt, 2)))

    def _scored(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        if not self._replacing:
            return self._decoder.score(tokens, prefill)
        loop: Any = self._decode
        if not hasattr(loop, "score"):
            raise UnsupportedError(
                f"{' + '.join(self._replacing)} replaces the decode loop by one that gives no logits; leave it out to "
                "have them checked and quality measured."
            )
        return within(self._mode, loop.score(tokens, prefill))

    def _remember(self, batch: int, length: int) -> None:
        if self.decoded is None or self.decoded[0] != batch or self.decoded[1] < length:
            self.decoded = (batch, length)

    def _make_decoder(
        self, stack: tuple[Technique, ...], cache: CacheOptions
    ) -> LibraryDecoder | LeanDecoder:
        def wrap(step: Step) -> Step:
            for technique in stack:
                step = technique.step(step, self.notes)
            return step

        if not overriding(stack, "step", "loop"):
            return LibraryDecoder(self.model, cache, self.modes, self._mode, self._stepless)
        if self._stepless:
            raise self._stepless.error
        return LeanDecoder(self.model, cache, wrap, self._mode)


_LAUNCHING = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""Operators that multiply matrices and launch their kernels themselves on a GPU."""
_ATTENTIONS = (
    "attention_math",
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
)
_PRODUCTS = {
    *("aten::mv", "aten::addmv", "aten::convolution", "aten::linear"),
    *("mkldnn::_linear_pointwise", "mkl::_mkl_linear", *_LAUNCHING),
    *(f"aten::_scaled_dot_product_{name}" for name in _ATTENTIONS),
}
"""All operators of torch that multiply matrices."""
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
"""The profiler's names of floating-point dtypes, and torch's."""


def computed_there(ran_kernels: bool, products: Sequence[bool]) -> bool:
    """Whether a device ran kernels, and half of the matrix products launched one: a fallback to the CPU runs copies
    there."""
    return ran_kernels and sum(products) >= len(products) / 2


@dataclass(frozen=True)
class Passed:
    """One pass: logits [batch, vocabulary or classes], the most likely of each row [batch], and its seconds."""

    logits: torch.Tensor
    chosen: torch.Tensor
    seconds: float


class PassModel(AppliedModel):
    """As DecodingModel, for single passes; `dtype` is the name of the one that its weights came in."""

    def __init__(
        self,
        task: Task,
        model: str,
        stack: tuple[Technique, ...],
        device: DeviceKind,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(device, seed)
        self.reference = parse_reference(model)
        progress("loading")
        options, self.modes = load_options(stack), mode_options(stack)
        self.dtype = options.dtype
        self.model = load_for(task, self.reference, options, device, seed)
        self.weights = count_weights(self.model)
        self._mode = mode_of(self.modes, device)
        self.facts: Facts
        if task is Task.IMAGES:
            self.facts = loaded_image_facts(self.model)
            self._forward: Forward = ImagePass(self.model)
        else:
            cache, self.facts = cache_options(stack), loaded_facts(self.model, self.reference)
            require_cacheable(self.model, cache)
            if cache.kind != "none" and (stepless := why_no_steps(self.model)):
                raise stepless.error
            self.notes.record(**cache_facts(cache, self.facts))
            self._forward = PrefillPass(self.model, cache)
        self._change_model(stack, progress)
        for technique in stack:
            self._forward = technique.forward(self._forward, self.notes)
        self._record_options(options)
        self.notes.record(**arithmetic_of(self.model, device))

    def forward(self, inputs: torch.Tensor) -> Passed:
        """One pass over ids [batch, length] with an empty cache, or images; timed until each row's best is chosen."""
        with self._mode():
            marks = [self.clock.mark()]
            logits = self._forward(inputs)
            chosen = logits.argmax(dim=-1)
            marks.append(self.clock.mark())
        return Passed(logits, chosen, self.clock.seconds(marks)[0])

    def observe(self, inputs: torch.Tensor) -> None:
        self.notes.record(attention_kernels=self.attention_kernels(lambda: self.forward(inputs)))


def arithmetic_of(model: PreTrainedModel, device: DeviceKind) -> dict[str, Any]:
    """The attention implementation; for a model without attention, cuDNN's precision of float32 convolutions."""
    if has_attention(model.config):
        return {"attn_implementation": model.config._attn_implementation}
    return {"cudnn_tf32": torch.backends.cudnn.allow_tf32} if device is DeviceKind.CUDA else {}


class PrefillPass:
    """The pass that techniques wrap: a prompt through the model into a new cache; the logits of its last token."""

    def __init__(self, model: PreTrainedModel, cache: CacheOptions) -> None:
        self.model = model
        self._options = cache
        self._cache = None if cache.kind == "none" else cache_argument(model)

    def __call__(self, prompt: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocabulary]. `prompt`: int64 [batch, length] of ids."""
        length = prompt.shape[1]
        held = {self._cache: new_cache(self.model, self._options, length)} if self._cache else {}
        outputs = self.model(input_ids=prompt, use_cache=bool(held), logits_to_keep=1, **held)
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits


class ImagePass:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [batch, classes]. `images`: [batch, channels, height, width] in the dtype of the weights."""
        logits: torch.Tensor = self._model(pixel_values=images).logits
        return logits


def load_for(
    task: Task, reference: ModelReference, options: LoadOptions, device: DeviceKind, seed: int
) -> PreTrainedModel:
    """A classifier for images, and a decoder for every other task, loaded as a stack asks for."""
    if task is not Task.IMAGES:
        return load_decoder(reference, options, device, seed)
    place = place_of(options, device)
    return load_image_model(
        reference, device=torch_name(place), dtype=options.dtype, attention=options.attention, seed=seed
    )
