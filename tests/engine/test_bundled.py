"""The bundled models: trained, in the package, better at text than counting is; and the tool that trains them."""

import hashlib
import math
import random
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from optigpu.models.loading.load import MODELS_DIR, load_model, load_tokenizer
from optigpu.models.reference import BUNDLED, ModelReference, parse_reference
from tests.breadth import cases
from tools.bundled_model import training
from tools.bundled_model.architectures import ARCHITECTURES, CONTEXT
from tools.bundled_model.baselines import Trigram, Unigram
from tools.bundled_model.text import encode, read_documents, train_tokenizer
from tools.bundled_model.training import Recipe, train

pytestmark = pytest.mark.usefixtures("forked_children")
LARGEST_BYTES = {"tiny": 8_000_000, "small": 12_000_000}
EMBEDDINGS = {"tiny": "transformer.wte.weight", "small": "model.embed_tokens.weight"}
TEXT = """The old man came down to the harbour every morning before the sun was up, and stood for some time
looking at the water. He had been a sailor when he was young, and had seen a great many places of which the
people in the village had never heard; but he did not often speak of them. "I have no story to tell," he would say,
when the children asked him for one, and then he would look at the ships again, as if one of them were his.

One day in the winter a letter was brought to him. It was the first that he had received for many years, and
he held it in his hand for a long while without opening it. His daughter, who was sitting by the fire, thought that he
was afraid of what it might say. "Shall I read it to you, father?" she asked at last. He shook his head, and put
it into the pocket of his coat, and went out of the house without another word. She saw him walk down the street in the
rain until he was lost to her sight, and she did not know what to think of it.

He returned in the evening, when it was quite dark. There was a light in his eyes which she had not seen there before.
"My dear," said he, "I must go to London in the morning, and I do not know how long I shall be away. Your brother is
alive." """


@pytest.fixture(scope="module", params=BUNDLED)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(name: str) -> Path:
    return BUNDLED[name]


@pytest.fixture(scope="module")
def reference(name: str) -> ModelReference:
    return parse_reference(f"bundled:{name}")


@pytest.fixture(scope="module")
def model(reference: ModelReference) -> Any:
    return load_model(reference, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(reference: ModelReference) -> Any:
    return load_tokenizer(reference)


def losses(model: Any, tokens: Any) -> Any:
    """Nats for each token but the first, from one pass over at most a context of tokens [n]."""
    row = torch.as_tensor(tokens)[None]
    with torch.inference_mode():
        log_probabilities = model(row).logits[0, :-1].double().log_softmax(-1)
    return -log_probabilities.gather(-1, row[0, 1:, None])[:, 0].numpy()


def windows(tokens: Any, count: int) -> list[Any]:
    return [tokens[start : start + CONTEXT] for start in range(0, count * CONTEXT, CONTEXT)]


# What is in the package


def test_the_weights_are_small_enough_and_the_tied_head_is_there_once(name: str, folder: Path) -> None:
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= LARGEST_BYTES[name]
    with safe_open(weights, framework="np") as tensors:
        names = list(tensors.keys())
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"F16"}
        assert all(np.isfinite(tensors.get_tensor(name)).all() for name in names)
    assert EMBEDDINGS[name] in names
    assert "lm_head.weight" not in names


