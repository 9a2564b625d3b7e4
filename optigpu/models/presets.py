"""Presets: the architectures of known models as data for transformers' configuration classes; weights are random."""

from dataclasses import dataclass, field
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Preset:
    """transformers' architecture, where its shapes are published, its weights' number, and what is not its default."""

    model_type: str
    source: str
    parameters: int
    config: dict[str, Any] = field(default_factory=dict)


def _gpt2(size: str, parameters: int, width: int, layers: int, heads: int) -> Preset:
    shapes = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return Preset("gpt2", f"openai-community/{size}", parameters, shapes)


def _llama(source: str, model_type: str, parameters: int, *shapes: int, **more: Any) -> Preset:
    """`shapes`: width, inner width of the MLP, layers, heads."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return Preset(model_type, source, parameters, dict(zip(names, shapes, strict=True)) | more)


def _image(model_type: str, source: str, parameters: int, side: int, classes: int, **more: Any) -> Preset:
    return Preset(model_type, source, parameters, {"num_labels": classes, "image_size": side} | more)


_OURS = "made for this project's tests"
PRESETS: dict[str, Preset] = {
    "gpt2": _gpt2("gpt2", 124_439_808, 768, 12, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 354_823_168, 1024, 24, 16),
    "gpt2-large": _gpt2("gpt2-large", 774_030_080, 1280, 36, 20),
    "opt-125m": Preset(
        "opt",
        "facebook/opt-125m",
        125_239_296,
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072}
        | {"vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768},
    ),
    "gpt-j-6b": Preset(
        "gptj",
        "EleutherAI/gpt-j-6b",
        6_050_882_784,
        {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64, "n_positions": 2048}
        | {"vocab_size": 50400, "tie_word_embeddings": False},
    ),
    "llama-3.2-1b": _llama(
        "meta-llama/Llama-3.2-1B", "llama", 1_235_814_400, 2048, 8192, 16, 32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=_LLAMA3_ROPE | {"factor": 32.0},
    ),
    "llama-3.1-8b": _llama(
        "meta-llama/Llama-3.1-8B", "llama", 8_030_261_248, 4096, 14336, 32, 32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE | {"factor": 8.0},
    ),
    "llama-3.1-70b": _llama(
        "meta-llama/Llama-3.1-70B", "llama", 70_553_706_496, 8192, 28672, 80, 64,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE | {"factor": 8.0},
    ),
    "llama-3.1-405b": _llama(
        "meta-llama/Llama-3.1-405B", "llama", 405_853_388_800, 16384, 53248, 126, 128,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE | {"factor": 8.0},
    ),
    "llama-7b": _llama(
        "huggyllama/llama-7b", "llama", 6_738_415_616, 4096, 11008, 32, 32,
        vocab_size=32000, max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=False,
    ),
    "llama-2-13b": _llama(
        "meta-llama/Llama-2-13b-hf", "llama", 13_015_864_320, 5120, 13824, 40, 40,
        vocab_size=32000, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "mistral-7b-v0.1": _llama(
        "mistralai/Mistral-7B-v0.1", "mistral", 7_241_732_096, 4096, 14336, 32, 32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768, sliding_window=4096,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "mistral-7b": _llama(
        "mistralai/Mistral-7B-v0.3", "mistral", 7_248_023_552, 4096, 14336, 32, 32,
        num_key_value_heads=8, vocab_size=32768, max_position_embeddings=32768, sliding_window=None,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen2.5-0.5b": _llama(
        "Qwen/Qwen2.5-0.5B", "qwen2", 494_032_768, 896, 4864, 24, 14,
        num_key_value_heads=2, vocab_size=151936, max_position_embeddings=32768, use_sliding_window=False,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "tiny-gpt2-test": Preset(
        "gpt2",
        _OURS,
        527_872,
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 512},
    ),
    "tiny-qwen-test": _llama(
        _OURS, "qwen2", 361_600, 128, 256, 2, 4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=512, tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "tiny-llama-test": _llama(
        _OURS, "llama", 361_088, 128, 256, 2, 4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=512, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Every preset that generates text, by its name."""

IMAGE_PRESETS: dict[str, Preset] = {
    "resnet-50": _image("resnet", "microsoft/resnet-50", 25_557_032, 224, 1000),
    "mobilenet-v2": _image("mobilenet_v2", "google/mobilenet_v2_1.0_224", 3_506_153, 224, 1001),
    # The sizes that microcontrollers run, with ImageNet's 1000 classes as Keras's models have them.
    "mobilenet-v2-0.35-96": _image(
        "mobilenet_v2", "google/mobilenet_v2_0.35_96", 1_677_128, 96, 1000, depth_multiplier=0.35
    ),
    "mobilenet-v2-1.0-224": _image(
        "mobilenet_v2", "keras.applications.MobileNetV2", 3_504_872, 224, 1000, depth_multiplier=1.0
    ),
    "vit-base": _image("vit", "google/vit-base-patch16-224", 86_567_656, 224, 1000),
    "tiny-resnet-test": _image(
        "resnet", _OURS, 4_786, 32, 10, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2]
    ),
    "tiny-mobilenet-test": _image(
        "mobilenet_v2", _OURS, 48_202, 32, 10, depth_multiplier=0.1, finegrained_output=False
    ),
    "tiny-vit-test": _image(
        "vit", _OURS, 24_234, 32, 10,
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, patch_size=8,
    ),
}  # fmt: skip
"""Every preset that classifies images, by its name. `image_size` is the side in pixels that it was trained with."""
