"""Families of decoders: what a model is described as, and the layers whose weights it reads."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.kv_caches import new_cache
from optigpu.fit.memory import DecoderMemory
from optigpu.job.spec import resolve
from optigpu.models.described import DecoderShape, decoder_facts, decoder_shape, image_facts
from optigpu.models.families import FAMILIES, ModelFamily, Passes
from optigpu.models.held import MODELS_DIR
from optigpu.models.loading.describing import described, description
from optigpu.models.loading.footprint import counted, weight_bytes
from optigpu.models.loading.load import count_weights, load_image_model, load_model, loaded_facts
from optigpu.models.reference import parse_reference
from optigpu.surgery.places import exchange, expert_places
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import CacheOptions
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import long
from tests.contract.test_registered import classes
from tests.engine.caches import resident_converter
from tests.engine.causal_families import causal_families, causal_model
from tests.engine.tiny_models import MIXTURES, ignore, prompt

CAUSAL = causal_families()
READ = {
    "mamba": (("int8_weight_only", "int8_hybrid"), "layers.0.mixer.dt_proj"),
    "jamba": (("int8_weight_only", "nf4"), "layers.0.mamba.dt_proj"),
    "hunyuan_v1_moe": (("int8_weight_only", "int8_dynamic"), "layers.0.mlp.gate.wg"),
    "rwkv": (("int8_weight_only",), "blocks.0.feed_forward.value"),
    "llama4_text": (("int8_hybrid",), "embed_tokens"),
}
"""By family: techniques, and a layer whose weight the model reads by itself."""


def applied(model: Any, name: str) -> DecodingModel:
    stack = resolve((TECHNIQUES[name](name=name),), "generate")
    return DecodingModel(model, stack, DeviceKind.CPU, seed=0, progress=ignore)


def at(model: Any, end: str) -> Any:
    """The first module whose path ends so."""
    return next(module for path, module in model.named_modules() if path.endswith(end))


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    "family",
    [family if family in MIXTURES else long(family) for family in CAUSAL],
)
def test_opened_experts_of_every_family_compute_what_transformers_does(family: str) -> None:
    model = causal_model(family)
    with torch.no_grad():
        wanted = model(prompt(), use_cache=False).logits
        exchange(expert_places(model), lambda layer: layer)
        found = model(prompt(), use_cache=False).logits
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("family", "name", "path"),
    [(family, name, path) for family, (names, path) in READ.items() for name in names],
)
def test_a_layer_whose_weight_the_model_reads_stays_and_the_share_says_so(
    family: str, name: str, path: str
) -> None:
    model = causal_model(family)
    whole = sum(parameter.numel() for parameter in model.parameters())
    kept: Any = at(model, path)
    decoder = applied(model, name)
    assert at(model, path) is kept
    assert type(kept) in (torch.nn.Linear, torch.nn.Embedding)
    assert decoder.quantized is not None
    assert decoder.quantized <= 1 - kept.weight.numel() / whole
    assert decoder.generate(prompt(1), 3).tokens.shape == (1, 3)


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
    ("gpt2", _GPT | {"n_inner": 40, "tie_word_embeddings": False, "pad_token_id": 0}),
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
    assert found.facts == counted(loaded_facts(model), config)
    assert found.facts.work
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


@pytest.mark.slow
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
        "llava": {},
        "speech_to_text": {},
        "qwen2_audio": {},
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
        assert refusal("llava").startswith("path:llava is a vision-language model (llava); name a model")
        assert refusal("speech_to_text").startswith(
            "path:speech_to_text is a speech model (speech_to_text); name"
        )
        assert refusal("qwen2_audio").startswith(
            "path:qwen2_audio is a model of text and sound (qwen2_audio); "
        )
        assert refusal("nobody-knows").startswith("The configuration of path:nobody-knows cannot be read: ")
        assert "model type `nobody-knows`" in refusal("nobody-knows")
        assert image_facts(parse_reference("path:vit")).image_size == 32
        with pytest.raises(UnsupportedError, match="path:t5 is an encoder-decoder"):
            load_model(parse_reference("path:t5"), device="cpu", dtype="float32")
        with pytest.raises(UnsupportedError, match="path:gptj is a gptj model, which classifies no images"):
            load_image_model(parse_reference("path:gptj"), device="cpu", dtype="float32")
    monkeypatch.setattr("optigpu.models.described.PROGRAM", "optigpu.no_such_program")
    assert read("bloom") == (32, 2, 4, 250880, None)


@pytest.mark.long
def test_each_other_model_of_transformers_has_one_sentence() -> None:
    others = set(CONFIG_MAPPING) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    others.remove("nougat")  # which has no configuration without its parts
    for name in sorted(others):
        told = described(CONFIG_MAPPING[name]())
        assert told.images or re.fullmatch(r"(is|classifies) [^\n]{10,200}\.", told.refused or ""), name


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_what_the_table_says_is_in_transformers(family: ModelFamily) -> None:
    """The classes of the family's file, and the names of its configuration."""
    source = import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    newest = [family.decoder, family.attention, family.mlp]
    missing = {name for name in classes(tuple(newest)) if not hasattr(source, name)} - {
        "LayerNorm",
        "RMSNorm",
    }
    assert not missing
    config = AutoConfig.for_model(family.name)
    keys = family.keys
    if keys.inner_size:
        assert hasattr(config, keys.inner_size)
        assert hasattr(config, keys.activation)
