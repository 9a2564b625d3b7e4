"""A model with the whole stack applied, run in single forward passes: over a prompt, or over images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from optigpu.backends.torch import cache_options, load_options, mode_options
from optigpu.backends.torch.applied import AppliedModel, load_decoder, place_of
from optigpu.backends.torch.attention import mode_of
from optigpu.backends.torch.decoding import why_no_steps
from optigpu.backends.torch.kv_caches import cache_argument, cache_facts, new_cache, require_cacheable
from optigpu.hardware.device_kinds import torch_name
from optigpu.models.described import Facts
from optigpu.models.loading.load import (
    count_weights,
    has_attention,
    load_image_model,
    loaded_facts,
    loaded_image_facts,
)
from optigpu.models.reference import ModelReference, parse_reference
from optigpu.techniques.base import CacheOptions, Forward, LoadOptions, Technique
from optigpu.vocabulary import DeviceKind, Task


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
