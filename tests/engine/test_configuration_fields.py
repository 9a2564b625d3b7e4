"""A field of a configuration is expressed or refused, by every engine that models are written for.

Each field of a family's configuration is changed in turn: the engine's logits are transformers', or the sentence names
the field.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.models.loading.expressed import HARMLESS, SIZES, unexpressed
from tests.breadth import cases
from tests.engine.changed_configurations import (
    PROMPT,
    SHAPES,
    TOKENS,
    Logits,
    configuration,
    expected_logits,
    model_of,
    text,
    unlike,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
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
    from optigpu.backends.llama_cpp.file_types import ExactCaches, asked_of
    from optigpu.backends.llama_cpp.gguf_file import write
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
    from optigpu.backends.onnxruntime.decoder_graph import write_decoder
    from optigpu.backends.onnxruntime.formats import DATA, MODEL, format_of
    from optigpu.backends.onnxruntime.graph import GraphWriter
    from optigpu.backends.onnxruntime.prepare import DecodingSteps, opened
    from optigpu.models.loading.load import loaded_facts

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
    import torch

    from optigpu.backends.openvino.exported import traced_decoder
    from optigpu.models.loading.load import loaded_facts

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
    import torch

    from optigpu.techniques.decoding.native_decode.programs import attached
    from optigpu.techniques.decoding.native_decode.requirements import refusal
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


@pytest.mark.parametrize("family", cases(sorted(SHAPES)))
def test_harmless_fields_change_no_logit(family: str) -> None:
    plain = model_of(configuration(family))
    expected = expected_logits(plain)
    others = {bool: lambda value: not value, int: lambda value: value + 3, float: lambda value: value + 0.25}
    given = plain.config.to_dict()
    named = ("transformers_version", "architectures", "model_type", "_name_or_path", "dtype")
    for name in HARMLESS & set(given) - set(named):
        if type(given[name]) not in others or name == "use_sliding_window":
            continue
        changed = model_of(configuration(family, **{name: others[type(given[name])](given[name])}))
        changed.load_state_dict(plain.state_dict())
        np.testing.assert_allclose(expected_logits(changed), expected, rtol=1e-5, atol=1e-5, err_msg=name)


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
