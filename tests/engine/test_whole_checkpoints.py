"""Checkpoints: one that is not all of its model is refused, and a result says where its weights come from."""

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.documents.facts import WeightFacts
from optigpu.documents.result import VerdictReason
from optigpu.models.held import architecture_digest, origin_of
from optigpu.models.loading.load import MODELS_DIR, load_image_model, load_model
from optigpu.models.reference import PRESETS, parse_reference
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.vocabulary import UnsupportedError, VariantStatus
from tests.breadth import long
from tests.engine.converted_engines import own_cache
from tests.engine.sessions import GENERATE, QUICK, measured, quick_job
from tests.engine.tiny_models import VOCABULARY, asked, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("forked_children")
Tensors = dict[str, torch.Tensor]
LAYER, FIRST = "model.layers.1.", "model.layers.0.self_attn.q_proj."
TRAINING = {"kind": "train_step", "batch_size": 2, "sequence_tokens": 16}


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: each for name, each in tensors.items() if not any(part in name for part in parts)
    }


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new, 1): each for name, each in tensors.items()}


def with_one(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(shape)}


def edited(folder: Path, made: Any, edit: Callable[[Tensors], Tensors]) -> None:
    """A checkpoint of one file whose tensors `edit` has changed."""
    made.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "edit", "words"),
    [
        ("llama", without(LAYER), f"lacks 9 of the 21 tensors .*: {LAYER}self_attn.q_proj.weight, .* and 6 more; "),
        ("llama", without("lm_head"), "lacks 1 of the 21 tensors .*: lm_head.weight; "),
        ("llama", renamed("", "language_model."), r"lacks 21 .* \(and has language_model.lm_head.weight, .* 18 more"),
        ("llama", without("weight"), "lacks 21 of the 21 tensors"),
        ("qwen2", without("embed_tokens"), "lacks 2 of .*: model.embed_tokens.weight, lm_head.weight"),
        ("gpt2", without("h.1.ln_1.bias"), "lacks 1 of .*: transformer.h.1.ln_1.bias"),
        ("llama", with_one(f"{FIRST}weight", 16, 64), rf"{FIRST}weight is \[16, 64\] in the checkpoint and \[64, 64\]"),
        ("llama", with_one(f"{FIRST}bias", 64), f"does not compute with, .*: {FIRST}bias; correct config.json"),
        ("llama", with_one("model.layers.2.norm.weight", 64), "has 3 layers in model.layers and config.json says 2; "),
        ("gpt2", with_one("h.3.ln_1.weight", 64), "has 4 layers in h and config.json says 2; correct config.json"),
    ],
)  # fmt: skip
def test_what_a_checkpoint_lacks_is_named(
    models_dir: Path, family: str, edit: Callable[[Tensors], Tensors], words: str
) -> None:
    edited(models_dir / "cut", tiny_model(family), edit)
    with pytest.raises(UnsupportedError, match=f"path:cut .*{words}"):
        load_model(parse_reference("path:cut"), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("family", "edit"),
    [
        ("qwen2", without()),
        ("qwen2", renamed("model.embed_tokens", "lm_head")),
        ("gpt2", renamed("transformer.", "")),
        ("gpt2", with_one("transformer.h.0.attn.masked_bias")),
        ("llama", with_one("mtp.layers.0.mlp.up_proj.weight", 8, 8)),
    ],
    ids=["a tied head", "a tied embedding", "no prefix", "a mask of old", "a head for several tokens"],
)
def test_what_may_be_absent_is_not_missed(
    models_dir: Path, family: str, edit: Callable[[Tensors], Tensors]
) -> None:
    edited(models_dir / "enough", tiny_model(family), edit)
    loaded = load_model(parse_reference("path:enough"), device="cpu", dtype="float32").state_dict()
    expected = tiny_model(family).state_dict()
    assert all(loaded[name].equal(each) for name, each in expected.items())


def test_a_head_of_its_own_stays_where_config_json_calls_it_tied(models_dir: Path) -> None:
    edited(models_dir / "own", tiny_model("qwen2"), with_one("lm_head.weight", VOCABULARY, 64))
    found, tied = runtime_of("path:own"), runtime_of("path:qwen2")
    assert bool((found.model.get_output_embeddings().weight == 1).all())
    assert (found.facts.tied_head, tied.facts.tied_head) == (False, True)
    assert found.weights == tied.weights + VOCABULARY * 64


def test_a_result_says_which_tensors_its_model_does_not_use(models_dir: Path, tmp_path: Path) -> None:
    others = {f"vision_tower.layers.{number}.weight": torch.ones(4) for number in range(4)}
    edited(models_dir / "parts", tiny_model("llama"), lambda tensors: tensors | others)
    applied = runtime_of("path:parts", SlidingKvCache())
    assert asked(applied, tmp_path).weights().unused == (
        "vision_tower.layers.0.weight, vision_tower.layers.1.weight, vision_tower.layers.2.weight and 1 more"
    )
    assert asked(runtime_of("path:llama"), tmp_path).weights().unused is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without("classifier"), "lacks 2 of .*: classifier.1.weight, classifier.1.bias"),
        (without("running_var"), "lacks .*normalization.running_var"),
        (without("num_batches_tracked"), None),
    ],
)
def test_a_classifier_needs_its_head_and_its_statistics(
    models_dir: Path, edit: Callable[[Tensors], Tensors], words: str | None
) -> None:
    made = load_image_model(parse_reference("preset:tiny-resnet-test"), device="cpu", dtype="float32")
    edited(models_dir / "headless", made, edit)
    if words is None:
        load_image_model(parse_reference("path:headless"), device="cpu", dtype="float32")
        return
    with pytest.raises(UnsupportedError, match=words):
        load_image_model(parse_reference("path:headless"), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("experts.3.", r"\[3, .*\] in the checkpoint and \[4, "),
        ("0.block_sparse_moe.experts.3.w1", "tensors of its experts"),
    ],
)
def test_an_expert_that_is_missing_is_refused(models_dir: Path, part: str, words: str) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = AutoConfig.for_model(
        "mixtral", **sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=64
    )
    edited(models_dir / "experts", AutoModelForCausalLM.from_config(config), without(part))
    with pytest.raises(UnsupportedError, match=words):
        load_model(parse_reference("path:experts"), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("engines"))


