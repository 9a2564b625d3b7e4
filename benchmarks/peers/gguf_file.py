"""A transformers GPT-2 as a GGUF file without a vocabulary, which llama.cpp reads."""

from pathlib import Path
from typing import Any

_BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""What llama.cpp calls the layers of a block of GPT-2."""


def write_gpt2(model: Any, path: Path) -> None:
    """Writes matrices as float16 and vectors as float32, as llama.cpp's own converter does; the head is tied."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in _tensors(model):
        half = tensor.dim() == 2 and name != "position_embd.weight"
        writer.add_tensor(name, (tensor.half() if half else tensor.float()).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> list[tuple[str, Any]]:
    body = model.transformer
    tensors = [
        ("token_embd.weight", body.wte.weight),
        ("position_embd.weight", body.wpe.weight),
        ("output_norm.weight", body.ln_f.weight),
        ("output_norm.bias", body.ln_f.bias),
    ]
    for number, block in enumerate(body.h):
        for theirs, ours in _BLOCK.items():
            layer = block.get_submodule(theirs)
            # Conv1D keeps its matrix the other way round.
            weight = layer.weight.T if layer.weight.dim() == 2 else layer.weight
            tensors += [
                (f"blk.{number}.{ours}.weight", weight),
                (f"blk.{number}.{ours}.bias", layer.bias),
            ]
    return [(name, tensor.detach()) for name, tensor in tensors]
