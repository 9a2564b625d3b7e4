"""A field of a configuration is expressed or refused, by every engine that models are written for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from optigpu.models.loading.expressed import HARMLESS, SIZES, unexpressed
from optigpu.models.loading.load import loaded_facts
from optigpu.vocabulary import UnsupportedError
from tests.breadth import cases
from tests.engine.decoder_models import model_of
from tests.engine.tiny_models import FAMILIES, VOCABULARY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

Logits = NDArray[np.float32]
Change = tuple[str, dict[str, Any]]
"""A field, and what is given to the configuration's class in order to change it."""
PROMPT, TOKENS = 20, 32
"""Tokens of a prompt, and of the whole text: both longer than the window."""
WINDOW = 5

_GPT2 = FAMILIES["gpt2"]
_LLAMA = FAMILIES["llama"]
_GEMMA = _LLAMA | {"head_dim": 16, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = FAMILIES | {
    "mistral": _LLAMA | {"sliding_window": None},
    "qwen3": _LLAMA | {"head_dim": 16},
    "gemma": _GEMMA,
    "gemma3_text": _GEMMA | {"sliding_window": 64, "query_pre_attn_scalar": 16},
    "gptj": _GPT2 | {"rotary_dim": 8},
    "codegen": _GPT2 | {"rotary_dim": 8},
    "gpt_bigcode": _GPT2,
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 4},
}

_SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 48,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 48,
    "n_inner": 96,
    "ffn_dim": 160,
}
_OTHERS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", "relu", "gelu_pytorch_tanh"),
    "hidden_activation": ("gelu", "relu"),
    "activation": ("relu",),
    "activation_function": ("gelu", "relu", "gelu_fast", "gelu_pytorch_tanh", "tanh"),
    "rms_norm_eps": (0.1,),
    "layer_norm_epsilon": (0.1,),
    "word_embed_proj_dim": (32,),
    "rotary_dim": (4,),
    "n_ctx": (1024,),
    "query_pre_attn_scalar": (4,),
    "_sliding_window_pattern": (2,),
    "attn_logit_softcapping": (2.0,),
    "final_logit_softcapping": (2.0,),
    "sliding_window": (WINDOW,),
    "use_bidirectional_attention": (True,),
    "layer_types": (["sliding_attention", "full_attention"],),
    "num_kv_heads": (2,),
    "ffn_hidden_size": (96,),
    "num_ln_in_parallel_attn": (1,),
    "chunk_size_feed_forward": (8,),
}
"""Other values than the shapes' and the class's, of fields that are neither sizes nor booleans."""
_PLAIN = {"rope_theta": 10000.0}
_YARN = _PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
ROTATIONS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    _PLAIN | {"rope_type": "linear", "factor": 3.0},
    _PLAIN | {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16},
    _YARN,
    _YARN | {"attention_factor": 2.0, "beta_fast": 2.0},
    _PLAIN | _LONG | {"rope_type": "longrope"},
    _PLAIN
    | {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]
UNDECLARED: list[Change] = [
    ("sliding_window", {"sliding_window": WINDOW}),
    ("attention_chunk_size", {"attention_chunk_size": WINDOW}),
    ("is_causal", {"is_causal": False}),
]
"""Fields that transformers reads for every family, though few classes declare them."""
_RETURNED = ("return_dict", "output_attentions", "is_encoder_decoder")
"""With other values a causal language model gives no logits, or the class makes another model of it."""


def configuration(family: str, **changes: Any) -> Any:
    """The plain configuration of a family with some changes."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "vocab_size": VOCABULARY}
    return AutoConfig.for_model(family, **(special | SHAPES[family] | changes))


def declared(family: str) -> dict[str, Any]:
    """The fields of a family's configuration with their values, without those that are no part of a computation."""
    return {name: value for name, value in configuration(family).to_dict().items() if name not in HARMLESS}


