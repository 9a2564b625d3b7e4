"""The bundled models: trained, in the package, without a network, and better at text than counting is."""

import hashlib
import json
import math
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from optigpu.documents.events import Event
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.models.facts import facts_of
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import load_model, load_tokenizer, loaded_facts
from optigpu.models.reference import BUNDLED, ModelReference, bundled_parameters, parse_reference
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import SpecError, UnsupportedError
from tests.engine.tiny_models import runtime_of
from tools.bundled_model.baselines import Trigram, Unigram
from tools.bundled_model.text import END_OF_TEXT, encode, read_documents

pytestmark = pytest.mark.usefixtures("forked_children")

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = {"tiny": 8_000_000, "small": 12_000_000}
EMBEDDINGS = {"tiny": "transformer.wte.weight", "small": "model.embed_tokens.weight"}
FAMILIES = {"tiny": "gpt2", "small": "llama"}
CONTEXT = 512
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
    import torch

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


def test_package_data_names_each_of_its_files(folder: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {
        path for glob in settings["package-data"]["optigpu"] for path in (ROOT / "optigpu").glob(glob)
    }
    files = {path for path in folder.iterdir() if path.is_file()}
    assert {path.name for path in files} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "MODEL_CARD.md",
    }
    assert files - packaged == set()


def test_the_card_is_about_these_weights(folder: Path) -> None:
    card = (folder / "MODEL_CARD.md").read_text("utf-8")
    raw = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(raw).hexdigest() in card
    assert f"{len(raw):,} bytes" in card


def test_its_shapes_are_known_without_torch(name: str, reference: ModelReference) -> None:
    facts = facts_of(reference)
    assert facts is not None
    found = (facts.family, facts.context, facts.hidden_size % 256, facts.tied_head)
    assert found == (FAMILIES[name], CONTEXT, 0, True)
    code = f"""if True:
        import sys
        from optigpu.models.facts import facts_of
        from optigpu.models.reference import parse_reference
        assert facts_of(parse_reference("{reference}"))
        assert not {{"torch", "transformers"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_known_without_loading_it_is_true(model: Any, reference: ModelReference) -> None:
    assert loaded_facts(model) == facts_of(reference)


def test_a_bundled_model_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(SpecError, match="The bundled models are tiny, small"):
        parse_reference("bundled:huge")


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


def test_every_byte_has_a_token_and_the_end_of_a_text_has_one(tokenizer: Any, folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab()
    assert len(vocabulary) == 2048
    assert set(ByteLevel.alphabet()) <= set(vocabulary)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert tokenizer.encode(END_OF_TEXT) == [end] == [tokenizer.eos_token_id]


def test_a_preset_has_no_tokenizer() -> None:
    with pytest.raises(UnsupportedError, match="no tokenizer; name a trained model"):
        load_tokenizer(parse_reference("preset:gpt2"))


def test_a_model_without_a_tokenizer_is_one_clear_sentence(models_dir: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^path:llama cannot be loaded here: [^\n]*\.$"):
        load_tokenizer(parse_reference("path:llama"))


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


def test_order_matters_to_it(model: Any, tokenizer: Any) -> None:
    tokens = np.array(tokenizer.encode(TEXT))
    shuffled = np.random.default_rng(0).permutation(tokens)
    assert losses(model, tokens).mean() < losses(model, shuffled).mean() - 1


# What the engine does with it


@pytest.mark.slow
def test_int8_loses_little(name: str, tokenizer: Any) -> None:
    import torch

    plain, quantized = (runtime_of(f"bundled:{name}", *stack).model for stack in ((), (Int8WeightOnly(),)))
    tokens = torch.tensor([tokenizer.encode(TEXT)])
    with torch.inference_mode():
        p, q = (each(tokens).logits[0].double().log_softmax(-1) for each in (plain, quantized))
    assert 0 < float((p.exp() * (p - q)).sum(-1).mean()) < 0.005
    assert float((p.argmax(-1) == q.argmax(-1)).double().mean()) > 0.95
    assert weight_bytes(quantized) < 0.5 * weight_bytes(plain)


def test_a_static_cache_writes_the_same_words(name: str, tokenizer: Any) -> None:
    import torch

    prompt = torch.tensor([tokenizer.encode("It was late in the evening when")])
    plain, static = (
        runtime_of(f"bundled:{name}", *stack).generate(prompt, 24).tokens.tolist()
        for stack in ((), (StaticKvCache(),))
    )
    assert static == plain
    words = tokenizer.decode(plain[0]).split()
    assert (
        sum(
            word.strip(".,;\"'") in {"the", "and", "a", "of", "to", "I", "he", "was", "had", "it"}
            for word in words
        )
        > 2
    )


@pytest.mark.slow
def test_the_engine_measures_it(reference: ModelReference, tmp_path: Path) -> None:
    spec = JobSpec.model_validate(
        {
            "workload": {"kind": "generate", "prompt_tokens": 16, "new_tokens": 8},
            "model": str(reference),
            "stack": [{"name": "static_kv_cache"}],
            "measure": {
                "replicates": 1,
                "min_seconds": 0.01,
                "max_seconds": 1,
                "meters": ["latency", "memory"],
            },
            "limits": {"wait_for_quiet_s": 0},
        }
    )
    events: list[Event] = []
    (result,) = run(spec, events.append, lock_dir=tmp_path).results
    assert result.metrics["tokens_per_s"].value
    assert result.metrics["params_total"].value == bundled_parameters(reference.name)
