"""Checkpoints whose linear layers hold 4-bit numbers, as GPTQ and AWQ leave them, read without their libraries.

Eight numbers share one int32 word. A layer has `qweight`, `scales` [groups, outputs] and `qzeros`, and represents the
weights (q - zero) * scale, with one scale and one zero for each output and each group of inputs.

GPTQ (AutoGPTQ, GPTQModel): qweight [inputs / 8, outputs], word i of an output holds its inputs 8 i to 8 i + 7, the
first in the lowest bits; qzeros [groups, outputs / 8], likewise along the outputs; format "gptq" stores each zero less
one, "gptq_v2" as it is; `g_idx` [inputs] is the group of each input.
AWQ (AutoAWQ, "gemm"): qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8] along the outputs, in the order of
_AWQ_ORDER.

A packed model comes in with layers that hold these tensors and compute nothing: a technique exchanges them, or `widen`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
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
