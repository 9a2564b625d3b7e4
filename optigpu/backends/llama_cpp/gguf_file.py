"""A model of transformers as a GGUF file without a vocabulary, which llama.cpp reads."""

from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from optigpu.backends.llama_cpp.gguf_families import written_family
from optigpu.backends.llama_cpp.gguf_tensors import metadata, tensors

Matrices = Literal["float16", "float32"]


def write(model: PreTrainedModel, path: Path, matrices: Matrices) -> None:
    """Writes matrices in that dtype and vectors as float32, as llama.cpp's own converter does, one tensor at a time.

    Raises UnsupportedError for a family or a field of its configuration that cannot be written.
    """
    writer = gguf.GGUFWriter(str(path), written_family(model.config.model_type).gguf.architecture)
    for key, value in metadata(model.config).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    types = gguf.LlamaFileType
    writer.add_file_type(types.ALL_F32 if matrices == "float32" else types.MOSTLY_F16)
    writer.add_tokenizer_model("none")
    for name, tensor in tensors(model):
        dtype = _dtype(name, tensor, matrices)
        writer.add_tensor_info(name, tuple(tensor.shape), dtype, tensor.numel() * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors(model):
        writer.write_tensor_data(tensor.contiguous().numpy().astype(_dtype(name, tensor, matrices)))
    writer.close()


def _dtype(name: str, tensor: torch.Tensor, matrices: Matrices) -> "np.dtype[np.floating]":
    is_matrix = tensor.dim() == 2 and name != "position_embd.weight"
    return np.dtype(matrices if is_matrix else "float32")
