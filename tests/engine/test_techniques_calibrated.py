"""gptq and awq of models that are not quantized yet: the text, the library's process, and what comes of it.

A stand-in for GPTQModel rounds to the nearest number; the tests of the marker gptq run the library itself.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch.applied import DecodingModel
from optigpu.hardware import probe
from optigpu.models.loading.load import MODELS_DIR, load_model
from optigpu.models.loading.packed_checkpoints import packed_layers
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery.gptqmodel.checkpoints import calibration_ids, int4_weights_of, result_digest
from optigpu.surgery.gptqmodel.recipe import Calibration, Recipe
from optigpu.surgery.places import weight_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.quantization.awq import Awq
from optigpu.techniques.quantization.gptq import Gptq
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.engine.packed_models import linear_layers
from tests.engine.tiny_models import FAMILIES, prompt, runtime_of
from tests.engine.trained_model import save_trained_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
TECHNIQUE: dict[str, Technique] = {"gptq": Gptq(), "awq": Awq()}
STAND_IN = Path(__file__).parent / "stand_in"


@pytest.mark.long
@pytest.mark.parametrize(("method", "model"), [("gptq", "path:gpt2"), ("awq", "preset:tiny-llama-test")])
def test_what_the_library_made_is_computed_with_and_kept(
    method: str, model: str, stand_in: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(models_dir / f"stood-in-{method}"))
    runtime = runtime_of(model, quick(method))
    assert_computes_with_what_was_made(runtime, models_dir / f"stood-in-{method}", method)
    assert runtime.notes.facts["int4_source"] == "gptqmodel 0.0.1"
    again = runtime_of(model, quick(method))
    assert again.notes.facts["int4_source"] == "gptqmodel 0.0.1, quantized before"
    assert again.logits(prompt()).equal(runtime.logits(prompt()))
    assert stand_in.read_text().splitlines() == [f"{method} 2 1"]


def test_another_model_recipe_or_text_is_another_result(stand_in: Path) -> None:
    model = runtime_of("path:llama").model
    recipes = [
        Recipe(method, size, Calibration("self", 2, 16, 0))
        for method, size in (("gptq", 32), ("awq", 32), ("gptq", 64))
    ]
    found = {result_digest(model, recipe, [[0]]) for recipe in recipes}
    found.add(result_digest(model, recipes[0], [[1]]))
    model.model.norm.weight[0] += 1
    found.add(result_digest(model, recipes[0], [[0]]))
    model.config.rms_norm_eps = 1.0
    found.add(result_digest(model, recipes[0], [[0]]))
    assert len(found) == 6
    assert result_digest(model, recipes[0], [[0]]) in found


@pytest.mark.long
def test_what_the_library_cannot_quantize_is_refused_with_its_words(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = runtime_of("path:llama").model
    model.config.bos_token_id = 3
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=r"by gptq \(ValueError: token 3 is no beginning\)"):
        quick("gptq").modules(model, Notes())
    assert [type(module) for module in model.modules()] == before
    assert list((tmp_path / "optigpu" / "quantized").iterdir()) == []


def test_merged_matrices_are_refused_before_anything_is_quantized(stand_in: Path) -> None:
    with pytest.raises(UnsupportedError, match="with the parameters of its family"):
        runtime_of("path:llama", quick("gptq"), FusedQkv())
    assert not stand_in.exists()


@pytest.mark.parametrize("method", TECHNIQUE)
def test_without_the_library_only_ready_checkpoints_can_be_had(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    technique, facts = TECHNIQUE[method], runtime_of("path:llama").facts
    environment = probe()
    software = {name: version for name, version in environment.software.items() if name != "gptqmodel"}
    without = environment.model_copy(update={"software": software})
    assert "pip install -e '.[gptq]'" in (technique.check(without, DeviceKind.CPU, facts) or "")
    assert technique.check(without, DeviceKind.CPU, None) is None
    model = runtime_of("path:llama").model
    with pytest.raises(UnsupportedError, match=r"\.\[gptq\]"):
        technique.modules(model, Notes())
    assert len(linear_layers(model)) == 14


def test_awq_refuses_the_layers_of_gpt2() -> None:
    model = runtime_of("path:gpt2")
    reason = Awq().check(probe(), DeviceKind.CPU, model.facts)
    assert "Conv1D" in (reason or "")
    with pytest.raises(UnsupportedError, match="Conv1D"):
        Awq().modules(model.model, Notes())


def test_awq_refuses_an_opt_model_without_relu_and_outputs_that_are_no_multiple_of_64(stand_in: Path) -> None:
    model = runtime_of("path:opt").model
    with pytest.raises(UnsupportedError, match=r"outputs are a multiple of 64; .*fc1 has 96"):
        Awq().modules(model, Notes())
    model.config.activation_function = "gelu"
    with pytest.raises(UnsupportedError, match="OPT models with the activation relu; this one has gelu"):
        Awq().modules(model, Notes())
    assert not stand_in.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "samples", "length", "why"),
    [
        ("self", 2, 8000, r"8000 tokens are longer than this model's context of \d+;"),
        (
            "file:mine.txt",
            900,
            60,
            r"900 calibration sequences of 60 tokens need 54000 tokens, and file:mine.txt has \d+",
        ),
        ("file:none.txt", 1, 8, "cannot calibrate with file:none.txt: none.txt under"),
    ],
)
def test_calibration_text_that_does_not_fit_is_refused(
    text: str, samples: int, length: int, why: str, trained_model: Path, language_dir: Path
) -> None:
    model = runtime_of("path:trained").model
    with pytest.raises(UnsupportedError, match=why):
        calibration_ids(model, Calibration(text, samples, length, seed=0), "gptq")


def test_random_weights_have_no_tokenizer_to_read_a_file_with(language_dir: Path) -> None:
    model = runtime_of("preset:tiny-llama-test").model
    with pytest.raises(UnsupportedError, match="set calibration to self"):
        calibration_ids(model, Calibration("file:mine.txt", 1, 8, seed=0), "gptq")


def test_calibration_text_is_drawn_with_the_seed_or_spread_over_the_file(
    trained_model: Path, language_dir: Path
) -> None:
    from transformers import AutoTokenizer

    model = runtime_of("path:trained").model
    drawn = [calibration_ids(model, Calibration("self", 3, 16, seed), "gptq") for seed in (0, 0, 1)]
    assert [len(row) for row in drawn[0]] == [16, 16, 16]
    assert drawn[0] == drawn[1] != drawn[2]
    words = (language_dir / "mine.txt").read_text()
    ids = AutoTokenizer.from_pretrained(trained_model).encode(words, add_special_tokens=False)
    cut = calibration_ids(model, Calibration("file:mine.txt", 3, 16, 0), "gptq")
    assert cut == [ids[start : start + 16] for start in (0, len(ids) // 3, 2 * (len(ids) // 3))]


@pytest.mark.parametrize("text", ["wikitext-2", "hellaswag", "mine.txt", "file:../mine.txt"])
def test_what_quality_is_measured_on_is_no_calibration_text(text: str) -> None:
    for kind in (Gptq, Awq):
        with pytest.raises(ValueError, match=r"calibration must be|without '\.\.'"):
            kind(calibration=text)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for GPTQModel, for this process and its children; the file that it leaves its traces in."""
    facts = tmp_path / "library" / "gptqmodel-0.0.1.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text("Metadata-Version: 2.1\nName: gptqmodel\nVersion: 0.0.1\n")
    folders = [str(STAND_IN), str(tmp_path / "library")]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, str(STAND_IN.parents[2])]))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log.txt"))
    return tmp_path / "log.txt"


