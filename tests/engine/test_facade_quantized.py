"""quantize and make_it_work_hybrid: int8_hybrid on a loaded model, in one line."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from optigpu import make_it_work_hybrid, quantize
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.reference import BUNDLED
from optigpu.surgery import smoothing
from optigpu.surgery.int4_layers import Int4Linear
from optigpu.surgery.int8_layers import Int8Embedding, Int8Linear
from optigpu.surgery.places import linear_places
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.vocabulary import SpecError, UnsupportedError
from tests.engine.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SAMPLES = torch.arange(40).view(4, 10)


def trained() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"], dtype="float32")


def test_one_line_leaves_a_quarter_of_the_bytes_and_the_greedy_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED["tiny"])
    ids = tokenizer("The future of AI is", return_tensors="pt")["input_ids"]
    model, asked = trained(), {"max_new_tokens": 24, "pad_token_id": 0}
    before, expected = weight_bytes(model), model.generate(ids, **asked)
    found: Any = quantize(model)
    assert found is model
    assert weight_bytes(model) < 0.27 * before
    assert model.generate(ids, **asked).equal(expected)


def test_four_bits_and_a_target_are_the_techniques() -> None:
    model: Any = quantize(tiny_model("llama"), bits=4)
    assert isinstance(model.model.layers[1].mlp.down_proj, Int4Linear)
    plain = tiny_model("llama")
    assert weight_bytes(quantize(tiny_model("llama"), memory_target=0.5)) <= 0.5 * weight_bytes(plain)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_embeddings_stay_when_asked_to(family: str) -> None:
    plain = tiny_model(family)
    model: Any = make_it_work_hybrid(tiny_model(family), quantize_embeddings=False)
    assert model.get_input_embeddings().weight.equal(plain.get_input_embeddings().weight)
    assert not [module for module in model.modules() if isinstance(module, Int8Embedding)]
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear) == tied
    assert len(linear_places(model)) == int(tied)
    assert weight_bytes(make_it_work_hybrid(tiny_model(family))) < weight_bytes(model) < weight_bytes(plain)


def test_kept_tables_are_in_the_table_of_decisions() -> None:
    from optigpu.techniques.base import Notes

    model, notes = tiny_model("gpt2"), Notes()
    Int8Hybrid(quantize_embeddings=False).modules(model, notes)
    assert sum(row["bytes"] for row in notes.facts["hybrid_layers"]) == weight_bytes(model)


def test_earlier_digests_stay() -> None:
    assert "quantize_embeddings" not in Int8Hybrid().identity()
    assert Int8Hybrid(quantize_embeddings=False).identity()["quantize_embeddings"] is False


@pytest.mark.parametrize(
    "samples",
    [SAMPLES, {"input_ids": SAMPLES}, [SAMPLES[0], SAMPLES[1:, :7]], [{"input_ids": SAMPLES}]],
    ids=["tensor", "tokenizer's", "of several lengths", "list of a tokenizer's"],
)
def test_samples_calibrate_the_smoothing(samples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    smooth = smoothing.smooth

    def watched(model: Any, ids: torch.Tensor, alpha: float) -> int:
        seen.append((ids.shape, alpha))
        return smooth(model, ids, alpha)

    monkeypatch.setattr(smoothing, "smooth", watched)
    make_it_work_hybrid(tiny_model("gpt2"), sample_inputs=samples, smoothing_alpha=0.3)
    make_it_work_hybrid(tiny_model("gpt2"), samples)
    length = 7 if isinstance(samples, list) and len(samples) == 2 else 10
    assert seen == [((4, length), 0.3), ((4, length), 0.5)]


def test_smoothing_changes_the_weights_and_is_left_out_without_samples() -> None:
    smoothed: Any = make_it_work_hybrid(tiny_model("gpt2"), SAMPLES, smoothing_alpha=0.9)
    plain: Any = make_it_work_hybrid(tiny_model("gpt2"))
    one, other = (model.transformer.h[1].mlp.c_fc for model in (smoothed, plain))
    assert isinstance(one, Int8Linear) or not one.high.equal(other.high)
    assert not smoothed.transformer.h[0].ln_1.weight.equal(plain.transformer.h[0].ln_1.weight)


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"sample_inputs": "a text"}, SpecError, "sample_inputs must be token ids.*not str"),
        ({"sample_inputs": []}, SpecError, "sample_inputs is empty"),
        ({"sample_inputs": SAMPLES + 90}, SpecError, "sample_inputs: Token id 129 of sample_inputs"),
        ({"smoothing_alpha": 2.0}, SpecError, "smoothing: 2 is too large; the most is 1"),
        ({"memory_target": 0.0}, SpecError, "memory_target: 0 is too small"),
        ({"memory_target": 0.01, "quantize_embeddings": False}, UnsupportedError, "quantize the embeddings"),
        ({"bits": 3}, SpecError, "bits: "),
    ],
)
def test_what_cannot_be_says_why_and_leaves_the_model(
    asked: dict[str, Any], error: type[Exception], said: str
) -> None:
    model = tiny_model("gpt2")
    with pytest.raises(error, match=said):
        make_it_work_hybrid(model, **asked)
    assert len(linear_places(model)) == len(linear_places(tiny_model("gpt2")))


def test_a_model_is_quantized_once() -> None:
    with pytest.raises(UnsupportedError, match="quantized already"):
        quantize(quantize(tiny_model("gpt2")))
