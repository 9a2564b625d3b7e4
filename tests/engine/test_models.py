"""Presets and loading: published sizes, weights made in place, and references that cannot be loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch.utils._python_dispatch import TorchDispatchMode

from optigpu.backends.endpoint.prompts import tokenizer_of
from optigpu.models.facts import facts_of, known_facts, packaged
from optigpu.models.files import TOKENIZER, TOKENIZER_CONFIGURATION
from optigpu.models.held import CONFIGURATION
from optigpu.models.loading.describing import description
from optigpu.models.loading.load import (
    MODELS_DIR,
    config_of,
    count_weights,
    load_image_model,
    load_model,
    load_tokenizer,
    loaded_image_facts,
)
from optigpu.models.presets import IMAGE_PRESETS, PRESETS
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.vocabulary import UnsupportedError
from tests.engine.tiny_models import VOCABULARY, tiny_model


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_weights(name: str) -> None:
    model = load_model(parse_reference(f"preset:{name}"), device="meta", dtype="bfloat16")
    assert count_weights(model) == PRESETS[name].parameters


@pytest.mark.parametrize(
    "reference", [*(f"preset:{name}" for name in PRESETS), *map("bundled:{}".format, BUNDLED)]
)
def test_what_is_known_of_a_model_without_loading_it_is_true(reference: str) -> None:
    """`python -m tools.describe_models` writes it again after a change of a preset or of transformers."""
    found = description(config_of(parse_reference(reference)))
    assert packaged()[reference] == found
    assert facts_of(parse_reference(reference)) == found.facts


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_an_image_preset_has_the_published_number_of_weights_and_facts(name: str) -> None:
    reference = parse_reference(f"preset:{name}")
    model = load_image_model(reference, device="meta", dtype="bfloat16")
    assert count_weights(model) == IMAGE_PRESETS[name].parameters
    assert loaded_image_facts(model) == known_facts(reference)
    assert facts_of(reference) is None, "what is asked of a decoder says nothing of it"


def test_weights_are_made_on_the_device_in_the_dtype_and_nowhere_else() -> None:
    made: set[tuple[str, torch.dtype]] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() > 10_000:
                made.add((result.device.type, result.dtype))
            return result

    with Watch():
        load_model(parse_reference("preset:tiny-llama-test"), device="meta", dtype="bfloat16")
    assert made == {("meta", torch.bfloat16)}


def test_a_seed_gives_the_same_weights_again_and_another_seed_others() -> None:
    first, again, other = (
        load_model(parse_reference("preset:tiny-llama-test"), device="cpu", dtype="float32", seed=seed)
        for seed in (1, 1, 2)
    )
    weight = "model.layers.0.mlp.up_proj.weight"
    assert first.get_parameter(weight).equal(again.get_parameter(weight))
    assert not first.get_parameter(weight).equal(other.get_parameter(weight))


def test_a_path_model_is_the_one_that_was_saved(models_dir: Path) -> None:
    saved = tiny_model("gpt2")
    loaded = load_model(parse_reference("path:gpt2"), device="cpu", dtype="float32")
    tokens = torch.arange(VOCABULARY)[None, :20]
    assert loaded(tokens).logits.equal(saved(tokens).logits)


def test_a_path_must_lie_under_the_model_directory(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(models_dir / "gpt2")
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    with pytest.raises(UnsupportedError, match="leads out of the model directory"):
        load_model(parse_reference("path:link"), device="cpu", dtype="float32")


def test_pickled_weights_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2")
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    with pytest.raises(UnsupportedError, match="safetensors"):
        load_model(parse_reference("path:pickled"), device="cpu", dtype="float32")


@pytest.fixture
def damaged(tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a tiny Llama to damage, which `path:damaged` names; it has the tokenizer of bundled:tiny."""
    shutil.copytree(models_dir / "llama", tmp_path / "damaged")
    for name in (TOKENIZER, TOKENIZER_CONFIGURATION):
        shutil.copy(BUNDLED["tiny"] / name, tmp_path / "damaged")
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    return tmp_path / "damaged"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "its configuration names 'spiral'"),
        ({"hidden_act": "sneeze"}, "its configuration names 'sneeze', which transformers does not know"),
        (
            {"num_attention_heads": 7},
            "The hidden size (64) is not a multiple of the number of attention heads (7)",
        ),
    ],
)
def test_what_transformers_cannot_make_of_a_configuration_is_one_sentence(
    damaged: Path, fields: dict[str, Any], said: str
) -> None:
    path = damaged / CONFIGURATION
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UnsupportedError) as refused:
        load_model(parse_reference("path:damaged"), device="cpu", dtype="float32")
    sentence = str(refused.value)
    assert sentence.startswith("path:damaged cannot be loaded here: ")
    assert said in sentence
    assert sentence.endswith("; check its config.json.")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (TOKENIZER, "{", f"{TOKENIZER} of path:damaged is not JSON: "),
        (TOKENIZER, "{}", "path:damaged cannot be loaded here: "),
        (TOKENIZER_CONFIGURATION, "[]", f"{TOKENIZER_CONFIGURATION} of path:damaged holds no JSON object"),
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(damaged: Path, file: str, content: str, said: str) -> None:
    load_tokenizer(parse_reference("path:damaged"))
    (damaged / file).write_text(content)
    with pytest.raises(UnsupportedError) as refused:
        load_tokenizer(parse_reference("path:damaged"))
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
    if file == TOKENIZER:
        with pytest.raises(UnsupportedError, match=f"^{TOKENIZER} of path:damaged "):
            tokenizer_of(parse_reference("path:damaged"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nobody/nothing@main", ""),
        ("gpt2", "; preset:gpt2 has its shapes, random weights, and needs no network"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_one_clear_sentence(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UnsupportedError) as caught:
        load_model(parse_reference(f"hub:{name}"), device="cpu", dtype="float32")
    assert str(caught.value).startswith(
        f"hub:{name} cannot be loaded here: its files are not all in the hub's cache, and the hub "
        "http://127.0.0.1:1 cannot be reached: "
    )
    assert str(caught.value).endswith(f"{hint}; or put it under {MODELS_DIR} and name it path:DIR.")
    assert "\n" not in str(caught.value)
