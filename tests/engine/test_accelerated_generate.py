"""Every setting of `generate` on an accelerated model: the tokens are those of transformers' loop on the same logits.

For what runs natively that loop gets them from the decoder, which runs over the whole text for each token; for what is
left to transformers, from the model with the packed weights written back as floats.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.modeling_outputs import CausalLMOutput

from optigpu import accelerate
from optigpu.surgery.places import Place, become, linear_places
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear
from optigpu.techniques.decoding.native_decode.programs import attached, new_decoder
from tests.breadth import spread
from tests.engine.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PROMPT = torch.tensor([[5, 6, 7, 5, 6]])
BATCH = torch.tensor([[5, 6, 7, 5, 6], [9, 30, 31, 3, 40]])
PADDED = {
    "input_ids": torch.tensor([[2, 2, 8, 9, 10], [5, 6, 7, 8, 9], [2, 60, 8, 61, 62]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
}
NEW = 12
WITHOUT_CACHE: dict[str, Any] = {"use_cache": False, "cache_implementation": None, "prefill_chunk_size": None}
"""For the model whose every pass is over the whole text."""


class NativeLogits(torch.nn.Module):
    """Mixed into a model as it was loaded: a forward pass is the decoder's, over each row's whole text."""

    decoder: Any

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> CausalLMOutput:
        shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = [self._after(row[mask > 0]) for row, mask in zip(input_ids, shown, strict=True)]
        return CausalLMOutput(logits=torch.stack(logits))

    def _after(self, tokens: torch.Tensor) -> torch.Tensor:
        self.decoder.begin(1, len(tokens))
        found: torch.Tensor = self.decoder.extend(tokens[None])
        return found


@dataclass(frozen=True)
class Models:
    """An accelerated model; transformers' own with its native logits, and with its weights as floats."""

    fast: Any
    native: Any
    floats: Any


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def models(request: pytest.FixtureRequest) -> Models:
    fast, native, floats = (tiny_model(request.param) for _ in range(3))
    accelerate(fast, weights="w8")
    become(native, NativeLogits).decoder = new_decoder(attached(fast), "bf16")
    with torch.no_grad():
        for place in linear_places(floats):
            packed = fast.get_submodule(place.path)
            assert isinstance(packed, DecodeLinear)
            write(place, packed.unpacked())
        for (_, table), (_, packed) in zip(tables(floats), tables(fast), strict=True):
            table.weight.copy_(packed.weight)
    return Models(fast, native, floats)


def write(place: Place, weights: torch.Tensor) -> None:
    layer = place.layer
    layer.weight.copy_(weights if isinstance(layer, torch.nn.Linear) else weights.T)


def tables(model: Any) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Embedding)]


@contextmanager
def natively() -> Iterator[None]:
    """Fails where something is left to transformers' loop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="accelerate: ")
        yield


def seeded(model: Any, *arguments: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(*arguments, **{"max_new_tokens": NEW, **options})


class Favours(LogitsProcessor):
    """A processor of the caller's own, which counts on the tokens so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(1, input_ids[:, -1] % 7, torch.full((len(scores), len(input_ids)), 2.0))


