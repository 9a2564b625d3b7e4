"""accelerate puts the native decoder behind `generate`, which takes and returns what transformers' own does."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ViTConfig, ViTForImageClassification

from optigpu import accelerate
from optigpu.facade import quantized
from optigpu.models.reference import BUNDLED
from optigpu.techniques.decoding.native_decode.generating import NativeGenerate
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.vocabulary import SpecError, UnsupportedError
from tests.engine.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PROMPT = "The future of AI is"
NEW = 24


def trained() -> Any:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"])
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(BUNDLED["tiny"], padding_side="left")
    found.pad_token = found.eos_token
    return found


@pytest.fixture(scope="module")
def plain() -> Any:
    return trained()


@pytest.fixture(scope="module")
def fast() -> Any:
    return accelerate(trained())


@pytest.fixture(scope="module")
def greedy(plain: Any, tokenizer: Any) -> list[int]:
    """The float model's new tokens after PROMPT."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    found: list[int] = plain.generate(ids, max_new_tokens=NEW)[0, ids.shape[1] :].tolist()
    return found


def test_the_text_is_the_float_models(fast: Any, tokenizer: Any, greedy: list[int]) -> None:
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = fast.generate(**prompt, max_new_tokens=NEW)
    length = prompt["input_ids"].shape[1]
    assert tokens[:, :length].equal(prompt["input_ids"])
    assert tokens[0, length:].tolist() == greedy
    assert isinstance(fast, NativeGenerate)


def test_it_is_the_native_decoder_that_decodes(
    fast: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(fast), "forward", lambda *_, **__: pytest.fail("the model was called"))
    assert fast.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


@pytest.mark.parametrize("options", [{"max_length": 30}, {"max_new_tokens": 9}, {}], ids=str)
def test_lengths_are_as_asked(plain: Any, fast: Any, options: dict[str, int]) -> None:
    prompt = torch.tensor([[5, 6, 7]])
    assert fast.generate(prompt, **options).shape == plain.generate(prompt, **options).shape


def test_a_sequence_ends_at_an_end_token(plain: Any, fast: Any, tokenizer: Any, greedy: list[int]) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    end = greedy[18]  # after the first chunk of the decoder's tokens
    asked = {"max_new_tokens": NEW, "eos_token_id": end, "pad_token_id": 0}
    assert fast.generate(ids, **asked).equal(plain.generate(ids, **asked))
    both = tokenizer([PROMPT, "Once upon a time there was"], return_tensors="pt", padding=True)
    assert fast.generate(**both, **asked).equal(plain.generate(**both, **asked))


class Kept:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_and_each_token(fast: Any, tokenizer: Any, greedy: list[int]) -> None:
    ids, kept = tokenizer(PROMPT, return_tensors="pt")["input_ids"], Kept()
    fast.generate(ids, max_new_tokens=NEW, streamer=kept)
    assert kept.parts == [ids[0].tolist(), *([token] for token in greedy)]
    assert kept.ended


def test_a_stop_string_ends_the_text(plain: Any, fast: Any, tokenizer: Any, greedy: list[int]) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    stop = tokenizer.decode(greedy[4:6])
    asked = {"max_new_tokens": NEW, "stop_strings": [stop], "tokenizer": tokenizer}
    found = fast.generate(ids, **asked)
    assert found.equal(plain.generate(ids, **asked))
    assert ids.shape[1] < found.shape[1] < ids.shape[1] + NEW


def test_a_healed_prompt_goes_on(plain: Any, fast: Any, tokenizer: Any) -> None:
    ids = tokenizer("Once upon a time there w", return_tensors="pt")["input_ids"]
    asked = {"max_new_tokens": 4, "token_healing": True, "tokenizer": tokenizer}
    assert fast.generate(ids, **asked).equal(plain.generate(ids, **asked))


def test_a_streamer_gets_the_tokens_of_padded_prompts(plain: Any, fast: Any, tokenizer: Any) -> None:
    prompts = tokenizer(["Water is", PROMPT], return_tensors="pt", padding=True)
    asked = prompts | {"max_new_tokens": 5, "pad_token_id": 0}
    found = []
    for model in (plain, fast):
        found.append(Kept())
        model.generate(**asked, streamer=found[-1])
    assert found[0].parts == found[1].parts
    assert len(found[0].parts) == 6


def test_gpus_in_step_need_transformers_loop(fast: Any) -> None:
    with pytest.warns(UserWarning, match="synced_gpus"), pytest.raises(ValueError, match="process group"):
        fast.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, synced_gpus=True)


def test_a_text_beyond_the_context_is_left_to_transformers(fast: Any) -> None:
    context = attached(fast).context
    prompt = torch.full((1, context - 1), 5)
    assert fast.generate(prompt, max_new_tokens=2).shape == (1, context + 1)
    with pytest.warns(UserWarning, match="beyond the model's context"), pytest.raises(IndexError):
        fast.generate(prompt, max_new_tokens=3)


def test_a_model_beyond_the_last_cache_gets_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "last_level_cache_bytes", lambda: 1000)

    def kinds(model: Any) -> set[str]:
        program = attached(model)
        return {program.head.kind, *(block.up.kind for block in program.blocks)}

    assert kinds(accelerate(tiny_model("gpt2"))) == {"w4"}
    assert kinds(accelerate(tiny_model("gpt2"), weights="w8")) == {"w8"}


def test_what_cannot_be_accelerated_says_so(fast: Any) -> None:
    with pytest.raises(SpecError, match="accelerated already"):
        accelerate(fast)
    with pytest.raises(SpecError, match=r"weights: .*w3"):
        accelerate(tiny_model("gpt2"), weights="w3")  # type: ignore[arg-type]
    images = ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match="not ViTForImageClassification"):
        accelerate(images)