def quick(method: str) -> Any:
    """The technique with little text to calibrate with."""
    return TECHNIQUE[method].model_copy(update={"samples": 2, "length": 16})


def assert_computes_with_what_was_made(runtime: DecodingModel, cache: Path, method: str) -> None:
    """Each layer multiplies with the numbers in the one folder of the cache, and all other tensors are those in it
    too."""
    import torch

    (made,) = (cache / "optigpu" / "quantized").iterdir()
    reference = parse_reference(f"path:{made.relative_to(os.environ[MODELS_DIR])}")
    expected = load_model(reference, device="cpu", dtype="float32", packed=method)
    packed = dict(packed_layers(expected))
    for path, layer in packed.items():
        found, weights = (
            runtime.model.get_submodule(path),
            dequantize_groups(int4_weights_of(layer.unpacked())),
        )
        products = found(torch.eye(weights.shape[1])) - (0 if found.bias is None else found.bias)
        torch.testing.assert_close(products.T, weights, rtol=2**-20, atol=2**-20)
    for name, parameter in expected.named_parameters():
        if name.rpartition(".")[0] not in packed:
            assert runtime.model.get_parameter(name).equal(parameter)
    assert runtime.notes.facts["int4_layers"] == len(packed)


@pytest.mark.gptq
@pytest.mark.parametrize(
    ("method", "model"),
    [
        *(("gptq", f"path:{family}") for family in FAMILIES),
        *(("awq", f"preset:tiny-{family}-test") for family in ("llama", "qwen")),
    ],
)
def test_the_library_s_own_layers_are_computed_with(
    method: str, model: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = models_dir / f"made-{method}-{model.partition(':')[2]}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    runtime = runtime_of(model, quick(method))
    assert_computes_with_what_was_made(runtime, cache, method)
    assert runtime.generate(prompt(), 4).tokens.shape == (2, 4)


@pytest.mark.gptq
@pytest.mark.parametrize("method", TECHNIQUE)
def test_calibration_loses_less_than_rounding_to_nearest(
    method: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In divergence from a trained model in fp32, in groups of the same size, the head left as it is.

    On the very text that it was calibrated with, and on text that it has not seen.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(models_dir / f"trained-{method}"))
    name = "bundled:tiny" if method == "gptq" else "path:trained-llama"
    if method == "awq":
        save_trained_model(models_dir / "trained-llama", "llama")
    calibrated = runtime_of(name, TECHNIQUE[method].model_copy(update={"samples": 16, "length": 90})).model
    plain = runtime_of(name).model
    texts = [sampled(plain, plain.config.vocab_size, rows=16, length=90, seed=seed) for seed in (0, 1)]
    expected = [predictions(plain, tokens) for tokens in texts]
    scheme = Int4Scheme(symmetric=method == "gptq", solver="min_max")
    for layer in linear_layers(plain).values():
        weight = weight_of(layer)
        weight.copy_(dequantize_groups(quantize_groups(weight, scheme)))
    for was, tokens in zip(expected, texts, strict=True):
        assert 1.2 * divergence(was, calibrated, tokens) < divergence(was, plain, tokens)


def divergence(expected: Any, model: Any, tokens: Any) -> float:
    """Mean Kullback-Leibler divergence over every position, in nats."""
    return float((expected.exp() * (expected - predictions(model, tokens))).sum(-1).mean())


def predictions(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=tokens).logits.double().log_softmax(-1)