class EndsAfter(StoppingCriteria):
    """Each sequence ends after a token below 24."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] < 24


SAMPLED: dict[str, Any] = {"do_sample": True}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"min_new_tokens": 9},
    {"min_length": 11},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.4},
    {"bad_words_ids": [[40], [5, 6], [7]]},
    {"forced_bos_token_id": 11},
    {"forced_eos_token_id": 1},
    {"suppress_tokens": list(range(0, 90, 2))},
    {"begin_suppress_tokens": list(range(1, 96, 2))},
    {"sequence_bias": [[[30], 9.0], [[5, 6], -9.0]]},
    {"exponential_decay_length_penalty": (2, 1.5)},
    {"remove_invalid_values": True},
    {"watermarking_config": WatermarkingConfig(bias=9.0, context_width=2)},
    {"prefix_allowed_tokens_fn": lambda _, ids: [int(ids[-1]) // 2, 33, 34]},
    {"logits_processor": LogitsProcessorList([Favours()])},
    {"stopping_criteria": StoppingCriteriaList([EndsAfter()])},
    {"max_time": 1e6},
    {"eos_token_id": [1, *range(40, 60)]},
    {"eos_token_id": 1, "pad_token_id": 17},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"prefill_chunk_size": 2},
    {
        "generation_config": GenerationConfig(
            repetition_penalty=1.3, max_new_tokens=NEW, eos_token_id=1, pad_token_id=2
        )
    },
    {"output_attentions": False, "num_beams": 1, "num_return_sequences": 1},
    SAMPLED,
    SAMPLED | {"temperature": 0.4},
    SAMPLED | {"top_k": 5},
    SAMPLED | {"top_p": 0.7, "top_k": 0},
    SAMPLED | {"min_p": 0.1},
    SAMPLED | {"top_h": 0.5},
    SAMPLED | {"typical_p": 0.6},
    SAMPLED | {"epsilon_cutoff": 0.02},
    SAMPLED | {"eta_cutoff": 0.02},
    SAMPLED | {"renormalize_logits": True, "repetition_penalty": 1.2},
    SAMPLED | {"num_return_sequences": 3},
)


@pytest.mark.parametrize("setting", spread(SETTINGS, by_default=4), ids=lambda setting: "+".join(setting))
def test_native_tokens_are_those_of_transformers_loop_on_the_same_logits(
    models: Models, setting: dict[str, Any]
) -> None:
    prompt = PROMPT if "num_return_sequences" in setting else BATCH
    expected = seeded(models.native, prompt, **setting | WITHOUT_CACHE)
    with natively():
        assert seeded(models.fast, prompt, **setting).equal(expected)


@pytest.mark.parametrize(
    "setting", [{"min_new_tokens": 6}, SAMPLED, {"num_return_sequences": 2} | SAMPLED], ids=str
)
def test_padded_prompts_are_stepped_side_by_side(models: Models, setting: dict[str, Any]) -> None:
    expected = seeded(models.native, **PADDED, **setting, use_cache=False)
    with natively():
        assert seeded(models.fast, **PADDED, **setting).equal(expected)


def test_scores_and_logits_are_those_of_native_steps(models: Models) -> None:
    asked = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.5,
        "eos_token_id": None,
    }
    expected = seeded(models.native, BATCH, **asked, use_cache=False)
    with natively():
        found = seeded(models.fast, BATCH, **asked)
    assert type(found) is type(expected)
    assert found.sequences.equal(expected.sequences)
    for mine, its in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(its))
    assert not torch.stack(found.scores).equal(torch.stack(found.logits))
    transitions = models.fast.compute_transition_scores(found.sequences, found.scores)
    torch.testing.assert_close(
        transitions, models.native.compute_transition_scores(expected.sequences, expected.scores)
    )


@pytest.mark.parametrize("prompts", [{"input_ids": BATCH}, PADDED], ids=["whole", "padded"])
def test_the_cache_that_comes_back_goes_on(models: Models, prompts: dict[str, torch.Tensor]) -> None:
    asked = prompts | {"return_dict_in_generate": True, "eos_token_id": None}
    with natively():
        found = seeded(models.fast, **asked)
    sequences = found.sequences
    cache = found.past_key_values
    assert cache.get_seq_length() == sequences.shape[1] - 1
    mask = prompts.get("attention_mask", torch.ones_like(prompts["input_ids"]))
    mask = torch.cat(
        [mask, torch.ones(len(mask), sequences.shape[1] - mask.shape[1], dtype=torch.long)], dim=1
    )
    expected = models.floats.generate(sequences, attention_mask=mask, max_new_tokens=4)
    with pytest.warns(UserWarning, match=r"accelerate: .*a cache of the caller's own"):
        more = models.fast.generate(sequences, attention_mask=mask, past_key_values=cache, max_new_tokens=4)
    assert more.equal(expected)


def embedded(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.get_input_embeddings()(PROMPT).detach()
    return found


LEFT: tuple[tuple[str, Callable[[Any], dict[str, Any]]], ...] = (
    ("beam search", lambda _: {"num_beams": 3}),
    ("beam search", lambda _: {"num_beams": 3, "do_sample": True, "num_return_sequences": 2}),
    (
        "beam search",
        lambda _: {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True, "repetition_penalty": 1.2},
    ),
    ("assisted generation", lambda _: {"prompt_lookup_num_tokens": 2}),
    ("assisted generation", lambda model: {"assistant_model": tiny_model(model.config.model_type)}),
    ("a cache of the caller's own", lambda model: {"past_key_values": DynamicCache(config=model.config)}),
    ("the input inputs_embeds", lambda model: {"inputs_embeds": embedded(model), "inputs": None}),
    ("a mask that hides more", lambda _: {"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}),
    ("position_ids of its own", lambda _: {"position_ids": torch.tensor([[0, 1, 2, 3, 5]])}),
    ("output_attentions", lambda _: {"output_attentions": True, "return_dict_in_generate": True}),
    ("output_hidden_states", lambda _: {"output_hidden_states": True, "return_dict_in_generate": True}),
)


@pytest.mark.parametrize(
    ("named", "options"),
    spread(LEFT, by_default=4),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_left_to_transformers_has_the_packed_weights(
    models: Models, named: str, options: Callable[[Any], dict[str, Any]]
) -> None:
    for model in (models.fast, models.floats):
        model.set_attn_implementation("eager" if named == "output_attentions" else "sdpa")
    expected = seeded(models.floats, **{"inputs": PROMPT} | options(models.floats))
    with pytest.warns(
        UserWarning, match=f"accelerate: .* not support {named}.*as fast as .* before"
    ) as caught:
        found = seeded(models.fast, **{"inputs": PROMPT} | options(models.fast))
    assert {each.filename for each in caught if "accelerate: " in str(each.message)} == {__file__}
    if isinstance(expected, torch.Tensor):
        assert found.equal(expected)
        return
    assert found.sequences.equal(expected.sequences)
    name = named.removeprefix("output_")
    for mine, its in zip(found[name], expected[name], strict=True):
        torch.testing.assert_close(mine, its)
