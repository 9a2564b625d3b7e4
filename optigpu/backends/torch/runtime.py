"""The runtimes of models: numpy arrays outside, torch tensors inside, converted outside of timed parts.

The runtime that trains counts the operations of a step: the model's, and all executed.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from optigpu.backends.runtime import Generation, Ids, Images, Logits, MemoryPeaks, Pass, Pixels, Sampling
from optigpu.backends.torch.applied import AppliedModel, DecodingModel, PassModel
from optigpu.backends.torch.device import operator_peaks_of
from optigpu.backends.torch.profile import TorchRuntime
from optigpu.backends.torch.training_step import TrainableModel, Trainer
from optigpu.backends.training import StepFlops, TrainingBatch
from optigpu.documents.facts import Footprint, ImageFacts, ImageFootprint, WeightFacts
from optigpu.models.held import PROCESSOR, origin_of, require_objects
from optigpu.models.loading.checkpoint import unused_of
from optigpu.models.loading.footprint import footprint_of, image_footprint_of, weight_bytes
from optigpu.models.loading.load import load_tokenizer, reading_of, source_of
from optigpu.vocabulary import DeviceKind, UnsupportedError

SHORTER_SIDE = 256 / 224
"""The shorter side over the side of the square in its middle that is kept."""
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue, for pixels from 0 to 1: what classifiers of ImageNet are trained with."""
_SETTINGS = ("size", "crop_size", "resample", "do_center_crop", "rescale_factor", "image_mean", "image_std")


class OwnProcessor:
    """A transformers image processor: makes [1, channels, height, width] of a picture [height, width, 3] in RGB."""

    def __init__(self, processor: Any) -> None:
        settings = {name: value for name, value in processor.to_dict().items() if name in _SETTINGS}
        self.description = f"{type(processor).__name__} {json.dumps(settings, sort_keys=True, default=str)}"
        self._processor = processor

    def __call__(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        made = self._processor(picture, return_tensors="np", input_data_format="channels_last")
        return np.asarray(made["pixel_values"], np.float32)


class UsualProcessor:
    """The shorter side to 256 / 224 of `side` pixels, the square in the middle, and ImageNet's mean and deviation."""

    def __init__(self, side: int, channels: int) -> None:
        if channels != 3:
            raise UnsupportedError(
                f"This model takes images of {channels} channels and has no preprocessor_config.json; put one beside "
                "it."
            )
        self._side, self._shorter = side, round(side * SHORTER_SIDE)
        self.description = (
            f"no processor with the model: shorter side to {self._shorter} pixels (bilinear), the {side} x {side} "
            f"pixels in the middle, mean {list(IMAGENET_MEAN)}, deviation {list(IMAGENET_DEVIATION)}"
        )

    def __call__(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        from PIL import Image

        height, width = picture.shape[:2]
        scale = self._shorter / min(height, width)
        size = (max(self._side, round(width * scale)), max(self._side, round(height * scale)))
        image = Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR)
        left, top = (size[0] - self._side) // 2, (size[1] - self._side) // 2
        kept = np.asarray(image.crop((left, top, left + self._side, top + self._side)), np.float32) / 255
        scaled = (kept - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_DEVIATION)
        return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None], np.float32)


class TorchModelRuntime(TorchRuntime):
    def __init__(self, applied: AppliedModel, folder: Path) -> None:
        """`folder` keeps what is known of the model's files for the whole job."""
        super().__init__(applied)
        self._applied, self._folder = applied, folder

    def weights(self) -> WeightFacts:
        applied = self._applied
        if applied.reference is None:
            origin = WeightFacts(reasons=dict.fromkeys(("hash", "revision"), "The caller loaded the model."))
        else:
            named = getattr(applied.model.config, "transformers_weights", None)
            source = source_of(applied.reference)
            origin = origin_of(applied.reference, source, self.seed, self._folder, named)
        if applied.instead:
            loaded = origin_of(applied.instead, source_of(applied.instead), self.seed, self._folder)
            self.notes.record(loaded_instead={"model": str(applied.instead), "hash": loaded.hash})
        now = {
            "bytes": weight_bytes(applied.model),
            "parameters": applied.weights,
            "quantized": applied.quantized,
            "unused": unused_of(applied.model),
        }
        return origin.model_copy(update=now)