def changes_of(family: str) -> Iterator[Change]:
    """Each declared field with other values, one after the other, and fields that the class does not declare."""
    for name, value in declared(family).items():
        if name in _RETURNED:
            continue
        if name == "rope_parameters":
            yield from (("rope_", {name: dict(each)}) for each in ROTATIONS if "rope_type" in value)
        elif isinstance(value, bool):
            yield name, {name: not value}
        elif name in _SIZES:
            yield name, {name: _SIZES[name]}
        else:
            yield from (_with_its_switch(family, name, other) for other in _OTHERS[name])
    yield from UNDECLARED


def _with_its_switch(family: str, name: str, value: Any) -> Change:
    """A window needs its switch in the families that have one, which then say by layer_types who has the window."""
    if (
        name not in ("sliding_window", "layer_types")
        or "use_sliding_window" not in configuration(family).to_dict()
    ):
        return name, {name: value}
    switched = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return "layer_types", switched | ({name: value} if name == "layer_types" else {})


def text() -> NDArray[np.int64]:
    """Ids [1, TOKENS], of the smallest vocabulary."""
    return np.random.default_rng(7).integers(_SIZES["vocab_size"], size=(1, TOKENS))


def expected_logits(model: Any) -> Logits:
    """After each token, [TOKENS, vocabulary]."""
    found: Logits = model(input_ids=torch.from_numpy(text()), use_cache=False).logits[0].numpy()
    return found


def unlike(family: str, compute: Callable[[Any], Logits], bound: float) -> list[str]:
    """What an engine makes wrong of single fields: other logits than transformers, or a refusal that does not name it.

    `compute` gives a model's logits after the prompt and after each token behind it, or raises UnsupportedError.
    """
    wrong = []
    for name, change in [("", {}), *changes_of(family)]:
        made = _made(family, change)
        if made is None:
            continue
        model, expected = made
        try:
            found = compute(model)
        except UnsupportedError as error:
            if not name or name not in str(error):
                wrong.append(f"{change}: {error}")
            continue
        difference = float(np.abs(found - expected[PROMPT - 1 :]).max() / np.abs(expected).max())
        if not difference <= bound:
            wrong.append(f"{change}: {difference:.1e}")
    return wrong


def _made(family: str, change: dict[str, Any]) -> tuple[Any, Logits] | None:
    """The changed model and its logits; None where transformers itself makes or computes none."""
    try:
        model = model_of(configuration(family, **change))
        return model, expected_logits(model)
    except Exception:  # transformers raises whatever comes
        return None


EXACT = 1e-4
"""The largest difference of a logit over the largest logit, in float32."""
LOOKED_UP = 2e-3
"""As EXACT, of llama.cpp, which looks GELU up in a table of float16."""


def stepped(forward: Callable[[Any], Any]) -> Logits:
    """Logits [TOKENS - PROMPT + 1, vocabulary] of a pass over a prompt and of steps after it."""
    ids = text()
    parts = [ids[:, :PROMPT], *(ids[:, at : at + 1] for at in range(PROMPT, TOKENS))]
    return np.concatenate([np.array(forward(part)) for part in parts])


@pytest.mark.llama
@pytest.mark.parametrize(("family", "bound"), cases([("llama", EXACT), ("gpt2", LOOKED_UP)], 1))
def test_a_gguf_file_has_each_field_or_refuses_it(tmp_path: Path, family: str, bound: float) -> None:
    from optigpu.backends.llama_cpp.gguf_facts import ExactCaches, asked_of
    from optigpu.backends.llama_cpp.gguf_tensors import write
    from optigpu.backends.llama_cpp.native import LlamaCpp
    from optigpu.backends.llama_cpp.runtime import Context, GgufModel

    library = LlamaCpp()

    def compute(model: Any) -> Logits:
        path = tmp_path / "model.gguf"
        write(model, path, "float32")
        loaded = GgufModel(library, path, model.config.vocab_size)
        context = Context(loaded, 1, TOKENS, asked_of((), "F32", 1, ExactCaches()))
        found = stepped(context.forward)
        context.close()
        loaded.close()
        return found

    assert unlike(family, compute, bound) == []


