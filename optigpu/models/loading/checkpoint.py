"""Reads a checkpoint whole: each number of the model comes from its files, and none is drawn at random.

Checkpoints whose linear layers hold 4-bit numbers, as GPTQ and AWQ leave them, are read without their libraries.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from optigpu.vocabulary import UnsupportedError

METHODS = ("gptq", "awq")
GROUP_SIZES = (32, 64, 128)
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_PER_WORD, _BITS, _MASK = 8, 4, 15
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The order of eight outputs in a word, from its lowest four bits."""
_ONES = 0x11111111
"""One for each zero of a word."""
_QUANTIZER = "optigpu_packed"


@dataclass(frozen=True)
class Packing:
    """How layers are packed; `less_one`: zeros are stored less one."""

    method: str
    group_size: int
    less_one: bool


class Unpacked(NamedTuple):
    """A layer's numbers: q uint8 [outputs, inputs], scale float32 and zero uint8 [outputs, groups].

    `order` (int64 [inputs], or None) are the inputs in the order in which q has them, so that groups are consecutive.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    order: torch.Tensor | None


class PackedLinear(torch.nn.Module):
    """A linear layer's tensors as a checkpoint has them; it computes nothing."""

    holds_quantized_weights = True
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor | None

    def __init__(
        self, packing: Packing, headers: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> None:
        """`headers` are empty tensors of the checkpoint's types and shapes, by name."""
        super().__init__()
        self.packing = packing
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            self.register_buffer(name, headers.get(name))
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        groups, self.outputs = self.scales.shape
        self.inputs = groups * packing.group_size

    @property
    def weight(self) -> torch.Tensor:
        """The shape of its weights without numbers: transformers initializes some layers by their parent."""
        return torch.empty(self.outputs, self.inputs, device="meta")

    def order(self) -> torch.Tensor | None:
        """Its inputs sorted by their groups, int64; None if they are. Raises UnsupportedError for groups of several
        sizes."""
        groups = self.g_idx
        if groups is None:
            return None
        inputs = torch.arange(len(groups), device=groups.device, dtype=groups.dtype)
        expected = inputs // self.packing.group_size
        if groups.equal(expected):
            return None
        if not groups.sort().values.equal(expected):
            raise UnsupportedError("A layer's g_idx has groups of different sizes; pack the model again.")
        return groups.argsort(stable=True)

    def unpacked(self) -> Unpacked:
        """Its numbers. Raises UnsupportedError as `order` does."""
        if self.packing.method == "awq":
            q, zero = _unpacked_awq(self.qweight), _unpacked_awq(self.qzeros)
        else:
            stored = self.qzeros + _ONES if self.packing.less_one else self.qzeros
            q, zero = _unpacked(self.qweight.T).T, _unpacked(stored)
        order = self.order()
        q = q if order is None else q[order]
        scale = self.scales.float().T.contiguous()
        return Unpacked(q.T.contiguous(), scale, zero.T.contiguous(), order)


def packing_of(config: PretrainedConfig) -> Packing | None:
    """How a model is packed; None if not by GPTQ or AWQ. Raises UnsupportedError for other bits, groups or layouts."""
    facts = getattr(config, "quantization_config", None)
    if facts is None:
        return None
    known: Mapping[str, Any] = facts if isinstance(facts, Mapping) else facts.to_dict()
    method = str(known.get("quant_method", ""))
    if method not in METHODS:
        return None
    form = str(
        known.get("checkpoint_format") or known.get("version") or known.get("format") or _FORMATS[method][0]
    )
    bits, group = known.get("bits", known.get("w_bit")), known.get("group_size", known.get("q_group_size"))
    unreadable = [
        (form.lower() not in _FORMATS[method], f"the layout {form}"),
        (bits != _BITS, f"{bits} bits"),
        (group not in GROUP_SIZES, f"groups of {group}"),
        (method == "awq" and not known.get("zero_point", True), "no zero points"),
    ]
    for wrong, what in unreadable:
        if wrong:
            raise UnsupportedError(
                f"This model was quantized by {method} with {what}; supported are 4 bits in groups of "
                f"{', '.join(map(str, GROUP_SIZES))} in the layout {' or '.join(_FORMATS[method])}."
            )
    return Packing(method, int(group or 0), form.lower() == "gptq")


def read_packed(
    packing: Packing, config: PretrainedConfig, read: Callable[[PretrainedConfig], PreTrainedModel]
) -> PreTrainedModel:
    """Calls `read(config)`, which is from_pretrained, with a quantizer of ours, so that layers come in packed."""
    config.quantization_config = {"quant_method": _QUANTIZER, "packing": packing}
    return read(config)


def packed_layers(model: torch.nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, PackedLinear))


