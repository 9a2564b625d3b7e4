"""Preparations of a transformers model's weights by each library, by the name of the peer's `weights`."""

from collections.abc import Callable
from typing import Any

from optigpu.vocabulary import UnsupportedError


def _as_linear(model: Any) -> Any:
    """GPT-2's Conv1D as the Linear that the libraries know."""
    import torch
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                linear = torch.nn.Linear(child.nx, child.nf, device="meta")
                linear.weight = torch.nn.Parameter(child.weight.T.contiguous(), requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)
    return model


def _bfloat16(model: Any) -> Any:
    """The weights alone: a rotary embedding's frequencies stay float32, as where transformers loads bfloat16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def _dynamic_int8(model: Any) -> Any:
    import torch

    kinds = {torch.nn.Linear}
    return torch.ao.quantization.quantize_dynamic(_as_linear(model), kinds, dtype=torch.qint8, inplace=True)


def _nf4(model: Any) -> Any:
    """Every linear layer but the head, as transformers' own integration does, computing in the model's dtype.

    In bfloat16 a CPU with AVX-512 has the fused operator of bitsandbytes; in float32 weights are widened first.
    """
    import torch
    from bitsandbytes.nn import Linear4bit

    dtype = model.dtype
    for parent in list(_as_linear(model).modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child is not model.get_output_embeddings():
                bias = child.bias is not None
                layer = Linear4bit(child.in_features, child.out_features, bias, dtype, True, "nf4")
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer.to("cpu"))
    return model


def _torchao_int8(model: Any) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(_as_linear(model), Int8WeightOnlyConfig())
    return model


def _torchao_int4(model: Any) -> Any:
    """torch's packed int4 operators for CPUs, through torchao's configuration for them; the rest is bfloat16.

    They take rows by sixteens, which the head of a GPT-2 of 50,257 tokens has not: it stays bfloat16.
    """
    import torch

    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    except ImportError as error:
        why = f"this torchao has no int4 weights for CPUs ({error}); it is known of 0.18"
        raise UnsupportedError(why) from error
    from torchao.quantization import quantize_

    def fits(module: Any, _name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and module.out_features % 16 == 0

    # The group of Q4_0.
    quantize_(_bfloat16(_as_linear(model)), PrototypeInt4WeightOnlyConfig(group_size=32), fits)
    return model


MODES: dict[str, tuple[str, ...]] = {
    "nf4": ("float32", "bfloat16"),
    "torchao_int8": ("float32", "bfloat16"),
}
"""What a peer may compute in: it runs in the mode that decodes fastest on this machine. Others have one mode."""


def prepared(name: str, model: Any, dtype: str) -> Any:
    """A model of float32 prepared by name, to compute in `dtype` where the peer has several modes."""
    return PREPARE[name](_bfloat16(_as_linear(model)) if dtype == "bfloat16" else model)


PREPARE: dict[str, Callable[[Any], Any]] = {
    "float32": lambda model: model,
    "bfloat16": _bfloat16,
    "dynamic_int8": _dynamic_int8,
    "nf4": _nf4,
    "torchao_int8": _torchao_int8,
    "torchao_int4": _torchao_int4,
}
