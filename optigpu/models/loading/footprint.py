"""What a step reads of a loaded model and computes for a token.

It reads all of the weights, but only the used rows of lookup tables. What it computes, torch counts over a plain model
of shapes without numbers.
"""

import copy
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Embedding, Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer

from optigpu.documents.facts import (
    AttentionWork,
    Footprint,
    ImageFacts,
    ImageFootprint,
    ModelFacts,
    TokenWork,
)
from optigpu.models.loading.checkpoint import count_packed
from optigpu.models.loading.load import sizes_of
from optigpu.models.loading.storages import storage_of, storages
from optigpu.vocabulary import UnsupportedError

_LENGTHS = (17, 18, 19)
"""Of texts: longer than the kernels of short convolutions, and as many of the chunks that states are computed in."""
_BLOCK = re.compile(r"\.(\d+)(\.|$)")
_CHOOSING = ("index_topk", "index_block_size", "attention_chunk_size", "keep_window_size", "window_size")
"""What configurations call the tokens behind which layers attend to some that no rule here tells."""


class _Products(TorchDispatchMode):
    """Counts the operations of a pass: `token` of products with weights in blocks and before them, `head` of those that
    follow, and by the windows of blocks those of other products."""

    def __init__(self, model: PreTrainedModel, windows: Sequence[int | None], tracker: ModuleTracker) -> None:
        TorchDispatchMode.__init__(self)
        self.token = self.head = 0
        self.others: Counter[int | None] = Counter()
        self._windows, self._tracker = windows, tracker
        parameters: Iterable[torch.Tensor] = model.parameters()
        self._weights = {StorageWeakRef(each.untyped_storage()): each for each in parameters}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        of_weights = [self._is_weight(each) for each in given if each.is_floating_point()]
        formula = flop_registry.get(function.overloadpacket)
        if formula:  # what is added to a product comes before its two factors
            self._count(formula(*args, **(kwargs or {}), out_val=made), any(of_weights[-2:]))
        elif of_weights and all(of_weights) and isinstance(made, torch.Tensor):
            self._weights[StorageWeakRef(made.untyped_storage())] = made
        return made

    def _count(self, flops: int, of_weights: bool) -> None:
        found = _BLOCK.search(_place(self._tracker))
        block = int(found[1]) if found else len(self._windows)
        if not of_weights:
            self.others[self._windows[block] if block < len(self._windows) else None] += flops
        elif found:
            self.token, self.head = self.token + self.head + flops, 0
        else:
            self.head += flops

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._weights


def counted(facts: ModelFacts, config: PretrainedConfig) -> ModelFacts:
    """The facts with the work of a token, or with the reason why it is not known. It is that of the model as its author
    wrote it, whatever a stack makes of it."""
    tracker = ModuleTracker()
    try:
        return replace(facts, work=_work_of(config, tracker))
    except UnsupportedError as error:
        reason = str(error)
    except Exception:  # a pass may ask for numbers, and fails in its own way where there are none
        part = _place(tracker).partition(".")[2] or "the model"
        reason = f"a pass of shapes without numbers ends in {part}."
    return replace(facts, uncounted=f"The operations of {facts.family} models are not known: {reason}")