def widen(model: PreTrainedModel) -> None:
    """Replaces each packed layer by a plain one with its unpacked weights."""
    for path, packed in list(packed_layers(model)):
        layer = torch.nn.Linear(packed.inputs, packed.outputs, packed.bias is not None, device="meta")
        layer.weight = torch.nn.Parameter(weights_of(packed.unpacked()).to(model.dtype), requires_grad=False)
        layer.register_parameter("bias", packed.bias)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)


def weights_of(unpacked: Unpacked) -> torch.Tensor:
    """The unpacked weights, float32 [outputs, inputs], with inputs in the layer's order."""
    q, scale, zero, order = unpacked
    numbers = q.view(*scale.shape, -1).float()
    flat = ((numbers - zero.float()[..., None]) * scale[..., None]).flatten(1)
    return flat if order is None else torch.empty_like(flat).index_copy_(1, order, flat)


def count_packed(model: torch.nn.Module) -> int:
    return sum(layer.outputs * layer.inputs for _, layer in packed_layers(model))


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 8 columns] of int32 [rows, columns], the lowest bits first."""
    shifts = torch.arange(0, _PER_WORD * _BITS, _BITS, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & _MASK).to(torch.uint8).flatten(1)


def _unpacked_awq(words: torch.Tensor) -> torch.Tensor:
    numbers = _unpacked(words).view(words.shape[0], -1, _PER_WORD)
    places = torch.tensor(_AWQ_ORDER, device=words.device).argsort()
    return numbers[..., places].flatten(1)


@register_quantization_config(_QUANTIZER)
class _Config(QuantizationConfigMixin):
    """How a packed model is quantized, while it is loaded."""

    def __init__(self, packing: Packing, **_: object) -> None:
        self.quant_method: Any = _QUANTIZER
        self.packing = packing


@register_quantizer(_QUANTIZER)
class _Quantizer(HfQuantizer):
    """Makes room for packed layers before transformers reads their tensors."""

    requires_calibration = True  # before it was packed; here nothing is quantized
    is_trainable = False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        config: Any = self.quantization_config
        files = kwargs["checkpoint_files"]
        for path, headers in _headers(files).items():
            parent, _, name = path.rpartition(".")
            place = model.get_submodule(parent)
            plain = getattr(place, name)
            packed = PackedLinear(config.packing, headers, plain.bias)
            _require_fit(path, packed, plain)
            setattr(place, name, packed)
        return model

    def is_serializable(self, **_: object) -> bool:
        return False


def _headers(files: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The types and shapes of the packed layers' tensors in safetensors files, as empty tensors by layer and name."""
    types = {"I32": torch.int32, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names: list[str] = tensors.keys()
            for key in names:
                path, _, name = key.rpartition(".")
                if name in ("qweight", "qzeros", "scales", "g_idx"):
                    header = tensors.get_slice(key)
                    shape, dtype = header.get_shape(), types[header.get_dtype()]
                    found.setdefault(path, {})[name] = torch.empty(shape, dtype=dtype, device="meta")
    return {path: headers for path, headers in found.items() if "qweight" in headers}


def _require_fit(path: str, packed: PackedLinear, plain: Any) -> None:
    """Checks that the packed tensors have the sizes of their layer: some checkpoints mix several kinds."""
    outputs, inputs = plain.weight.T.shape if hasattr(plain, "nf") else plain.weight.shape
    words, groups = outputs * inputs // _PER_WORD, inputs // packed.packing.group_size
    fits = (packed.outputs, packed.inputs) == (outputs, inputs)
    if not fits or packed.qweight.numel() != words or packed.qzeros.numel() != groups * outputs // _PER_WORD:
        raise UnsupportedError(
            f"{path} is not packed as the checkpoint's configuration says (4 bits in groups of "
            f"{packed.packing.group_size}); checkpoints of several kinds of layers cannot be read."
        )


AutoModel = type[AutoModelForCausalLM] | type[AutoModelForImageClassification]
_NAMED = 3
"""So many tensors are named in an error."""
_NOT_COMPUTED_WITH = "num_batches_tracked"
"""A counter of batch norms that old checkpoints leave out; nothing is computed with it while they have a momentum."""
_UNCONVERTED = "automatic conversion of the weights"
"""What transformers says where it cannot put the tensors of a checkpoint together to one of the model's (experts)."""
_MEND = "copy the whole checkpoint, or correct config.json"
_NUMBER = re.compile(r"(?<![^.])(\d+)\.")
"""A layer's number within a tensor's name."""
_HEADS = "num_nextn_predict_layers"
"""So many layers more may be in a checkpoint: heads that predict several tokens, which the library does not compute."""


def read_whole(kind: AutoModel, name: str, source: str, **options: object) -> PreTrainedModel:
    """What `kind` reads from the safetensors files of `source` with `options`; `name` is what errors call the model.

    Raises UnsupportedError for what transformers only logs: a tensor that the files lack or that has another shape
    there, which would be drawn at random, and a further tensor of a layer (a bias, a scale) or a further layer. What is
    tied may be absent, and what belongs to no layer may be there: `unused_of` says what.
    """
    read: Any = kind.from_pretrained  # its type leaves out the pair that it returns here
    try:
        model, found = read(
            source, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **options
        )
    except RuntimeError as error:
        if _UNCONVERTED not in str(error):
            raise
        raise UnsupportedError(
            f"{name} cannot be loaded: tensors of its experts are missing or do not fit each other; {_MEND}."
        ) from error
    names = list(model.state_dict())
    missing = {key for key in found["missing_keys"] if not key.endswith(_NOT_COMPUTED_WITH)}
    _require_none_missing(name, missing, found["unexpected_keys"], names)
    _require_shapes(name, found["mismatched_keys"], names)
    _require_used(name, found["unexpected_keys"], names)
    _require_all_layers(name, found["unexpected_keys"], names, model)
    loaded: PreTrainedModel = model
    _UNUSED[loaded] = _listed(sorted(found["unexpected_keys"])) or None
    return loaded


_UNUSED: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()


def unused_of(model: PreTrainedModel) -> str | None:
    """The tensors of its checkpoint that a model has no place for, unless by transformers' design; None without any."""
    return _UNUSED.get(model)


def _require_none_missing(
    name: str, missing: Collection[str], unexpected: Collection[str], names: Sequence[str]
) -> None:
    if not missing:
        return
    others = (
        f" (and has {_listed(sorted(unexpected))}, which the model has no place for)" if unexpected else ""
    )
    raise UnsupportedError(
        f"{name} lacks {len(missing)} of the {len(names)} tensors of the model that config.json describes: "
        f"{_listed(_in_order(missing, names))}{others}; {_MEND}."
    )


def _require_shapes(
    name: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]], names: Sequence[str]
) -> None:
    shapes = {key: (list(stored), list(expected)) for key, stored, expected in mismatched}
    if not shapes:
        return
    first = _in_order(shapes, names)[0]
    stored, expected = shapes[first]
    also = f" (and {len(shapes) - 1} more)" if len(shapes) > 1 else ""
    raise UnsupportedError(
        f"{name} does not fit its config.json: {first} is {stored} in the checkpoint and {expected} in the model"
        f"{also}; {_MEND}."
    )


