"""GGUF files as transformers dequantizes them: checked before, and whether the model is the file's after.

A program as well: python -m optigpu.models.loading.gguf_file FILE FOLDER writes the model of a GGUF file as a folder of
transformers. The weights are what the file's blocks stand for, in float32.
"""

import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    logging,
)

from optigpu.models.gguf_header import Header, read_header
from optigpu.models.reference import ModelReference
from optigpu.vocabulary import UnsupportedError

_NOT_READ = {
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    # llama.cpp's rule for Gemma.
    "query_pre_attn_scalar": "attention.key_length",
}
"""Fields of configurations, and the file's keys that transformers leaves out for some architectures."""
_SCALED_BY_WIDTH = {"gemma2": (46,), "gemma3": (62,)}
"""Numbers of layers of the models whose scores llama.cpp scales by hidden size / heads."""
_FACTORS = "rope_freqs.weight"
_SCALING = "rope.scaling.type"
_PLAIN = (None, "none")
_FAR = "full_attention"
"""The layers that are scaled, where a configuration tells them from those with windows."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.1's and 3.2's, which a file holds as divisors of the frequencies alone."""
_SAME = 1e-4


def sound_gguf(path: Path, reference: ModelReference) -> Header:
    """The header of a file. Raises UnsupportedError for one that is no whole GGUF file of a model of text."""
    try:
        header = read_header(path)
        _require_whole(header)
        _ = header.embedding
    except (ValueError, OSError) as error:
        raise UnsupportedError(
            f"{reference} is not a GGUF file that can be read: {error}; copy or download the file again."
        ) from error
    return header


def _require_whole(header: Header) -> None:
    """Raises ValueError for a tensor whose numbers are not all there."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType}
    for tensor in header.tensors:
        if tensor.type not in known:
            raise ValueError(f"its tensor {tensor.name} is of type {tensor.type}, which gguf does not know")
        block, size = known[tensor.type]
        needed = tensor.elements // block * size
        if tensor.bytes < needed:
            raise ValueError(f"its tensor {tensor.name} has {tensor.bytes} bytes, and needs {needed}")


def restore(config: PretrainedConfig, header: Header, path: Path) -> None:
    """Gives a configuration what the file says and transformers does not read: sizes, and how its rotation is scaled.

    Raises UnsupportedError for a scaling that cannot be said by the configuration.
    """
    config.vocab_size = header.embedding.shape[-1]
    for field, key in _NOT_READ.items():
        if hasattr(config, field) and f"{header.architecture}.{key}" in header.values:
            setattr(config, field, header.number(key))
    if header.number("block_count") in _SCALED_BY_WIDTH.get(header.architecture, ()):
        config.query_pre_attn_scalar = header.number("embedding_length") // header.number(
            "attention.head_count"
        )
    rope = getattr(config, "rope_parameters", None)
    scaling = header.values.get(f"{header.architecture}.{_SCALING}")
    has_factors = any(tensor.name == _FACTORS for tensor in header.tensors)
    if rope is None or rope.get("rope_type", "default") != "default":
        return
    if scaling == "linear" and _scales(header):
        linear = {"rope_type": scaling, "factor": header.values[f"{header.architecture}.rope.scaling.factor"]}
        far = {_FAR: rope[_FAR] | linear} if _FAR in rope else linear
        config.rope_parameters = rope | far
    elif scaling not in _PLAIN and _scales(header):
        raise UnsupportedError(
            f"transformers does not read how {path.name} scales its rotary embedding ({scaling}); ask for the backend "
            "llama_cpp."
        )
    elif has_factors:
        config.rope_parameters = _llama3(dict(rope), path)


def _scales(header: Header) -> bool:
    factor = header.values.get(f"{header.architecture}.rope.scaling.factor", 1.0)
    return not isinstance(factor, int | float) or factor not in (0, 1)


def _llama3(rope: dict[str, Any], path: Path) -> dict[str, Any]:
    """Parameters that give the divisors of the file."""
    from gguf import GGUFReader

    (tensor,) = (each for each in GGUFReader(path).tensors if each.name == _FACTORS)
    divisors = [float(each) for each in tensor.data.flatten()]
    found = rope | _LLAMA3 | {"rope_type": "llama3", "factor": max(divisors)}
    if not all(map(_close, divisors, llama3_divisors(found, len(divisors)))):
        raise UnsupportedError(
            f"transformers does not read how {path.name} scales its rotary embedding ({_FACTORS}); ask for the backend "
            "llama_cpp."
        )
    return found


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME)


def llama3_divisors(rope: Mapping[str, Any], pairs: int) -> list[float]:
    """What llama.cpp divides the frequency of each pair by for Llama 3's scaling, of `pairs` pairs of a head.

    Source: Llama 3.1's `apply_scaling`, as llama.cpp's converter has it.
    """
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    factors = []
    for pair in range(pairs):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (pair / pairs)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def forget_quantizer(model: PreTrainedModel) -> None:
    """Makes a dequantized model one like any other: it can be saved, changed and quantized again."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)


def main() -> int:
    """Prints why it cannot, and is then 1."""
    file, folder = map(Path, sys.argv[1:])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Weights, configuration and tokenizer.
        named = {"gguf_file": file.name}
        config = AutoConfig.from_pretrained(file.parent, **named)
        restore(config, read_header(file), file)
        model = AutoModelForCausalLM.from_pretrained(file.parent, config=config, dtype=torch.float32, **named)
        forget_quantizer(model)
        model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):  # which its writer lets nobody else read
            shutil.copymode(folder / "config.json", path)
        AutoTokenizer.from_pretrained(file.parent, **named).save_pretrained(folder)
    except Exception as error:  # the library raises errors of any kind for a file that it does not read
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
