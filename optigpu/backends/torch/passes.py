"""What a workload runs on that decodes nothing: a model with the whole stack applied, run in single forward passes."""

from collections.abc import Callable
from typing import Any

from optigpu.backends.torch.kv_caches import cache_facts, new_cache, require_cacheable
from optigpu.backends.torch.modes import mode_of
from optigpu.backends.torch.runtime import TorchRuntime, cache_options, load_options, mode_options
from optigpu.models.facts import Facts
from optigpu.models.loading.load import (
    count_weights,
    load_image_model,
    load_model,
    loaded_facts,
    loaded_image_facts,
)
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import CacheOptions, Forward, LoadOptions, ModeOptions, Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Pass, Task


class PassRuntime(TorchRuntime):
    """A loaded model with a resolved stack applied, hook by hook in the order of the phases.

    `weights` counts the model's weights before the stack changed them; `dtype` is the name of the one they came in.
    """

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
        progress("loading")
        options, cache, modes = load_options(stack), cache_options(stack), mode_options(stack)
        self.dtype = options.dtype
        self.model = _load(task, model, options, device, seed)
        self.weights = count_weights(self.model)
        progress("applying")
        self.modes = modes
        self._mode = mode_of(modes, device)
        self.facts: Facts
        plain: Forward
        if task is Task.IMAGES:
            self.facts, plain = loaded_image_facts(self.model), ImagePass(self.model)
        else:
            self.facts, plain = loaded_facts(self.model), self._prefill(cache)
        for technique in stack:
            technique.modules(self.model, self.notes)
        for technique in stack:
            technique.finish(self.model, self.notes)
        self._forward = self._wrapped(stack, plain)
        self._record(options, modes)

    def forward(self, inputs: Any) -> Pass:
        """One pass over ids [batch, length] with an empty cache, or over images [batch, channels, height, width].

        Its time ends when the most likely token or class of each row is chosen.
        """
        with self._mode():
            marks = [self.clock.mark()]
            logits = self._forward(inputs)
            chosen = logits.argmax(dim=-1)
            marks.append(self.clock.mark())
        return Pass(logits, chosen, self.clock.seconds(marks)[0])

    def observe(self, inputs: Any) -> None:
        """Records which attention kernels run for these inputs; slow, and so never within a timed request."""
        self.notes.record(attention_kernels=self.attention_kernels(lambda: self.forward(inputs)))

    def _prefill(self, cache: CacheOptions) -> Forward:
        require_cacheable(self.model, cache)
        self.notes.record(**cache_facts(cache, loaded_facts(self.model)))
        return PrefillPass(self.model, cache)

    def _wrapped(self, stack: tuple[Technique, ...], forward: Forward) -> Forward:
        for technique in stack:
            forward = technique.forward(forward, self.notes)
        return forward

    def _record(self, options: LoadOptions, modes: ModeOptions) -> None:
        import transformers

        self.notes.record(
            dtype=options.dtype,
            autograd=modes.autograd,
            versions={"transformers": transformers.__version__},
            **({"autocast": modes.autocast} if modes.autocast else {}),
            **self._arithmetic(),
        )

    def _arithmetic(self) -> dict[str, Any]:
        """Which attention there is; without any, what cuDNN computes float32 convolutions with, TF32 by default."""
        import torch

        config = self.model.config
        if hasattr(config, "num_attention_heads"):
            return {"attn_implementation": config._attn_implementation}
        if self.device is DeviceKind.CUDA:
            return {"cudnn_tf32": torch.backends.cudnn.allow_tf32}
        return {}


class PrefillPass:
    """The pass that techniques wrap: a prompt through the model into a new cache; the logits of its last token."""

    def __init__(self, model: Any, cache: CacheOptions) -> None:
        self.model = model
        self._options = cache

    def __call__(self, prompt: Any) -> Any:
        """Logits [batch, vocabulary]. `prompt`: int64 [batch, length] of ids."""
        cache = None
        if self._options.kind != "none":
            cache = new_cache(self.model, self._options, prompt.shape[1])
        outputs = self.model(
            input_ids=prompt, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1
        )
        return outputs.logits[:, -1]


class ImagePass:
    """The pass that techniques wrap: images through a classifier."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, images: Any) -> Any:
        """Logits [batch, classes]. `images`: [batch, channels, height, width] in the dtype of the weights."""
        return self._model(pixel_values=images).logits


def _load(task: Task, model: str, options: LoadOptions, device: DeviceKind, seed: int) -> Any:
    place = device if options.placement == "device" else DeviceKind.CPU
    reference = parse_reference(model)
    chosen: dict[str, Any] = {"device": place.value, "dtype": options.dtype, "seed": seed}
    chosen["attention"] = options.attention
    if task is Task.IMAGES:
        return load_image_model(reference, **chosen)
    return load_model(reference, **chosen, packed=options.packed)