def _require_used(name: str, unexpected: Iterable[str], names: Iterable[str]) -> None:
    layers = tuple(key.removesuffix("weight") for key in names if key.endswith(".weight"))
    unused = sorted(key for key in unexpected if key.startswith(layers))
    if unused:
        raise UnsupportedError(
            f"{name} has tensors for layers of the model that the model does not compute with, since config.json does "
            f"not say so: {_listed(unused)}; correct config.json, or remove them."
        )


def _require_all_layers(
    name: str, unexpected: Iterable[str], names: Iterable[str], model: PreTrainedModel
) -> None:
    """A checkpoint may be written without the prefix that the model's own names have."""
    prefix = f"{model.base_model_prefix}."
    own = _counts([*names, *(each.removeprefix(prefix) for each in names)])
    more = getattr(model.config.get_text_config(decoder=True), _HEADS, None) or 0
    for path, count in _counts(unexpected).items():
        if path in own and count > own[path] + more:
            raise UnsupportedError(
                f"{name} has {count} layers in {path} and config.json says {own[path]}; correct config.json, or remove "
                "the other layers."
            )


def _counts(names: Iterable[str]) -> Mapping[str, int]:
    """How many layers there are by the path of their list ("model.layers"), as far as their numbers say."""
    found: dict[str, int] = {}
    for name in names:
        for number in _NUMBER.finditer(name):
            path = name[: number.start()].rstrip(".")
            found[path] = max(found.get(path, 0), int(number[1]) + 1)
    return found


def _in_order(keys: Collection[str], names: Sequence[str]) -> list[str]:
    places = {key: place for place, key in enumerate(names)}
    return sorted(keys, key=lambda key: (places.get(key, len(names)), key))


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(keys[:_NAMED]) + more
