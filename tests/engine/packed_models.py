"""Checkpoints of 4-bit layers, written number by number as GPTQ and AWQ lay them out: apart from what reads them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Linear
from transformers.pytorch_utils import Conv1D

from tests.engine.tiny_models import tiny_model

PACKED_FAMILIES = {"gptq": ("gpt2", "llama", "opt", "qwen2"), "awq": ("llama", "opt", "qwen2")}
"""GPTQ can pack every tiny family; what writes AWQ does not know GPT-2's layers."""
GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written. `exact` takes scales and zeros that bfloat16 can hold, and so can our layers."""

    method: str = "gptq"
    less_one: bool = True
    act_order: bool = False
    exact: bool = True

    def config(self) -> dict[str, Any]:
        """What the model's config.json says of it."""
        common = {"bits": 4, "group_size": GROUP, "quant_method": self.method}
        if self.method == "awq":
            return common | {"zero_point": True, "version": "gemm"}
        form = "gptq" if self.less_one else "gptq_v2"
        return common | {"checkpoint_format": form, "desc_act": self.act_order, "sym": False}


def write_packed_tiny(folder: Path, family: str, layout: Layout) -> Any:
    """As `write_packed`, a tiny model whose biases float16 can hold."""
    torch.manual_seed(1)
    model = tiny_model(family)
    for layer in linear_layers(model).values():
        if layer.bias is not None:
            layer.bias.data = torch.randn_like(layer.bias).half().float()
    return write_packed(folder, model, layout)


def write_packed(folder: Path, model: Any, layout: Layout) -> Any:
    """Writes a float32 model with every linear layer packed but the head.

    Returns it in float64 with exactly the unpacked weights.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    generator = np.random.default_rng(2)
    for path, layer in linear_layers(model).items():
        if layer.bias is not None:
            tensors[f"{path}.bias"] = layer.bias.data.half()
        weight = layer.weight.detach().double().numpy()
        found, written = packed(weight if is_transposed(layer) else weight.T, layout, generator)
        del tensors[f"{path}.weight"]
        tensors |= {f"{path}.{name}": torch.from_numpy(array) for name, array in written.items()}
        wide = torch.from_numpy(found if is_transposed(layer) else found.T.copy())
        layer.weight = torch.nn.Parameter(wide, requires_grad=False)
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": layout.config()}
    (folder / "config.json").write_text(json.dumps(config))
    return model.double()


def linear_layers(model: Any) -> dict[str, Any]:
    """The linear layers of a model that may be packed, by their paths: all but the head."""
    head = model.get_output_embeddings()
    kinds = (Linear, Conv1D)
    return {name: one for name, one in model.named_modules() if isinstance(one, kinds) and one is not head}


def is_transposed(layer: Any) -> bool:
    """Whether a layer has its weights as [inputs, outputs]."""
    return type(layer).__name__ == "Conv1D"


def as_rows(layer: Any) -> Any:
    """The weight of a layer as [outputs, inputs]."""
    return layer.weight.T if is_transposed(layer) else layer.weight


def packed(
    weight: NDArray[np.float64], layout: Layout, generator: np.random.Generator
) -> tuple[NDArray[np.float64], dict[str, NDArray[Any]]]:
    """Weights [inputs, outputs] after rounding, and their packed tensors."""
    inputs, outputs = weight.shape
    group_of = np.arange(inputs) // GROUP
    if layout.act_order:
        group_of = generator.permutation(group_of)
    groups = inputs // GROUP
    scales = np.empty((groups, outputs), np.float16)
    zeros = np.empty((groups, outputs), np.int64)
    q = np.empty((inputs, outputs), np.int64)
    rounded = np.empty_like(weight)
    for group in range(groups):
        rows = group_of == group
        scales[group], zeros[group] = _scales(weight[rows], layout, generator)
        q[rows] = np.clip(np.rint(weight[rows] / scales[group].astype(float)) + zeros[group], 0, 15)
        rounded[rows] = (q[rows] - zeros[group]) * scales[group].astype(float)
    written: dict[str, NDArray[Any]] = {"scales": scales}
    if layout.method == "awq":
        return rounded, written | {
            "qweight": _along_outputs(q, _AWQ_ORDER),
            "qzeros": _along_outputs(zeros, _AWQ_ORDER),
        }
    stored = _along_outputs(zeros, range(8))
    if layout.less_one:
        stored = (stored.view(np.uint32) - np.uint32(0x11111111)).view(
            np.int32
        )  # borrows from the next, if need be
    g_idx = group_of.astype(np.int32)
    return rounded, written | {"qweight": _along_inputs(q), "qzeros": stored, "g_idx": g_idx}


def _scales(
    weight: NDArray[np.float64], layout: Layout, generator: np.random.Generator
) -> tuple[NDArray[np.float16], NDArray[np.int64]]:
    """Scales [outputs] and zeros [outputs] for the rows of one group.

    The exact ones are powers of two, so that (8 - zero) * scale is a bfloat16 number as well.
    """
    span = np.maximum(np.ptp(weight, axis=0), 1e-3)
    scales = 2.0 ** np.ceil(np.log2(span / 15)) if layout.exact else span / 15
    zeros = (
        np.rint(-weight.min(axis=0) / scales) if not layout.exact else generator.integers(0, 16, len(span))
    )
    return scales.astype(np.float16), np.clip(zeros, 0, 15).astype(np.int64)


def _along_inputs(numbers: NDArray[np.int64]) -> NDArray[np.int32]:
    """[rows, columns] -> [rows / 8, columns], the first of eight rows in the lowest bits."""
    words = np.zeros((len(numbers) // 8, numbers.shape[1]), np.uint32)
    for row, values in enumerate(numbers):
        words[row // 8] |= values.astype(np.uint32) << np.uint32(4 * (row % 8))
    return words.view(np.int32)


def _along_outputs(numbers: NDArray[np.int64], order: Any) -> NDArray[np.int32]:
    """[rows, columns] -> [rows, columns / 8], column order[i] of eight in bits 4 i to 4 i + 3."""
    words = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            words[:, word] |= numbers[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)