@pytest.mark.onnxruntime
@pytest.mark.parametrize("family", cases(["llama", "gpt2", "opt", "mistral", "qwen2"], 1))
def test_an_onnx_graph_has_each_field_or_refuses_it(tmp_path: Path, family: str) -> None:
    from optigpu.backends.onnxruntime import DATA, MODEL, format_of
    from optigpu.backends.onnxruntime.graphs import GraphWriter, write_decoder
    from optigpu.backends.onnxruntime.runtime import DecodingSteps, opened

    def compute(model: Any) -> Logits:
        with (tmp_path / DATA).open("wb") as data:
            graph = GraphWriter(data)
            write_decoder(model, graph, format_of(()))
        graph.save(tmp_path / MODEL)
        steps = DecodingSteps(opened(tmp_path, 1, "all"), loaded_facts(model), 1, TOKENS)
        return stepped(steps.forward)

    assert unlike(family, compute, EXACT) == []


@pytest.mark.openvino
@pytest.mark.parametrize("family", cases(["llama", "gpt2", "mistral", "qwen2", "gemma3_text"], 1))
def test_a_trace_for_openvino_has_each_field_or_refuses_it(family: str) -> None:
    """The trace, which OpenVINO converts as it is."""
    from optigpu.backends.openvino.exported import traced_decoder

    def compute(model: Any) -> Logits:
        facts = loaded_facts(model)
        traced = traced_decoder(model, facts)
        past = [torch.zeros(1, facts.kv_heads, 0, facts.head_size) for _ in range(2 * facts.layers)]

        def forward(part: Any) -> Any:
            nonlocal past
            start = past[0].shape[2]
            end = start + part.shape[1]
            seen, positions = torch.ones(1, end, dtype=torch.int64), torch.arange(start, end)[None]
            logits, *past = traced(torch.from_numpy(part), seen, positions, *past)
            return logits[:, -1].numpy()

        with torch.no_grad():
            return stepped(forward)

    assert unlike(family, compute, EXACT) == []


@pytest.mark.parametrize("family", cases(["llama", "gpt2", "opt", "mistral", "qwen2"], 1))
def test_a_program_of_the_decoder_has_each_field_or_refuses_it(family: str) -> None:
    """What is packed is rounded, so the logits are those of the model with the rounded weights."""
    from optigpu.techniques.decoding.native_decode.programs import attached, refusal
    from optigpu.vocabulary import UnsupportedError
    from tests.engine.decode_reference import ReferenceDecoder
    from tests.engine.decoder_models import packed, twin

    def compute(model: Any) -> Logits:
        reason = refusal(model)
        if reason:
            raise UnsupportedError(reason)
        plain = model_of(model.config)
        packed(model)
        twin(plain, model)
        decoder = ReferenceDecoder(attached(model), exact=True)
        decoder.begin(1, TOKENS)
        found = stepped(lambda part: decoder.extend(torch.from_numpy(part)).numpy())
        return found - expected_logits(plain)[PROMPT - 1 :] + plain_logits(model.config)[PROMPT - 1 :]

    def plain_logits(config: Any) -> Logits:
        return expected_logits(model_of(config))

    assert unlike(family, compute, EXACT) == []


def test_what_no_class_declares_counts_where_transformers_reads_it() -> None:
    """Hugging Face's own files have fields that nothing reads; a new field that is read is refused unseen."""
    config = configuration(
        "llama", is_llama_config=True, rope_interleaved=False, **{"transformers.js_config": {}}
    )
    fields = SIZES | dict.fromkeys(("rope_parameters.rope_theta",))
    assert unexpressed(config, fields) is None
    assert unexpressed(configuration("llama", sliding_window=None), fields) is None
    assert unexpressed(configuration("llama", sliding_window=8), fields) == "sliding_window = 8"
    layers = configuration("llama", per_layer_config={1: {"rms_norm_eps": 0.1}})
    assert "per_layer_config = {'1': {'rms_norm_eps': 0.1}}" in str(unexpressed(layers, fields))
    gelu = configuration("llama", hidden_act="gelu")
    assert unexpressed(gelu, fields) == "hidden_act = 'gelu'"
    assert unexpressed(gelu, fields | {"hidden_act": ("silu",)}) == "hidden_act = 'gelu', only 'silu'"
