"""`python -m benchmarks.peers.check`: what llama.cpp reads of the GGUF files written here, beside transformers' logits.

Small models with sharp attention, where a row in the wrong place makes a difference as large as the logits. With
weights, cache and attention in float32 it must be at most EXACT of the largest logit (llama.cpp looks GELU up in a
table of float16); with float16 weights, which hold these models exactly, and llama.cpp's own attention at most ROUNDED.
The exit status is 0 when all are.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from optigpu.backends.llama_cpp.gguf_cache import quantize
from optigpu.backends.llama_cpp.gguf_file import tensor_types, write
from optigpu.backends.llama_cpp.model import LlamaCppModel
from optigpu.report import console

EXACT, ROUNDED = 1e-3, 1e-2
TOKENS = 96
_LLAMA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 512, "n_embd": 256, "n_layer": 3, "n_head": 4, "initializer_range": 0.1}),
    "llama, tied head": ("llama", _LLAMA | {"tie_word_embeddings": True}),
    "llama, untied head": ("llama", _LLAMA | {"tie_word_embeddings": False}),
    "llama, wide heads": ("llama", _LLAMA | {"tie_word_embeddings": False, "head_dim": 64}),
    "llama, llama3 scaling": ("llama", _LLAMA | {"tie_word_embeddings": True, "rope_parameters": _SCALED}),
}


def main() -> int:
    """Prints both differences of each model, and what quantizing makes of its tensors."""
    agreed = True
    for name, (family, config) in MODELS.items():
        model = made(family, config)
        with tempfile.TemporaryDirectory() as folder:
            exact = difference(model, Path(folder) / "F32.gguf", exact=True)
            plain = Path(folder) / "F16.gguf"
            rounded = difference(model, plain, exact=False)
            console().print(f"{name}: F32 {exact:.1e}, F16 {rounded:.1e} of the largest logit", markup=False)
            for weights in ("Q8_0", "Q4_0", "Q4_K_M"):
                console().print(f"  {weights}: {quantized_types(plain, weights)}", markup=False)
        agreed = agreed and exact <= EXACT and rounded <= ROUNDED
    console().print("agreed" if agreed else f"NOT agreed: more than {EXACT:g} or {ROUNDED:g}", markup=False)
    return 0 if agreed else 1


def made(family: str, config: dict[str, Any]) -> Any:
    """A random model whose norms and biases do something, of weights that float16 holds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        # Not the whole model: a rotary embedding's frequencies are a buffer.
        parameter.copy_(parameter.half())
    return model


def difference(model: Any, path: Path, exact: bool) -> float:
    """The largest difference of the logits after each of TOKENS random tokens, over the largest logit.

    Writes `path`, in float32 where all is to be exact.
    """
    import torch

    write(model, path, "float32" if exact else "float16")
    tokens = torch.randint(model.config.vocab_size, (1, TOKENS))
    expected = model(input_ids=tokens).logits[0].numpy()
    theirs = LlamaCppModel(path, TOKENS, threads=1, exact=exact)
    theirs.begin()
    found = np.stack([theirs.forward([token]).copy() for token in tokens[0].tolist()])
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def quantized_types(plain: Path, weights: str) -> str:
    """What llama.cpp makes of the matrices: the types that each layer has in the blocks."""
    target = plain.with_name(f"{weights}.gguf")
    quantize(plain, target, weights, threads=1)
    types: dict[str, set[str]] = {}
    for name, kind in tensor_types(target).items():
        if kind != "F32":
            types.setdefault(name.split(".")[-2], set()).add(kind)
    return ", ".join(f"{name} {'/'.join(sorted(kinds))}" for name, kinds in types.items())


if __name__ == "__main__":
    sys.exit(main())