class TorchDecodingRuntime(TorchModelRuntime):
    """A DecodingRuntime, ReferenceRuntime, TextRuntime and ServingRuntime: decoding of a transformers model."""

    def __init__(self, applied: DecodingModel, folder: Path) -> None:
        super().__init__(applied, folder)
        self.decoding = applied
        self.facts, self.slots = applied.facts, applied.slots

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.decoding.reference is None:
            raise UnsupportedError(
                "A model that the caller loaded came without a tokenizer; encode texts yourself."
            )
        return load_tokenizer(self.decoding.reference)

    @property
    def decoded(self) -> tuple[int, int] | None:
        return self.decoding.decoded

    def footprint(self) -> Footprint:
        return footprint_of(self.decoding.model, self.facts)

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Copies the prompt before and the tokens after the timed decoding."""
        made = self.decoding.generate(self._place.tensor(prompt), new_tokens)
        return Generation(_ids(made.tokens), made.gaps_s)

    def draw(self, prompt: Ids, new_tokens: int, sampling: Sampling) -> Generation:
        made = self.decoding.draw(self._place.tensor(prompt), new_tokens, sampling)
        return Generation(_ids(made.tokens), made.gaps_s)

    def logits(self, tokens: Ids) -> Logits:
        return _logits(self.decoding.logits(self._place.tensor(tokens)))

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        return map(_logits, self.decoding.score(self._place.tensor(tokens), prefill))

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        given, clock = self._place.tensor(tokens), self._place.clock
        begin = clock.mark()
        for _ in self.decoding.score(given, prefill):
            pass
        return clock.seconds([begin, clock.mark()])[0]

    @property
    def steps_are_passes(self) -> bool:
        return self.decoding.steps_are_passes

    def whole(self, tokens: Ids, first: int) -> Iterator[Logits]:
        return map(_logits, self.decoding.whole(self._place.tensor(tokens), first))

    def sample(self, rows: int, length: int) -> Ids:
        return _ids(self.decoding.sample(rows, length))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def start_ids(self) -> list[int]:
        begun = self._tokenizer.encode("")[:1]
        return begun if begun == [self._tokenizer.bos_token_id] else []

    def prompt_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        if not ids or max(ids) >= self.facts.vocabulary:
            what = f"the id {max(ids)}, and the model has {self.facts.vocabulary}" if ids else "no token"
            raise UnsupportedError(
                f"The tokenizer of {self.decoding.reference} makes of this prompt {what}; put the tokenizer that the "
                "model was trained with beside it, or write another prompt."
            )
        return ids

    def text_of(self, tokens: Ids) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts

    def observe(self, prompt: Ids) -> None:
        self.decoding.observe(self._place.tensor(prompt))


class TorchPassRuntime(TorchModelRuntime):
    """A PassRuntime, of a classifier also a PictureRuntime: single forward passes of a transformers model."""

    def __init__(self, applied: PassModel, folder: Path) -> None:
        super().__init__(applied, folder)
        self.passing = applied
        self.facts = applied.facts

    def footprint(self) -> Footprint | ImageFootprint:
        if isinstance(self.facts, ImageFacts):
            return image_footprint_of(self.passing.model, self.facts, self.notes.facts["image_shape"])
        return footprint_of(self.passing.model, self.facts)

    def forward(self, inputs: Ids | Images) -> Pass:
        """Copies the inputs before and the logits after the timed pass; images come in the dtype of the weights."""
        done = self.passing.forward(self._given(inputs))
        return Pass(_logits(done.logits), _ids(done.chosen), done.seconds)

    def observe(self, inputs: Ids | Images) -> None:
        self.passing.observe(self._given(inputs))

    def compute_exactly(self) -> None:
        """cuDNN's float32 convolutions round to TF32 by default."""
        torch.backends.cudnn.allow_tf32 = False

    def class_names(self) -> tuple[str, ...]:
        names = self.passing.model.config.id2label
        return tuple(names[index] for index in sorted(names))

    def processed(self, pictures: Sequence[Pixels]) -> Images:
        """Raises UnsupportedError where that gives several sizes, or other channels than the model takes."""
        made = [self._processor(each) for each in pictures]
        shapes = {each.shape[1:] for each in made}
        if len(shapes) > 1 or made[0].shape[1] != self.passing.model.config.num_channels:
            raise UnsupportedError(
                f"The model's own processor makes images of {', '.join(map(str, sorted(shapes)))}; crop the images to "
                "one size, and name a model of 3 channels."
            )
        return np.concatenate(made)

    def preprocessing(self) -> str:
        return self._processor.description

    @cached_property
    def _processor(self) -> OwnProcessor | UsualProcessor:
        reference, facts = self.passing.reference, self.facts
        if reference is None or not isinstance(facts, ImageFacts):
            raise UnsupportedError(
                "Pictures need a classifier that a reference names, for example hub:microsoft/resnet-50."
            )
        # Beside the model's files, or the usual one. Raises UnsupportedError for a damaged file or other channels.
        if reference.kind == "path":
            require_objects(Path(source_of(reference)), (PROCESSOR,), reference)
        try:
            own = AutoImageProcessor.from_pretrained(source_of(reference), **reading_of(reference))
        except (OSError, ValueError):
            return UsualProcessor(facts.image_size, facts.channels)
        return OwnProcessor(own)

    def _given(self, inputs: Ids | Images) -> torch.Tensor:
        dtype = getattr(torch, self.passing.dtype) if inputs.dtype.kind == "f" else None
        return self._place.tensor(inputs, dtype)


