"""What a workload runs on: a device with its clock, and a model with the whole stack applied."""

from collections.abc import Callable, Iterator
from typing import Any

from optigpu.backends.torch.attention import attention_kernels, require_kernel
from optigpu.backends.torch.clock import clock_for
from optigpu.backends.torch.decoding import Decoder, LeanDecoder, LibraryDecoder, whole_passes
from optigpu.backends.torch.kv_caches import cache_facts, require_cacheable
from optigpu.backends.torch.modes import mode_of, within
from optigpu.models.loading.load import count_weights, load_model, loaded_facts
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import CacheOptions, LoadOptions, Loop, ModeOptions, Notes, Step, Technique
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.base import Generation


class TorchRuntime:
    """A device without a model, for workloads that bring their own tensors."""

    def __init__(self, device: DeviceKind, seed: int) -> None:
        import torch

        _require(device)
        self.device = device
        self.seed = seed
        self.clock = clock_for(device)
        self.notes = Notes({"threads": torch.get_num_threads()})
        self.model: Any = None
        self.weights = 0
        self.modes = ModeOptions()

    def attention_kernels(self, run: Callable[[], Any]) -> list[str]:
        """Which attention kernels `run` executes; slow, and so never within a timed request.

        Raises UnsupportedError when they are not the one that the stack asks for.
        """
        names = attention_kernels(run, self.device)
        require_kernel(self.modes.attention_kernel, names)
        return names


class ModelRuntime(TorchRuntime):
    """A loaded model with a resolved stack applied, hook by hook in the order of the phases.

    `weights` counts the model's weights before the stack changed them.
    """

    def __init__(
        self,
        model: str,
        stack: tuple[Technique, ...],
        device: DeviceKind,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(device, seed)
        progress("loading")
        options = load_options(stack)
        reference = parse_reference(model)
        place = device if options.placement == "device" else DeviceKind.CPU
        self.model = load_model(
            reference,
            device=place.value,
            dtype=options.dtype,
            attention=options.attention,
            seed=seed,
            packed=options.packed,
        )
        self.facts = loaded_facts(self.model)
        self.weights = count_weights(self.model)
        progress("applying")
        cache, modes = cache_options(stack), mode_options(stack)
        self.modes = modes
        self._mode = mode_of(modes, device)
        require_cacheable(self.model, cache)
        for technique in stack:
            technique.modules(self.model, self.notes)
        for technique in stack:
            technique.finish(self.model, self.notes)
        self._decoder = self._make_decoder(stack, cache, modes)
        self._decode = self._loop(stack, self._decoder)
        self._replacing = [technique.name for technique in stack if _overrides(technique, "loop")]
        self._record(options, cache, modes)
        self.decoded: tuple[int, int] | None = None

    def generate(self, prompt: Any, new_tokens: int) -> Generation:
        """Greedy decoding of exactly `new_tokens` tokens. `prompt`: [batch, prompt_tokens] of ids."""
        with self._mode():
            tokens, marks = self._decode(prompt, new_tokens, self.clock)
        self._remember(prompt.shape[0], prompt.shape[1] + new_tokens)
        return Generation(tokens, self.clock.seconds(marks))

    def logits(self, tokens: Any) -> Any:
        """Logits after `tokens` through the timed path, float32 [batch, vocabulary]."""
        score = getattr(self._decode, "score", None)
        prefill = tokens.shape[1] - 1
        return next(
            within(self._mode, score(tokens, prefill)) if score else self._decoder.score(tokens, prefill)
        )

    def score(self, tokens: Any, prefill: int) -> Iterator[Any]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        The first `prefill` tokens are a prompt, the others go one by one through the step that is timed. Where a
        technique replaced the decode loop, the new one's own `score` is asked. Raises UnsupportedError when there is
        none.
        """
        self._remember(tokens.shape[0], tokens.shape[1] + 1)
        if not self._replacing:
            return self._decoder.score(tokens, prefill)
        score: Callable[[Any, int], Iterator[Any]] | None = getattr(self._decode, "score", None)
        if score is None:
            raise UnsupportedError(
                f"{' + '.join(self._replacing)} replaces the decode loop by one that gives no logits, so its quality "
                "is not known; leave it out."
            )
        return within(self._mode, score(tokens, prefill))

    def whole(self, tokens: Any, first: int) -> Iterator[Any]:
        """What `score` gives, by passes over the whole sequence: no cache, and no step of a technique."""
        return whole_passes(self.model, tokens, first, self._mode)

    def sample(self, rows: int, length: int) -> Any:
        """Sequences drawn from the model at temperature 1 with the runtime's seed, int64 [rows, length].

        Each begins with the model's start token, which is not drawn; or with its end token, or with any.
        """
        return sampled(self.model, self.facts.vocabulary, rows, length, self.seed)

    def observe(self, prompt: Any) -> None:
        """Records which attention kernels run for this prompt; slow, and so never within a timed request."""
        self.notes.record(attention_kernels=self.attention_kernels(lambda: self.generate(prompt, 2)))

    def _remember(self, batch: int, length: int) -> None:
        if self.decoded is None or self.decoded[0] != batch or self.decoded[1] < length:
            self.decoded = (batch, length)

    def _make_decoder(self, stack: tuple[Technique, ...], cache: CacheOptions, modes: ModeOptions) -> Decoder:
        def wrap(step: Step) -> Step:
            for technique in stack:
                step = technique.step(step, self.notes)
            return step

        if any(_overrides(technique, "step", "loop") for technique in stack):
            return LeanDecoder(self.model, cache, wrap, self._mode)
        return LibraryDecoder(self.model, cache, modes, self._mode)

    def _loop(self, stack: tuple[Technique, ...], decoder: Decoder) -> Loop:
        loop: Loop = decoder.decode
        for technique in stack:
            loop = technique.loop(loop, self.model, self.notes)
        return loop

    def _record(self, options: LoadOptions, cache: CacheOptions, modes: ModeOptions) -> None:
        import transformers

        self.notes.record(
            dtype=options.dtype,
            attn_implementation=self.model.config._attn_implementation,
            autograd=modes.autograd,
            decode_loop=self._decoder.name,
            versions={"transformers": transformers.__version__},
            **cache_facts(cache, self.facts),
            **({"autocast": modes.autocast} if modes.autocast else {}),
        )


def load_options(stack: tuple[Technique, ...]) -> LoadOptions:
    """How a stack wants the weights to come in."""
    options = LoadOptions()
    for technique in stack:
        options = technique.load(options)
    return options


def cache_options(stack: tuple[Technique, ...]) -> CacheOptions:
    """Which key-value cache a stack decodes with."""
    options = CacheOptions()
    for technique in stack:
        options = technique.cache(options)
    return options


def mode_options(stack: tuple[Technique, ...]) -> ModeOptions:
    """What a stack wants forward passes to run under."""
    options = ModeOptions()
    for technique in stack:
        options = technique.execution(options)
    return options


def _overrides(technique: Technique, *hooks: str) -> bool:
    return any(getattr(type(technique), hook) is not getattr(Technique, hook) for hook in hooks)


def _require(device: DeviceKind) -> None:
    import torch

    if device is DeviceKind.CUDA and not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        raise UnsupportedError(
            f"torch {torch.__version__} (built for {built}) finds no CUDA device; install a CUDA build of torch and "
            "its driver, or ask for device cpu."
        )
