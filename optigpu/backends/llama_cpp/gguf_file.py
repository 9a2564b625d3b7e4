"""A transformers GPT-2 or Llama as a GGUF file without a vocabulary, which llama.cpp reads."""

from pathlib import Path
from typing import Any

from optigpu.backends.llama_cpp.gguf_tensors import metadata, tensors


def write(model: Any, path: Path, matrices: str = "float16") -> None:
    """Writes matrices as float16 and vectors as float32, as llama.cpp's own converter does, one tensor at a time.

    `matrices` may be float32 instead. Raises UnsupportedError for a family that is not written here.
    """
    import gguf
    import numpy as np

    def kind_of(name: str, tensor: Any) -> Any:
        matrix = tensor.dim() == 2 and name != "position_embd.weight"
        return np.dtype(matrices if matrix else np.float32)

    writer = gguf.GGUFWriter(str(path), model.config.model_type)
    for key, value in metadata(model.config).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    whole = matrices == "float32"
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if whole else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("none")
    for name, tensor in tensors(model):
        kind = kind_of(name, tensor)
        writer.add_tensor_info(name, tuple(tensor.shape), kind, tensor.numel() * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors(model):
        writer.write_tensor_data(tensor.contiguous().numpy().astype(kind_of(name, tensor)))
    writer.close()


def tensor_types(path: Path) -> dict[str, str]:
    """The type of each tensor of a GGUF file, by its name."""
    import gguf

    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(str(path)).tensors}
