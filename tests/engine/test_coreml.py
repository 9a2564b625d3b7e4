"""The coreml backend on a machine that cannot run a package: what is converted, what is written, how it is asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from optigpu.backends.converted import weights_of
from optigpu.backends.coreml.convert import PACKAGE
from optigpu.backends.coreml.package import INPUT, OUTPUT, PACKAGES
from optigpu.backends.coreml.whole_pass import WholePass, traced
from optigpu.backends.stepped import Loaded, SteppedRuntime
from optigpu.backends.traced import window_of
from optigpu.models.described import decoder_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError
from tests.engine.caches import cache_with
from tests.engine.converted_engines import (
    TINY,
    error,
    ordered,
    prompts,
    scored,
    transformers_logits,
    transformers_model,
    transformers_tokens,
)
from tests.engine.tiny_models import FAMILIES, VOCABULARY

EXACT = 1e-5
"""The largest difference of a logit over the largest logit."""
ROWS, LENGTH, NEW = 2, 32, 12


class Predictor:
    """Predicts as Core ML does of the package: with the very pass that its converter reads."""

    def __init__(self, model: str, rows: int, length: int) -> None:
        loaded = transformers_model(model)
        self._pass = traced(WholePass(loaded, length, window_of(loaded, "coreml")), rows, length)

    def predict(self, inputs: Mapping[str, NDArray[np.int32]]) -> Mapping[str, object]:
        import torch

        with torch.no_grad():
            return {OUTPUT: self._pass(torch.from_numpy(inputs[INPUT]).long()).numpy()}


def windowed(models_dir: Path) -> str:
    """A Mistral whose attention reaches back 8 tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(models_dir / "llama").to_dict() | {"sliding_window": 8}
    settings.pop("model_type")
    config = AutoConfig.for_model("mistral", **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(models_dir / "window")
    return "path:window"


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_the_pass_that_is_converted_has_the_logits_of_transformers(models_dir: Path, family: str) -> None:
    model = windowed(models_dir) if family == "mistral" else f"path:{family}"
    tokens = prompts(ROWS, LENGTH, VOCABULARY)
    found = Predictor(model, ROWS, LENGTH).predict({INPUT: tokens.astype(np.int32)})[OUTPUT]
    assert error(found, transformers_logits(model, tokens)) <= EXACT


def test_layers_of_different_attention_are_refused(models_dir: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    window = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    config = AutoConfig.from_pretrained(models_dir / "qwen2", **window)
    with pytest.raises(
        UnsupportedError, match=r"coreml does not express layers of different attention .layer_types = "
    ):
        window_of(AutoModelForCausalLM.from_config(config), "coreml")


@pytest.mark.slow
@pytest.mark.coreml
@pytest.mark.parametrize("model", [TINY, "preset:tiny-llama-test"])
def test_a_package_takes_ids_and_gives_the_logits_of_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Core ML's own converter, which runs here; what it wrote is read and not run."""
    import coremltools

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path).parent))
    order = ordered(tmp_path, model=model)
    said: list[str] = []
    folder = PACKAGES.made(order, ROWS, LENGTH, said.append)
    assert PACKAGES.made(order, ROWS, LENGTH, said.append) == folder
    assert said == ["converting the model"]
    described = coremltools.utils.load_spec(str(folder / PACKAGE)).description
    shapes = {
        each.name: list(each.type.multiArrayType.shape) for each in (*described.input, *described.output)
    }
    facts = decoder_facts(parse_reference(str(order.model)))
    assert shapes == {INPUT: [ROWS, LENGTH], OUTPUT: [ROWS, LENGTH, facts.vocabulary]}
    (weights,) = folder.rglob("weight.bin")
    assert weights.stat().st_size >= 4 * facts.vocabulary * facts.hidden_size


@pytest.mark.slow
@pytest.mark.coreml
def test_greedy_tokens_and_scores_are_transformers_s(tmp_path: Path) -> None:
    from optigpu.backends.coreml.runtime import PackageSteps

    order = ordered(tmp_path)

    def steps(rows: int, length: int) -> Any:
        return PackageSteps(Predictor(TINY, rows, length), rows, length)

    loaded = Loaded(
        "Core ML", decoder_facts(parse_reference(str(order.model))), steps, weights_of(order), None
    )
    runtime = SteppedRuntime(order, loaded, Notes())
    prompt = prompts(ROWS, LENGTH - NEW)
    found = runtime.generate(prompt, NEW)
    assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW)
    assert runtime.generate(prompt, NEW).tokens.tolist() == found.tokens.tolist(), (
        "nothing is left of the first"
    )
    tokens = prompts(ROWS, LENGTH)
    assert error(scored(runtime, tokens, 8), transformers_logits(TINY, tokens)[:, 8:]) <= EXACT