def _work_of(config: PretrainedConfig, tracker: ModuleTracker) -> TokenWork:
    """What grows with the tokens of a text is that of a token, and what grows with their square that of a pair."""
    model = shapes_of(config, torch.float32)
    text = model.config.get_text_config(decoder=True)
    windows = _windows(text)
    (few, _), (more, _), (most, returned) = (_passed(model, windows, length, tracker) for length in _LENGTHS)
    kept = _kept(returned)

    def attention(window: int | None) -> AttentionWork:
        pair = few.others[window] - 2 * more.others[window] + most.others[window]
        return AttentionWork(window, pair // 2, kept[window])

    return TokenWork(
        flops=most.token - more.token,
        head_flops=most.head - more.head,
        attention=tuple(attention(window) for window in dict.fromkeys(windows) if window != 0),
        longest=min(sizes_of(text, *_CHOOSING), default=None),
    )


def shapes_of(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model as its author wrote it, without numbers. Its attention is separate products, and its mixtures multiply
    with the experts that a token chooses, whichever they are."""
    ways = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **ways)
    vars(model.config)["pad_token_id"] = None  # else tokens are compared with it, for a warning
    model.eval()
    return model


def _passed(
    model: PreTrainedModel, windows: Sequence[int | None], length: int, tracker: ModuleTracker
) -> tuple[_Products, Any]:
    """The products of a pass over a text, and what it returns."""
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    with torch.no_grad(), tracker, _Products(model, windows, tracker) as products:
        passed = model(input_ids=ids, use_cache=True)
    return products, passed


def _windows(config: PretrainedConfig) -> Sequence[int | None]:
    """How many tokens each block reaches back; None: all, 0: it does not attend. Raises UnsupportedError where a block
    keeps something else of a text than transformers' own caches."""
    layers = DynamicCache(config=config).layers
    if own := {type(each).__name__ for each in layers if type(each).__module__ != DynamicCache.__module__}:
        raise UnsupportedError(f"which tokens layers attend to is in {', '.join(sorted(own))}.")
    windows = [
        getattr(each, "sliding_window", None) if isinstance(each, DynamicLayer) else 0 for each in layers
    ]
    kinds = getattr(config, "layer_types", None) or ()
    # A block that takes the keys of another one of its kind has no layer of its own in the cache.
    of_kinds = {kind: window for kind, window in zip(kinds, windows, strict=False) if window != 0}
    return [of_kinds.get(kind, 0) for kind in kinds] or windows


def _kept(passed: Any) -> Counter[int | None]:
    """Numbers of keys and values that the cache after a pass keeps of a token, by the layers' windows."""
    kept: Counter[int | None] = Counter()
    for layer in getattr(passed.get("past_key_values"), "layers", ()):
        for part in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if part is not None:
                kept[getattr(layer, "sliding_window", None)] += part.numel() // part.shape[-2]
    return kept


def _place(tracker: ModuleTracker) -> str:
    """The path of the module whose `forward` runs."""
    return max(tracker.parents, key=len)


def image_footprint_of(model: PreTrainedModel, facts: ImageFacts, shape: Sequence[int]) -> ImageFootprint:
    """An image classifier's footprint for an image [channels, height, width]; torch counts operations over its
    shapes."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        # Attention in separate products: the counter does not know every fused kernel.
        plain = AutoModelForImageClassification.from_config(model.config, attn_implementation="eager")
        plain.eval()(pixel_values=torch.empty(1, *shape))
    flops, pixels = counter.get_total_flops(), math.prod(shape)
    return ImageFootprint(facts, weight_bytes(model), flops, pixels, product_dtypes(model))


def footprint_of(model: PreTrainedModel, facts: ModelFacts) -> Footprint:
    """The footprint of a transformers decoder after the stack has changed it; `facts` are those from before. Of a model
    of several parts (an encoder of images) a step reads the decoder, the head and the embedding."""
    parts: set[Module] = set(model.modules())
    if model.config.get_text_config(decoder=True) is not model.config:
        parts = {*model.get_decoder().modules(), model.get_output_embeddings()}
    tables: set[Module] = {module for module in parts if isinstance(module, Embedding)}
    tables.add(model.get_input_embeddings())

    def own(module: Module) -> list[torch.Tensor]:
        return [*module.parameters(recurse=False), *module.buffers(recurse=False)]

    streamed = storages(tensor for each in parts if each not in tables for tensor in own(each))
    rows = [tensor for table in tables for tensor in own(table) if storage_of(tensor) not in streamed]
    return Footprint(
        facts=facts if facts.work or facts.uncounted else counted(facts, model.config),
        streamed_bytes=sum(streamed.values()),
        # A number by which rows are scaled is no table.
        row_bytes=sum(tensor.nbytes // max(1, tensor.shape[0]) for tensor in rows if tensor.dim()),
        product_dtypes=product_dtypes(model),
    )


def product_dtypes(model: Module) -> tuple[str, ...]:
    """What quantized layers multiply in, by their attribute `product_dtypes`."""
    return tuple(sorted({dtype for each in model.modules() for dtype in getattr(each, "product_dtypes", ())}))


def weight_bytes(model: Module) -> int:
    """Bytes of the storages behind a model's parameters and buffers; what is shared counts once."""
    return sum(storages([*model.parameters(), *model.buffers()]).values())


def parameters_of(model: Module) -> dict[str, tuple[int, int]]:
    """The identity and the number of weights of each parameter by its name; what is tied has several names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: (id(parameter), parameter.numel()) for name, parameter in named}


def share_gone(before: Mapping[str, tuple[int, int]], model: Module, weights: int) -> float:
    """Of a model's `weights`, those that came packed or are no parameters any more under one of their names."""
    left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    gone = dict(found for name, found in before.items() if name not in left)
    return (sum(gone.values()) + count_packed(model)) / weights
