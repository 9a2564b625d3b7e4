"""tools.train_bundled: a whole run on a tiny text, and the parts whose errors would flatter the model."""

import hashlib
import math
import random
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.models.loading.load import MODELS_DIR, load_model, load_tokenizer
from optigpu.models.reference import parse_reference
from tests.breadth import cases
from tools.bundled_model import training
from tools.bundled_model.architectures import ARCHITECTURES, CONTEXT
from tools.bundled_model.baselines import Trigram, Unigram
from tools.bundled_model.text import END_OF_TEXT, Tokens, encode, read_documents, train_tokenizer
from tools.bundled_model.training import Recipe, train

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
VOCABULARY = 5
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=4, max_size=60).map(np.array)


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


def test_the_rate_rises_once_and_ends_at_nothing() -> None:
    recipe = Recipe(steps=3000)
    rates = np.array([recipe.rate(step) for step in range(recipe.steps)])
    peak = int(rates.argmax())
    assert rates[peak] == pytest.approx(recipe.learning_rate, rel=1e-3)
    assert (np.diff(rates[: peak + 1]) > 0).all()
    assert (np.diff(rates[peak + 2 :]) < 0).all()
    assert rates[-1] < 1e-3 * recipe.learning_rate


def test_a_text_that_is_too_short_says_so(tmp_path: Path) -> None:
    tokens = np.zeros(4000, dtype=np.int64)
    with pytest.raises(ValueError, match="give more text"):
        train(ARCHITECTURES["tiny"], tokens, tokens, Recipe(steps=1), tmp_path, resume=False)


@pytest.mark.parametrize("start", [0, 30], ids=["short windows", "long windows"])
def test_an_epoch_reads_each_window_once_and_no_position_beyond_the_context(start: int) -> None:
    tokens = np.arange(50_000)
    recipe = Recipe(steps=40)
    length = recipe.window(start)
    steps = (len(tokens) // length - 1) // (training.TOKENS_PER_STEP // length)
    batches = [training._batch(tokens, recipe, start + step) for step in range(steps)]
    read = np.concatenate([windows for windows, _ in batches])
    assert (np.diff(read, axis=1) == 1).all()
    assert len({*read[:, 0]}) == len(read)
    assert len({*(read[:, 0] % length)}) == 1
    positions = np.concatenate([each for _, each in batches])
    assert 0 <= positions.min() <= positions.max() < 512
    assert positions.max() > 500


def test_the_files_are_cut_at_a_line_into_what_is_learned_and_what_is_held_out(data: Path) -> None:
    documents = read_documents(data)
    assert [each.name for each in documents] == ["books/one.txt", "books/two.txt", "wikitext-2/valid.txt"]
    for document in documents:
        assert document.train + document.held_out == (data / document.name).read_text()
        assert document.train.endswith("\n")
        assert 0.03 < len(document.held_out) / len(document.train) < 0.06


def test_a_folder_without_text_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--data"):
        read_documents(tmp_path)


def test_texts_are_set_apart_by_end_of_text(data: Path) -> None:
    tokenizer = train_tokenizer(read_documents(data))
    tokens = encode(tokenizer, ["the sea", "the ship"])
    assert (
        tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        == f"{END_OF_TEXT}the sea{END_OF_TEXT}the ship{END_OF_TEXT}"
    )


@given(train=TOKENS, context=st.tuples(*[st.integers(0, VOCABULARY - 1)] * 2))
def test_the_baselines_share_out_exactly_one(train: Tokens, context: tuple[int, int]) -> None:
    for model in (Unigram(train, VOCABULARY), Trigram(train, VOCABULARY)):
        rows = [model.probabilities(np.array([*context, token])) for token in range(VOCABULARY)]
        assert sum(row[1] for row in rows) == pytest.approx(1)
        assert min(row[1] for row in rows) > 0


@given(train=TOKENS, text=TOKENS)
def test_the_trigram_is_kneser_ney_as_it_is_written(train: Tokens, text: Tokens) -> None:
    found = Trigram(train, VOCABULARY).probabilities(text)
    written = [
        kneser_ney(train.tolist(), tuple(text[max(at - 2, 0) : at]), text[at]) for at in range(1, len(text))
    ]
    assert found == pytest.approx(written)


def kneser_ney(train: list[int], context: tuple[int, ...], token: int) -> float:
    """The recursion over plain dictionaries."""
    grams: Counter[tuple[int, ...]] = Counter(zip(train, train[1:], train[2:], strict=False))
    for _ in range(2 - len(context)):
        grams = Counter(gram[1:] for gram in grams)
    return interpolated(grams, context, token)


def interpolated(grams: Counter[tuple[int, ...]], context: tuple[int, ...], token: int) -> float:
    once, twice = (sum(count == times for count in grams.values()) for times in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5
    lower = (
        interpolated(Counter(gram[1:] for gram in grams), context[1:], token) if context else 1 / VOCABULARY
    )
    following = [count for gram, count in grams.items() if gram[:-1] == context]
    if not following:
        return lower
    discounted = max(grams[(*context, token)] - discount, 0)
    return (discounted + discount * len(following) * lower) / sum(following)