def _ids(tokens: torch.Tensor) -> NDArray[np.int64]:
    """Returns a copy: a loop may overwrite these tokens with its next ones."""
    found: NDArray[np.int64] = tokens.cpu().numpy().copy()
    return found


def _logits(logits: torch.Tensor) -> Logits:
    found: Logits = logits.detach().float().cpu().numpy()
    return found


_aten = torch.ops.aten
_FUSED_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
}
"""They compute the scores again, which no attention has stored. Arguments: gradient, queries, keys, values."""


class TorchTrainingRuntime(TorchModelRuntime):
    def __init__(self, applied: TrainableModel, folder: Path) -> None:
        super().__init__(applied, folder)
        self.training = applied
        self.facts = applied.facts
        self.step, self.restart, self.observe = applied.step, applied.restart, applied.observe
        self.gradient_norm = applied.gradient_norm

    def weights(self) -> WeightFacts:
        return super().weights().model_copy(update={"trainable": self.training.trainable})

    def footprint(self) -> None:
        """None: the operations of a step are counted instead."""

    def step_flops(self, batch: TrainingBatch) -> StepFlops:
        return flops_of(self.training.trainer, batch)

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """CUDA's allocator's; on a CPU weights, states of the optimizer, and all that torch allocates in the step."""
        if self.device is DeviceKind.CPU:
            return operator_peaks_of(run, self.training.held())
        return super().peak_memory(run)


def flops_of(trainer: Trainer, batch: TrainingBatch) -> StepFlops:
    """The operations of a step's losses and gradients; no weight changes. What is compiled runs uncompiled here."""
    counted = _Operations()
    compiles = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiles else nullcontext(), counted:
        trainer.with_gradients(batch, lambda: 0.0)
    return StepFlops(model=counted.all - counted.again, hardware=counted.all)


class _Operations(TorchDispatchMode):
    """Adds up the operations of all matrix products and convolutions, and of those that were executed before.

    Gradients are not computed of what a backward pass computes. So an operator that runs within one while autograd
    records is a recomputation: torch.utils.checkpoint and whoever else stores less runs it again to have its result.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.all, self.again = 0.0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        operator = getattr(func, "_overloadpacket", func)
        formula = _OF_CPU.get(operator) or flop_registry.get(operator)
        if formula is None:
            return out
        flops = formula(*args, **given, out_val=out)
        self.all += flops
        # A backward pass runs in this thread; torch.utils.checkpoint asks the same way.
        if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            self.again += flops
        elif operator in _FUSED_BACKWARD:
            queries, keys = args[1:3]  # [batch, heads, length, head size] each
            self.again += 2.0 * queries.numel() * keys.shape[-2]
        return out


_OF_CPU: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda *args, **_: sdpa_flop_count(
        *(each.shape for each in args[:3])
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *args, **_: sdpa_backward_flop_count(
        *(each.shape for each in args[:4])
    ),
}
"""torch's registry has the fused attention of GPUs alone."""
