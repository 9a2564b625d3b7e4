"""transformers' `generate` with the native decoder in the place of its greedy and sampling loop.

`generate` stays transformers' own: it checks its arguments and makes of them the prompt, the lengths, the logits
processors and the stopping criteria. Then it calls a method of the model's class by name, the loop: `_sample` is the
decoder's here, and every other loop runs as ever, on the model itself.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, cast

import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from optigpu.hardware.cgroup import free_host_bytes
from optigpu.ops.decode.calls import ProgramDecoder
from optigpu.ops.decode.program import CacheKind
from optigpu.surgery.places import become
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear, DecodeTable
from optigpu.techniques.decoding.native_decode.programs import attached, new_decoder
from optigpu.techniques.decoding.native_decode.stepping import (
    Done,
    NotNativeError,
    Request,
    greedy,
    prepared_request,
    stepping,
    stepwise,
)

Generated = GenerateDecoderOnlyOutput | torch.Tensor


def generate_natively(model: PreTrainedModel, kv: CacheKind) -> None:
    """Has the `generate` of a model that keeps a program run by a native decoder.

    The model unpacks its weights when it is called for the first time, as transformers' own loops do.
    """
    name = type(model).__name__
    become(model, NativeGenerate).native = _Native(model, kv)
    type(model).__name__ = name  # by which transformers knows what a model does

    def before(*_: object) -> None:
        if unpack(model):
            handle.remove()

    handle = model.register_forward_pre_hook(before)


class _Native:
    """The decoder of a model, whose cache has room for one request."""

    def __init__(self, model: PreTrainedModel, kv: CacheKind) -> None:
        self.program = attached(model)
        self._decoder: ProgramDecoder = new_decoder(self.program, kv)
        self._lock = Lock()

    def run(
        self,
        request: Request,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
    ) -> Done:
        """Raises NotNativeError, with nothing sent to the streamer, where the decoder cannot serve the request."""
        if not self._lock.acquire(blocking=False):
            raise NotNativeError("a second request at the same time")
        try:
            if request.is_plain and streamer is None:
                return greedy(self._decoder, request, self.program.device)
            steps = stepping(self._decoder, request, self.program.device)
            return stepwise(steps, request, processors, criteria, streamer)
        finally:
            self._lock.release()


def _left_to_transformers(method: str, what: str) -> Callable[..., object]:
    """The method of transformers with that name, after a warning; with its parameters, which transformers looks at."""

    @functools.wraps(getattr(GenerationMixin, method))
    def run(model: "NativeGenerate", *arguments: object, **options: object) -> object:
        _warn(model, what)
        return _by_library(model, method)(*arguments, **options)

    return run


def _by_library(model: "NativeGenerate", method: str) -> Callable[..., object]:
    found: Callable[..., object] = getattr(super(NativeGenerate, model), method)
    return found


class NativeGenerate(torch.nn.Module):
    """Mixed into a model: its `generate` decodes greedily, and samples, by a native decoder.

    Logits processors and stopping criteria, of settings and of the caller, get the logits of native steps. What needs
    more of a step than its logits, as beam search does, runs by transformers' own loop on the model itself, with a
    UserWarning that says why.
    """

    native: _Native

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: object,
    ) -> Generated:
        """As transformers' own, which `generate` calls for one sequence of each prompt."""
        about = logits_processor, stopping_criteria, generation_config
        try:
            if synced_gpus:
                raise NotNativeError("synced_gpus")
            request = prepared_request(input_ids, *about, model_kwargs, self.native.program)
            done = self.native.run(request, logits_processor, stopping_criteria, streamer)
        except NotNativeError as error:
            _warn(self, str(error))
        else:
            return self._output(done, request, model_kwargs) if request.is_dict else done.sequences
        library = _by_library(self, "_sample")
        return cast(Generated, library(input_ids, *about, synced_gpus, streamer, **model_kwargs))

    def _output(
        self, done: Done, request: Request, inputs: Mapping[str, object]
    ) -> GenerateDecoderOnlyOutput:
        """As transformers' own; a cache is among it where transformers had prepared one."""
        cache = None
        if isinstance(inputs.get("past_key_values"), Cache):
            model = cast(PreTrainedModel, self)
            mask = cast("torch.Tensor | None", inputs.get("attention_mask"))
            cache = FilledLater(model, done.sequences[:, :-1], mask)
        found: dict[str, Any] = {
            "sequences": done.sequences,
            "scores": done.scores if request.keeps_scores else None,
            "logits": done.logits if request.keeps_logits else None,
            "past_key_values": cache,
        }
        return GenerateDecoderOnlyOutput(**found)

    _beam_search = _left_to_transformers("_beam_search", "beam search")
    _assisted_decoding = _left_to_transformers("_assisted_decoding", "assisted generation")
    generate_batch = _left_to_transformers("generate_batch", "continuous batching")


def _warn(model: NativeGenerate, reason: str) -> None:
    speed = "as fast as the model was before"
    if not unpack(cast(PreTrainedModel, model)):
        speed = "slowly, as there is not enough free memory to keep the weights unpacked"
    warnings.warn(
        f"accelerate: the native decoder does not support {reason}, so transformers' own loop runs, {speed}.",
        stacklevel=5,
    )


class FilledLater(DynamicCache):
    """Has the keys and values of a text once something reads them: the model itself runs over the text then.

    Most callers that ask for scores never read the cache.
    """

    def __init__(self, model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        """tokens: int64 [batch, length]; mask: int64 [batch, length of the prompts] where these have padding."""
        super().__init__(config=model.config)
        del self.layers

        @torch.no_grad()
        def fill() -> DynamicCache:
            unpack(model)
            inputs: dict[str, torch.Tensor] = {}
            if mask is not None:
                more = mask.new_ones(mask.shape[0], tokens.shape[1] - mask.shape[1])
                whole = torch.cat([mask, more], dim=1).to(model.device)
                inputs = {
                    "attention_mask": whole,
                    "position_ids": (whole.long().cumsum(dim=1) - 1).clamp(min=0),
                }
            cache = DynamicCache(config=model.config)
            model.base_model(
                input_ids=tokens.to(model.device), past_key_values=cache, use_cache=True, **inputs
            )
            return cache

        self._fill = fill  # a function, so that a copy of the cache has the same model

    def __getattr__(self, name: str) -> object:
        """Only for what is missing."""
        if name != "layers":
            raise AttributeError(f"{type(self).__name__} has no attribute {name}.")
        self.layers = self._fill().layers
        return self.layers


FREE_SHARE = 0.8
"""Of the free memory that the unpacked weights may take; more would leave too little for what is computed."""


def unpack(model: PreTrainedModel) -> bool:
    """Whether a model has its weights unpacked, in the dtype that they were loaded in: now it has if they fit.

    Where there is too little memory each layer goes on unpacking its weights at each call.
    """
    holders = (module for module in model.modules() if isinstance(module, DecodeLinear | DecodeTable))
    packed = [(module, module.numbers.data_ptr()) for module in holders if module.kept is None]
    # By the place of the numbers: a tied table is there twice.
    sizes = {place: module.inputs * module.outputs * model.dtype.itemsize for module, place in packed}
    is_cuda = model.device.type == "cuda"
    free = int(torch.cuda.mem_get_info(model.device)[0]) if is_cuda else free_host_bytes()
    if sum(sizes.values()) > FREE_SHARE * free:
        return False
    made: dict[int, torch.Tensor] = {}
    with torch.inference_mode(mode=False), torch.no_grad():
        for module, place in packed:
            if place not in made:
                made[place] = module.unpacked().to(model.dtype)
            module.kept = made[place]
    return True