@pytest.mark.slow
@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        long(pytest.param("llama_cpp", marks=pytest.mark.llama)),
        long(pytest.param("onnxruntime", marks=pytest.mark.onnxruntime)),
        long(pytest.param("openvino", marks=pytest.mark.openvino)),
    ],
)
def test_no_engine_measures_what_is_not_all_there(models_dir: Path, tmp_path: Path, backend: str) -> None:
    edited(models_dir / "cut", tiny_model("llama"), without(LAYER))
    jobs: list[dict[str, Any]] = [{}]
    jobs += [{"workload": TRAINING}] if backend == "torch" else []
    for job in jobs:
        (outcome,) = measured(quick_job(model="path:cut", backend=backend, **job), tmp_path).outcomes
        assert outcome.status is VariantStatus.UNSUPPORTED, outcome.reason
        assert "path:cut lacks 9 of the 21 tensors of the model" in str(outcome.reason)


@pytest.mark.slow
def test_a_technique_that_says_it_keeps_predictions_and_does_not_is_not_the_model(
    models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that forgets tokens, and no longer says so."""
    monkeypatch.setattr(SlidingKvCache, "approximates", False)
    spec = quick_job(
        model="path:llama",
        workload=GENERATE | {"new_tokens": 24},
        measure=QUICK | {"quality": {"tokens": 64}},
        stack=[{"name": "sliding_kv_cache", "window": 4, "sinks": 0}],
        beside=[{"label": "plain"}],
    )
    forgetful, plain = measured(spec, tmp_path).results
    assert (plain.metrics["kld_mean"].value or 0) < 1e-9
    assert VerdictReason.NOT_THE_MODEL not in plain.verdict.reasons
    assert (forgetful.metrics["kld_mean"].value or 0) > 1e-3
    assert VerdictReason.NOT_THE_MODEL in forgetful.verdict.reasons


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def provenance(name: str, folder: Path, seed: int = 0) -> WeightFacts:
    reference = parse_reference(name)
    model = load_model(reference, device="cpu", dtype="float32", seed=seed)
    return origin_of(reference, model.name_or_path, seed, folder)


def sha256sum(folder: Path, *names: str) -> str:
    return subprocess.run(
        ["sha256sum", *names], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv(MODELS_DIR, str(folder))
    return folder


def test_one_file_s_hash_is_what_sha256sum_says(models_dir: Path, tmp_path: Path) -> None:
    found = provenance("path:gpt2", tmp_path)
    assert found.hash == sha256sum(models_dir / "gpt2", "model.safetensors").split()[0]
    assert (found.hash_of, found.files) == ("files", {"model.safetensors": found.hash})
    assert found.revision is None
    assert "directory" in found.reasons["revision"]


def test_several_files_have_the_hash_of_what_sha256sum_says(models: Path, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(models / "sharded", max_shard_size="50KB")
    names = sorted(path.name for path in (models / "sharded").glob("*.safetensors"))
    assert len(names) > 1
    (models / "sharded/stray.safetensors").write_bytes(b"not in the index, so never read")
    found = provenance("path:sharded", tmp_path)
    lines = sha256sum(models / "sharded", *names)
    assert found.hash == hashlib.sha256(lines.encode()).hexdigest()
    assert list(found.files) == names


def test_other_weights_in_the_same_directory_have_another_hash(models: Path, tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    model.save_pretrained(models / "same")
    before, again = provenance("path:same", tmp_path), provenance("path:same", tmp_path)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    model.save_pretrained(models / "same")
    after = provenance("path:same", tmp_path)
    assert before == again
    assert before.hash != after.hash == sha256sum(models / "same", "model.safetensors").split()[0]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache, holding one commit of nobody/tiny, on a machine without a network."""
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    repository = cache / "models--nobody--tiny"
    tiny_model("gpt2").save_pretrained(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repository / "snapshots" / COMMIT


@pytest.mark.parametrize("name", ["hub:nobody/tiny", f"hub:nobody/tiny@{COMMIT}"])
def test_a_hub_s_model_says_the_commit_that_was_read(hub_cache: Path, tmp_path: Path, name: str) -> None:
    found = provenance(name, tmp_path / "job")
    assert found.revision == COMMIT
    assert found.hash == sha256sum(hub_cache, "model.safetensors").split()[0]
    assert found.reasons == {}


def test_a_preset_has_the_recipe_of_its_weights(tmp_path: Path) -> None:
    one, again, other = (provenance("preset:tiny-llama-test", tmp_path, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.hash != other.hash
    assert one.hash_of == "recipe"
    assert one.revision == other.revision == architecture_digest(PRESETS["tiny-llama-test"])
    assert not (tmp_path / "weights").exists(), "no file was read"
