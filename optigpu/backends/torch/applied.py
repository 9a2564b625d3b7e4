"""A decoder with the whole stack applied, with torch tensors as arguments and results.

What a run really did comes from a profile that is taken apart from timed requests: attention kernels, the numbers that
matrices were multiplied in, and whether the device computed at all.
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
from optigpu.backends.torch.attention import activities_of, attention_names, mode_of, require_kernel, within
from optigpu.backends.torch.decoding import Decoder, LeanDecoder, LibraryDecoder, whole_passes
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.kv_caches import cache_facts, require_cacheable
from optigpu.backends.torch.slots import ServingLoop, TorchSlots
from optigpu.backends.torch.stack import cache_options, load_options, mode_options, overriding
from optigpu.hardware.device_kinds import KINDS, torch_name
from optigpu.models.loading.footprint import parameters_of, share_gone
from optigpu.models.loading.load import count_weights, load_model, loaded_facts
from optigpu.models.loading.self_written import forked_random, sampled
from optigpu.models.reference import ModelReference, parse_reference
from optigpu.techniques.base import CacheOptions, Choice, LoadOptions, Loop, ModeOptions, Step, Technique
from optigpu.vocabulary import DeviceKind, UnsupportedError


class AppliedModel(TorchDevice):
    """The base class of models with an applied stack.

    `reference` is the job's model, None for one that the caller had already loaded; `instead` is the one that a stack
    loaded in its place, if it did; `model` is the transformers model with the attributes of its family; `weights`
    counts its weights before the stack changed them; `quantized` is the share of them that it quantized, None without
    a technique that does.
    """

    reference: ModelReference | None
    instead: ModelReference | None = None
    model: Any
    modes: ModeOptions
    weights: int
    quantized: float | None = None

    def attention_kernels(self, run: Callable[[], object]) -> list[str]:
        """Which attention kernels `run` executes; slow, and so never within a timed request. Also notes the numbers
        that matrices were multiplied in, and whether the device ran anything.

        Raises UnsupportedError when the kernels are not the one that the stack asks for.
        """
        found = observed(run, self.device)
        require_kernel(self.modes.attention_kernel, found.attention)
        self.notes.record(product_dtypes=found.product_dtypes, device_kernels=found.device_kernels)
        return found.attention

    def _change_model(self, stack: tuple[Technique, ...]) -> None:
        """Changes parts of the loaded model: what `modules` of all techniques left, `finish` lays out."""
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
    """A decoder loaded as a stack asks for."""
    return load_model(
        instead_of(options) or reference,
        device=torch_name(place_of(options, device)),
        dtype=options.dtype,
        attention=options.attention,
        seed=seed,
        packed=options.packed,
    )


def instead_of(options: LoadOptions) -> ModelReference | None:
    """What a stack loads in the place of the job's model, if it does."""
    return parse_reference(options.instead) if options.instead else None


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
        """`model` is a reference, or a model that is loaded and on the device: what a stack changes of loading then
        has no effect."""
        super().__init__(device, seed)
        progress("loading")
        options, cache, self.modes = load_options(stack), cache_options(stack), mode_options(stack)
        if isinstance(model, str):
            self.reference, self.instead = parse_reference(model), instead_of(options)
            self.model = load_decoder(self.reference, options, device, seed)
            if self.instead:
                self.notes.record(loaded_instead={"model": str(self.instead)})
        else:
            self.reference, self.model = None, model
            options = options.but(dtype=str(model.dtype).removeprefix("torch."))
        self.facts = loaded_facts(self.model)
        self.weights = count_weights(self.model)
        progress("applying")
        self._mode = mode_of(self.modes, device)
        require_cacheable(self.model, cache)
        self._change_model(stack)
        self._decoder = self._make_decoder(stack, cache)
        self._decode = self._loop(stack)
        self._replacing = overriding(stack, "loop")
        self._record_options(options)
        self._record_decoding(cache)
        self.decoded: tuple[int, int] | None = None
        self._places: TorchSlots | None = None

    def generate(self, prompt: torch.Tensor, new_tokens: int) -> Decoded:
        """Greedy decoding of exactly `new_tokens` tokens. `prompt`: [batch, prompt_tokens] of ids."""
        with self._mode():
            tokens, marks = self._decode(prompt, new_tokens, self.clock)
        self._remember(prompt.shape[0], prompt.shape[1] + new_tokens)
        return Decoded(tokens, self.clock.seconds(marks))

    def draw(self, prompt: torch.Tensor, new_tokens: int, sampling: Sampling) -> Decoded:
        """As `generate`, with tokens drawn by chance; leaves torch's random state as it was.

        Raises UnsupportedError where a technique replaced the decode loop, whose own one is greedy.
        """
        if self._replacing:
            raise UnsupportedError(
                f"{' + '.join(self._replacing)} replaces the decode loop by a greedy one; leave it out, or leave "
                "temperature and top_p out."
            )
        with (
            forked_random(torch.device(torch_name(self.device))),
            self._mode(),
        ):
            torch.manual_seed(sampling.seed)
            tokens, marks = self._decoder.decode(prompt, new_tokens, self.clock, sampling)
        self._remember(prompt.shape[0], prompt.shape[1] + new_tokens)
        return Decoded(tokens, self.clock.seconds(marks))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after `tokens` through the timed path, float32 [batch, vocabulary].

        Raises UnsupportedError as `score` does.
        """
        return next(self._scored(tokens, tokens.shape[1] - 1))

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        The first `prefill` tokens are a prompt, the others go one by one through the step that is timed. Where a
        technique replaced the decode loop, the new one's own `score` is asked. Raises UnsupportedError when there is
        none.
        """
        self._remember(tokens.shape[0], tokens.shape[1] + 1)
        return self._scored(tokens, prefill)

    def slots(self, count: int, length: int, block_tokens: int) -> Slots:
        """Places for sequences that join and leave.

        Where a technique replaced the decode loop, the new one's own `slots` is asked. Raises UnsupportedError when
        there is none.
        """
        loop: object = self._decode
        if self._replacing and not isinstance(loop, ServingLoop):
            raise UnsupportedError(
                f"{' + '.join(self._replacing)} replaces the decode loop by one of whole batches; leave it out, or "
                "measure generate."
            )
        self.notes.record(
            kv_cache="paged", kv_cache_block_tokens=block_tokens, decode_loop="continuous batching"
        )
        if isinstance(loop, ServingLoop):
            return loop.slots(count, length, block_tokens)
        if self._places is None or not self._places.emptied(count, length, block_tokens):
            self._places = TorchSlots(self.model, self._mode, count, length, block_tokens)
        return self._places

    def whole(self, tokens: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
        """Like `score`, by passes over the whole sequence, without a cache or a technique's step."""
        return whole_passes(self.model, tokens, first, self._mode)

    def sample(self, rows: int, length: int) -> torch.Tensor:
        """Sequences drawn from the model at temperature 1 with the seed, int64 [rows, length].

        Each begins with the model's start token, which is not drawn; or with its end token, or with any.
        """
        return sampled(self.model, self.facts.vocabulary, rows, length, self.seed)

    def observe(self, prompt: torch.Tensor) -> None:
        """Records which attention kernels run for this prompt; slow, and so never within a timed request."""
        self.notes.record(attention_kernels=self.attention_kernels(lambda: self.generate(prompt, 2)))

    def _scored(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        if not self._replacing:
            return self._decoder.score(tokens, prefill)
        score: Callable[[torch.Tensor, int], Iterator[torch.Tensor]] | None = getattr(
            self._decode, "score", None
        )
        if score is None:
            raise UnsupportedError(
                f"{' + '.join(self._replacing)} replaces the decode loop by one that gives no logits; leave it out to "
                "have them checked and quality measured."
            )
        return within(self._mode, score(tokens, prefill))

    def _remember(self, batch: int, length: int) -> None:
        if self.decoded is None or self.decoded[0] != batch or self.decoded[1] < length:
            self.decoded = (batch, length)

    def _make_decoder(self, stack: tuple[Technique, ...], cache: CacheOptions) -> Decoder:
        def wrap(step: Step) -> Step:
            for technique in stack:
                step = technique.step(step, self.notes)
            return step

        if overriding(stack, "step", "loop"):
            return LeanDecoder(self.model, cache, wrap, self._mode)
        return LibraryDecoder(self.model, cache, self.modes, self._mode)

    def _loop(self, stack: tuple[Technique, ...]) -> Loop:
        loop: Loop = self._decoder.decode
        for technique in stack:
            loop = technique.loop(loop, self.model, self.notes)
        return loop

    def _record_decoding(self, cache: CacheOptions) -> None:
        self.notes.record(
            attn_implementation=self.model.config._attn_implementation,
            decode_loop=self._decoder.name,
            **cache_facts(cache, self.facts),
        )


_PRODUCTS = frozenset(
    {
        *(
            "aten::mm",
            "aten::addmm",
            "aten::bmm",
            "aten::baddbmm",
            "aten::mv",
            "aten::addmv",
            "aten::convolution",
        ),
        *(
            "aten::linear",
            "mkldnn::_linear_pointwise",
            "mkl::_mkl_linear",
            "aten::_scaled_dot_product_attention_math",
        ),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_cudnn_attention"),
    }
)
"""Operators that multiply matrices. Kernels of our own and of other libraries are not among them."""
_LAUNCHING = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""Those of them that launch their kernels themselves on a GPU."""
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
"""The profiler's names of floating-point dtypes, and torch's."""


@dataclass(frozen=True)
class Observed:
    """What one run did. `device_kernels` says whether a GPU computed; None on a CPU, and without a profile of it.

    `product_dtypes` are those of the operands of matrix products, sorted; empty where no operator of torch made any.
    """

    attention: list[str]
    product_dtypes: list[str]
    device_kernels: bool | None


def observed(run: Callable[[], object], device: DeviceKind) -> Observed:
    """Runs it once, slowly. Within compiled code only what Inductor left as an operator call is visible."""
    with profile(activities=activities_of(device), record_shapes=True) as profiler:
        run()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = results.events() if results else []
    products = {
        _DTYPES.get(dtype) for event in events if event.name() in _PRODUCTS for dtype in event.dtypes()
    }
    names = {event.key for event in profiler.key_averages()}
    return Observed(
        attention=attention_names(names),
        product_dtypes=sorted(filter(None, products)),
        device_kernels=computed_there(
            any(event.device_type().name != "CPU" for event in events),
            [bool(event.kernels) for event in profiler.events() or [] if event.name in _LAUNCHING],
        )
        if KINDS[device].activity
        else None,
    )


def computed_there(ran_kernels: bool, products: Sequence[bool]) -> bool:
    """Whether a device computed that ran kernels, or none. products: for each matrix product whether it launched one.

    A model that falls back to the CPU still copies to the device and chooses tokens on it.
    """
    return ran_kernels and sum(products) >= len(products) / 2
