"""What a model is described as, beside the model itself: tensors, their bytes, and the cache that it really keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from optigpu.backends.torch.kv_caches import new_cache
from optigpu.fit.memory import DecoderMemory
from optigpu.models.described import decoder_facts, decoder_shape, image_facts
from optigpu.models.families import FAMILIES, Passes
from optigpu.models.held import MODELS_DIR
from optigpu.models.loading.describing import description
from optigpu.models.loading.footprint import footprint_of, weight_bytes
from optigpu.models.loading.load import count_weights, load_image_model, load_model, loaded_facts
from optigpu.models.reference import parse_reference
from optigpu.models.tensors import DecoderShape
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import CacheOptions
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.engine.resident_converter import resident_converter

_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
_OPT = {k: v for k, v in _LLAMA.items() if k not in ("intermediate_size", "num_key_value_heads")} | {
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
}
_WINDOW = {"sliding_window": 8, "use_sliding_window": True}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", _GPT),
    ("gpt2", _GPT | {"n_inner": 40, "tie_word_embeddings": False}),
    ("gptj", _GPT | {"rotary_dim": 4}),
    ("opt", _OPT),
    ("opt", _OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("opt", _OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("llama", _LLAMA | {"head_dim": 16}),
    ("llama", _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", _LLAMA | {"sliding_window": 8}),
    ("mistral", _LLAMA | {"sliding_window": None, "head_dim": 4}),
    ("qwen2", _LLAMA | {"use_sliding_window": False, "sliding_window": 8}),
    ("qwen2", _LLAMA | _WINDOW | {"max_window_layers": 1}),
    ("qwen2", _LLAMA | _WINDOW | {"max_window_layers": 3}),
    ("phi3", _LLAMA),
    ("phi3", _LLAMA | {"sliding_window": 8, "tie_word_embeddings": True}),
    ("qwen3", _LLAMA | _WINDOW | {"max_window_layers": 2, "attention_bias": True}),
    ("qwen3", _LLAMA | {"head_dim": 8}),
    ("smollm3", _LLAMA | {"mlp_bias": True}),
    ("smollm3", _LLAMA | _WINDOW | {"layer_types": ["full_attention", *["sliding_attention"] * 2]}),
    # Families that the table does not hold.
    ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}),
    ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "expansion_ratio": 2}),
    ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}),
    ("gpt_neo", {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
     | {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    ("gemma3_text", _LLAMA | {"sliding_window": 8, "sliding_window_pattern": 2, "head_dim": 16}),
    ("mixtral", _LLAMA | _EXPERTS),
    ("qwen2_moe", _LLAMA | _WINDOW | _EXPERTS | {"shared_expert_intermediate_size": 24}),
]  # fmt: skip
LENGTH = 20


def config_of(family: str, values: dict[str, Any]) -> PretrainedConfig:
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(family, **special, **values)


def model_of(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return model


def kept_bytes(model: PreTrainedModel, kind: str) -> int:
    """Of the cache that the model has after a prompt, as transformers allocates it."""
    cache = new_cache(model, CacheOptions(kind="static" if kind == "static" else "dynamic"), LENGTH)
    with torch.no_grad():
        model(input_ids=torch.ones(1, LENGTH, dtype=torch.int64), past_key_values=cache, use_cache=True)
    layers: Any = cache.layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def test_every_decoder_of_the_table_is_a_case() -> None:
    assert {name for name, family in FAMILIES.items() if family.passes} <= {family for family, _ in CASES}


@pytest.mark.parametrize(("family", "values"), CASES, ids=[family for family, _ in CASES])
def test_parameters_and_bytes_of_weights_and_cache_are_those_of_the_model(
    family: str, values: dict[str, Any]
) -> None:
    config = config_of(family, values)
    found, model = description(config), model_of(config)
    assert found.parameters == count_weights(model)
    assert found.facts == loaded_facts(model)
    assert found.caches
    known = FAMILIES.get(family)
    passes = known.passes if known else None
    reference = parse_reference(f"path:{family}")
    shape = DecoderShape(reference, found, found.caches, passes or Passes())
    memory = DecoderMemory(shape, (), DeviceKind.CPU)
    assert memory.stored.bytes == weight_bytes(model)
    assert memory.cache_bytes(1, LENGTH, LENGTH) == kept_bytes(model, "dynamic")
    half = DecoderMemory(shape, (TECHNIQUES["bf16"](name="bf16"),), DeviceKind.CPU)
    assert half.stored.bytes == weight_bytes(model_of(config, torch.bfloat16))
    if passes:
        static = DecoderMemory(
            shape, (TECHNIQUES["static_kv_cache"](name="static_kv_cache"),), DeviceKind.CPU
        )
        assert static.cache_bytes(1, LENGTH, LENGTH) == kept_bytes(model, "static")


def test_a_folder_is_read_with_the_names_and_defaults_of_its_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields are left out as the hub's files leave them out, and what was found is found again without the program."""
    folders: dict[str, dict[str, Any]] = {
        "bloom": {"n_embed": 32, "n_layer": 2, "n_head": 4},
        "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
        "mamba": {"hidden_size": 32, "num_hidden_layers": 2},
        "gptj": {"n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 4},
        "t5": {},
        "bert": {},
        "wav2vec2": {},
        "vit": {"image_size": 32},
        "nobody-knows": {},
    }
    for family, values in folders.items():
        (tmp_path / "models" / family).mkdir(parents=True)
        (tmp_path / "models" / family / "config.json").write_text(json.dumps(values | {"model_type": family}))
    monkeypatch.setenv(MODELS_DIR, str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def read(family: str) -> tuple[int, int, int, int, int | None]:
        facts = decoder_facts(parse_reference(f"path:{family}"))
        return facts.hidden_size, facts.layers, facts.heads, facts.vocabulary, facts.context

    def refusal(family: str) -> str:
        with pytest.raises(UnsupportedError) as refused:
            decoder_facts(parse_reference(f"path:{family}"))
        return str(refused.value)

    with resident_converter():
        assert read("bloom") == (32, 2, 4, 250880, None)
        assert read("gpt_neo") == (2048, 2, 4, 50257, 2048)
        assert read("mpt") == (32, 2, 4, 50368, 128)
        assert read("mamba") == (32, 2, 0, 50280, None)
        assert read("gptj") == (32, 2, 4, 50400, 2048)
        assert decoder_shape(parse_reference("path:gptj")).facts.longest == 2048
        with pytest.raises(
            UnsupportedError, match="path:bloom cannot be predicted: what bloom models hold in"
        ):
            decoder_shape(parse_reference("path:bloom"))
        assert refusal("t5").startswith("path:t5 is an encoder-decoder (t5); name a model")
        assert refusal("bert").startswith("path:bert is an encoder (bert), which generates no text; name")
        assert refusal("wav2vec2").startswith(
            "path:wav2vec2 is a wav2vec2 model, which generates no text; name a model"
        )
        assert refusal("vit").startswith("path:vit classifies images; name a model that generates text")
        assert refusal("nobody-knows").startswith("The configuration of path:nobody-knows cannot be read: ")
        assert "model type `nobody-knows`" in refusal("nobody-knows")
        assert image_facts(parse_reference("path:vit")).image_size == 32
        with pytest.raises(UnsupportedError, match="path:t5 is an encoder-decoder"):
            load_model(parse_reference("path:t5"), device="cpu", dtype="float32")
        with pytest.raises(UnsupportedError, match="path:gptj is a gptj model, which classifies no images"):
            load_image_model(parse_reference("path:gptj"), device="cpu", dtype="float32")
    monkeypatch.setattr("optigpu.models.described.PROGRAM", "optigpu.no_such_program")
    assert read("bloom") == (32, 2, 4, 250880, None)


def test_a_number_that_scales_an_embedding_is_no_row_of_it() -> None:
    model = model_of(config_of("gemma3_text", _LLAMA | {"head_dim": 8, "tie_word_embeddings": False}))
    assert footprint_of(model, loaded_facts(model)).row_bytes == 4 * 32