def test_it_loads_with_no_network(reference: ModelReference, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert load_model(reference, device="cpu", dtype="bfloat16").dtype.is_floating_point
    assert load_tokenizer(reference).encode("the")


# The tokenizer


@pytest.mark.slow
@given(text=st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_the_same_after_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= each < 2048 for each in ids)


# What it has learned


def test_it_predicts_a_text_better_than_the_text_s_own_frequencies(model: Any, tokenizer: Any) -> None:
    """No unigram model of this text can do better than the frequencies in it, which the model does not know."""
    tokens = np.array(tokenizer.encode(TEXT))
    assert 200 < len(tokens) <= CONTEXT
    _, counts = np.unique(tokens[1:], return_counts=True)
    shares = counts / counts.sum()
    entropy = -(shares * np.log(shares)).sum()
    assert losses(model, tokens).mean() < entropy


@pytest.mark.slow
def test_it_beats_a_unigram_and_a_trigram_on_text_that_it_never_saw(
    model: Any, tokenizer: Any, datasets_dir: Path
) -> None:
    bpe = tokenizer.backend_tokenizer
    train = encode(bpe, [each.train for each in read_documents(datasets_dir)])
    test = (datasets_dir / "wikitext-2" / "test.txt").read_text("utf-8")[:60_000]
    pieces = windows(encode(bpe, [test]), 16)
    perplexity = math.exp(np.concatenate([losses(model, piece) for piece in pieces]).mean())
    trigram, unigram = (
        math.exp(-np.log(np.concatenate([each.probabilities(piece) for piece in pieces])).mean())
        for each in (Trigram(train), Unigram(train))
    )
    assert perplexity < 0.92 * trigram < unigram


ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "the",
    "a",
    "old",
    "young",
    "man",
    "woman",
    "sea",
    "ship",
    "came",
    "went",
    "saw",
    "and",
    "but",
    "again",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as the script reads it, with sentences of few words."""
    folder = tmp_path_factory.mktemp("data")
    chosen = random.Random(0)
    for name, lines in {
        "books/one": 1200,
        "books/two": 300,
        "wikitext-2/valid": 300,
        "wikitext-2/test": 40,
    }.items():
        path = folder / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(" ".join(chosen.choices(WORDS, k=9)) + ".\n" for _ in range(lines)))
    return folder


@pytest.mark.long
@pytest.mark.usefixtures("one_torch_thread")  # which also takes back what the script sets
@pytest.mark.parametrize(("name", "tied"), cases([("tiny", True), ("small-untied", False), ("small", True)]))
def test_two_steps_make_a_model_with_its_tokenizer_and_card(
    name: str, tied: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = ["--data", data, "--out", tmp_path / "model", "--work", tmp_path / "work"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train_bundled", name, *map(str, folders), "--steps", "2"])
    runpy.run_module("tools.train_bundled", run_name="__main__")
    raw = (tmp_path / "model" / "model.safetensors").read_bytes()
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text("utf-8")
    assert hashlib.sha256(raw).hexdigest() in card
    for path in (*data.glob("books/*"), data / "wikitext-2" / "valid.txt"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in card
    assert "2 steps of 4,096 tokens, 8,192 in all" in card
    assert len((tmp_path / "work" / name / "log.txt").read_text().splitlines()) == 1
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    reference = parse_reference("path:model")
    model = load_model(reference, device="cpu", dtype="float32")
    assert model.config.max_position_embeddings == CONTEXT
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    assert load_tokenizer(reference).decode(load_tokenizer(reference).encode("the old man")) == "the old man"


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = read_documents(data)
    tokenizer = train_tokenizer(documents)
    tokens = encode(tokenizer, [each.train for each in documents])
    held_out = encode(tokenizer, [each.held_out for each in documents])[:200]
    recipe = Recipe(steps=3, dropout_steps=1)
    monkeypatch.setattr(training, "SAVE_EVERY_STEPS", 1)
    monkeypatch.setattr(training, "TOKENS_PER_STEP", 1024)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    tiny = ARCHITECTURES["tiny"]
    whole = train(tiny, tokens, held_out, recipe, tmp_path / "whole", resume=False)
    with monkeypatch.context() as patch:
        patch.setattr(training, "EVALUATE_EVERY_STEPS", 2)
        patch.setattr(training, "_log", _stop)
        with pytest.raises(KeyboardInterrupt):
            train(tiny, tokens, held_out, recipe, tmp_path / "stopped", resume=False)
    resumed = train(tiny, tokens, held_out, recipe, tmp_path / "stopped", resume=True)
    assert whole["held_out_loss"] < math.log(2048)
    assert all(resumed["model"][name].equal(weight) for name, weight in whole["model"].items())


def _stop(work: Path, line: str) -> None:
    raise KeyboardInterrupt
