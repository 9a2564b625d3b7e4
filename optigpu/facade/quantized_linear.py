"""QuantizedLinear: a drop-in for torch.nn.Linear with frozen 4-bit weights that gradients flow through."""

from collections.abc import Callable, Mapping
from typing import Self, TypeVar

import torch

from optigpu.ops.four_bits.quantize import quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.linear.int4_linear import (
    PackedInt4,
    from_halves,
    int4_linear_backend,
    int4_rows,
    pack_int4,
    to_halves,
    unpack_int4,
)
from optigpu.surgery.integer_layers import int4_product
from optigpu.surgery.places import LinearLayer, linear_places, weight_of
from optigpu.vocabulary import SpecError, UnsupportedError

Model = TypeVar("Model", bound=torch.nn.Module)

GROUP_SIZES = (32, 64, 128)
"""How many inputs of an output may share a scale; None is one scale for each output."""


class QuantizedLinear(torch.nn.Module):
    """y = x @ weight.T + bias with 4-bit weights, by the repository's own int4 operators.

    `group_size` inputs of an output share a bfloat16 scale; None is one scale per channel (output). Weights come by
    `quantize_weights`, `from_linear` or `load_state_dict`; until then `forward` raises UnsupportedError. They are
    frozen: gradients reach the input, the bias (after `layer.bias.requires_grad_()`) and what stands beside the layer,
    such as LoRA's factors; asking for those of the weights is an error. The state dict is the same on every machine.

    >>> import torch
    >>> from optigpu import QuantizedLinear
    >>> weights = torch.linspace(-1, 1, 128 * 64).reshape(64, 128)
    >>> linear_q = QuantizedLinear(128, 64, group_size=32)
    >>> linear_q.quantize_weights(weights)
    >>> linear_q(torch.ones(2, 128)).shape
    torch.Size([2, 64])
    >>> bool((linear_q.weight - weights).abs().max() < 0.07)
    True
    """

    holds_quantized_weights = True
    numbers: torch.Tensor | None
    scale: torch.Tensor | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises SpecError for sizes that are not positive and for a group size that is not one of GROUP_SIZES."""
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise SpecError(
                f"A QuantizedLinear needs at least one input and one output, not {in_features} and {out_features}."
            )
        _check_group(group_size)
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        self.register_buffer("numbers", None, persistent=False)
        self.register_buffer("scale", None, persistent=False)
        start = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if start is None else torch.nn.Parameter(start, requires_grad=False)
        self._device = torch.device(device or torch.get_default_device())

    @classmethod
    def from_linear(cls, layer: LinearLayer, group_size: int | None = None) -> Self:
        """The quantized layer of a torch Linear or a Conv1D of transformers; raises what `quantize_weights` raises."""
        weight, bias = weight_of(layer), layer.bias
        outputs, inputs = weight.shape
        made = cls(inputs, outputs, bias is not None, group_size, weight.device, weight.dtype)
        made.quantize_weights(weight, bias)
        return made.train(layer.training)

    def quantize_weights(self, weights: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Takes the 4-bit numbers of `weights`, floating point [out_features, in_features], on their device. `bias`
        [out_features] replaces the layer's own, and None leaves it. Raises SpecError, with the layer left as it was,
        for another shape or dtype, weights that are NaN or infinite, and a bias where the layer has none."""
        _check_weights(weights, (self.out_features, self.in_features), "weights")
        if bias is not None and self.bias is None:
            raise SpecError("This QuantizedLinear has no bias; make it with bias=True, or leave bias out.")
        if bias is not None:
            _check_weights(bias, (self.out_features,), "bias")
        padded = torch.nn.functional.pad(weights.detach(), (0, self._padded - self.in_features))
        self._hold(quantize_groups(padded, Int4Scheme(self.group_size or self._padded)))
        if self.bias is not None:
            self.bias.data = (self.bias if bias is None else bias).detach().clone().to(weights)

    @property
    def weight(self) -> "FrozenWeight":
        """The dequantized weights, float32 [out_features, in_features]: a copy to be read, without a gradient."""
        packed = self._packed()
        rows = int4_rows(packed, torch.arange(packed.outputs, device=packed.numbers.device))
        return rows[:, : self.in_features].as_subclass(FrozenWeight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] in the dtype of x, floating point [..., in_features]. Raises UnsupportedError before
        there are weights, and SpecError for another number of inputs."""
        if x.shape[-1] != self.in_features:
            raise SpecError(f"This QuantizedLinear takes {self.in_features} inputs; x has {x.shape[-1]}.")
        padded = torch.nn.functional.pad(x, (0, self._padded - self.in_features))
        return int4_product(padded if self._padded > self.in_features else x, self._packed(), self.bias)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raises UnsupportedError where a gradient of the frozen weights is asked for."""
        if requires_grad:
            raise _frozen()
        return super().requires_grad_(False)

    def extra_repr(self) -> str:
        groups = "per channel" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, int4 {groups}"

    @property
    def _padded(self) -> int:
        """Inputs up to a multiple of a group; further ones have weights of zero."""
        unit = self.group_size or GROUP_SIZES[0]
        return -(-self.in_features // unit) * unit

    def _packed(self) -> PackedInt4:
        if self.numbers is None or self.scale is None:
            raise UnsupportedError(
                "This QuantizedLinear has no weights yet; call quantize_weights or load a state dict, or make it with "
                "QuantizedLinear.from_linear."
            )
        return PackedInt4(self.numbers, self.scale, None, self.out_features)

    def _hold(self, weights: Int4Weights) -> None:
        """Packs for the C++ operator, or in torch's plain layout; torch's own int4 layout could not be read back."""
        backend = int4_linear_backend(weights.q.device, torch.float32)
        unit = self.group_size or next(size for size in reversed(GROUP_SIZES) if self._padded % size == 0)
        scale = weights.scale.repeat_interleave(self._padded // weights.scale.shape[1] // unit, dim=1)
        readable = backend if backend.startswith("native") else "torch-dequantize"
        packed = pack_int4(Int4Weights(weights.q, scale, None), readable)
        self.numbers, self.scale = packed.numbers, packed.scale

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        """4-bit numbers, two in a byte, and scales as bfloat16 [out_features, groups], whatever layout is held."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.numbers is not None:
            weights = unpack_int4(self._packed())
            scale = weights.scale[:, :1] if self.group_size is None else weights.scale
            destination[f"{prefix}numbers"] = to_halves(weights.q)
            destination[f"{prefix}scale"] = scale.contiguous()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = [f"{prefix}numbers", f"{prefix}scale"]
        missing_keys += [key for key in keys if key not in state_dict]
        if not any(key in missing_keys for key in keys):
            numbers, scale = (state_dict[key] for key in keys)
            groups = 1 if self.group_size is None else self._padded // self.group_size
            expected = ((self.out_features, self._padded // 2), (self.out_features, groups))
            if (tuple(numbers.shape), tuple(scale.shape)) == expected:
                device = self._device if self.numbers is None else self.numbers.device
                self._hold(Int4Weights(from_halves(numbers.to(device)), scale.to(device), None))
            else:
                error_msgs.append(
                    f"{prefix}numbers and {prefix}scale are {list(numbers.shape)} and {list(scale.shape)}; a "
                    f"QuantizedLinear({self.extra_repr()}) needs {list(expected[0])} and {list(expected[1])}."
                )
        rest = {key: value for key, value in state_dict.items() if key not in keys}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]


class FrozenWeight(torch.Tensor):
    """Dequantized weights to be read. Asking for their gradient raises UnsupportedError; what is computed of them is a
    plain tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.autograd.grad:
            raise _frozen()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            raise _frozen()
        return self

    @property
    def grad(self) -> None:  # type: ignore[override]
        raise _frozen()


def replace_linears(model: Model, group_size: int | None = None) -> Model:
    """Replaces every Linear and Conv1D of a model in place by a QuantizedLinear, and returns the model. A head that is
    tied to an embedding stays: quantized it would be there twice. Raises UnsupportedError, with the model left as it
    was, when there is nothing to replace or a weight is NaN or infinite, and SpecError for a group size that is not one
    of GROUP_SIZES."""
    _check_group(group_size)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    places = [place for place in linear_places(model) if id(place.layer.weight) not in tables]
    if not places:
        raise UnsupportedError("replace_linears found no Linear and no Conv1D in this model.")
    for place in places:
        if not bool(weight_of(place.layer).isfinite().all()):
            raise UnsupportedError(f"replace_linears: {place.path} has weights that are NaN or infinite.")
    for place in places:
        place.put(QuantizedLinear.from_linear(place.layer, group_size))
    return model


def _check_weights(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise SpecError(
            f"{name} must be floating point {list(shape)}, not {str(tensor.dtype)[6:]} {list(tensor.shape)}."
        )
    if not bool(tensor.isfinite().all()):
        raise SpecError(f"{name} holds NaN or infinity; quantize finite numbers.")


def _check_group(group_size: int | None) -> None:
    if group_size is not None and group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise SpecError(
            f"group_size {group_size} is not offered; choose {sizes}, or None for one scale per channel."
        )


def _frozen() -> UnsupportedError:
    return UnsupportedError(
        "The 4-bit weights of a QuantizedLinear are frozen and have no gradient; train factors beside it (LoRA), its "
        "bias by layer.bias.requires_grad_(), or the model before it is quantized."
    )
