"""Where loaded weights come from: real models in directories, in a hub's cache, and drawn at random."""

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.facts import WeightFacts
from optigpu.models.loading.load import MODELS_DIR, load_model
from optigpu.models.loading.weights import architecture_digest, origin_of
from optigpu.models.presets import PRESETS
from optigpu.models.reference import BUNDLED, parse_reference
from tests.engine.tiny_models import tiny_model

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
    import torch

    model = tiny_model("gpt2")
    model.save_pretrained(models / "same")
    before, again = provenance("path:same", tmp_path), provenance("path:same", tmp_path)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    model.save_pretrained(models / "same")
    after = provenance("path:same", tmp_path)
    assert before == again
    assert before.hash != after.hash == sha256sum(models / "same", "model.safetensors").split()[0]


def test_a_file_is_read_once_a_job(models_dir: Path, tmp_path: Path) -> None:
    found = provenance("path:opt", tmp_path)
    (note,) = (tmp_path / "weights").iterdir()
    assert note.read_text() == found.hash
    note.write_text("remembered")
    assert provenance("path:opt", tmp_path).hash == "remembered"
    assert provenance("path:opt", tmp_path / "another job").hash == found.hash


def test_what_a_stack_does_to_the_model_does_not_matter(models_dir: Path, tmp_path: Path) -> None:
    import torch

    reference = parse_reference("path:qwen2")
    model: Any = load_model(reference, device="cpu", dtype="float32")
    before = origin_of(reference, model.name_or_path, 0, tmp_path)
    model.to(torch.bfloat16)
    del model.model.layers[1]
    assert origin_of(reference, model.name_or_path, 0, tmp_path) == before


def test_files_that_are_gone_by_then_are_a_reason(models: Path, tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(models / "brief")
    reference = parse_reference("path:brief")
    model = load_model(reference, device="cpu", dtype="float32")
    shutil.rmtree(models / "brief")
    found = origin_of(reference, model.name_or_path, 0, tmp_path)
    assert found.hash is None
    assert found.reasons["hash"].startswith("The files that path:brief was loaded from cannot be read")
    assert found.hash_of is None


def test_a_bundled_model_is_told_by_its_file(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("gpt2").save_pretrained(models / "in the package")
    monkeypatch.setitem(BUNDLED, "tiny", models / "in the package")
    found = provenance("bundled:tiny", tmp_path)
    assert found.hash == sha256sum(models / "in the package", "model.safetensors").split()[0]
    assert "weight hash" in found.reasons["revision"]


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


def test_a_hub_s_cache_that_lost_the_weights_still_says_the_commit(hub_cache: Path, tmp_path: Path) -> None:
    reference = parse_reference("hub:nobody/tiny")
    model = load_model(reference, device="cpu", dtype="float32")
    (hub_cache / "model.safetensors").unlink()
    found = origin_of(reference, model.name_or_path, 0, tmp_path / "job")
    assert (found.hash, found.revision) == (None, COMMIT)
    assert "no model.safetensors" in found.reasons["hash"]


def test_a_preset_has_the_recipe_of_its_weights(tmp_path: Path) -> None:
    one, again, other = (provenance("preset:tiny-llama-test", tmp_path, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.hash != other.hash
    assert one.hash_of == "recipe"
    assert one.revision == other.revision == architecture_digest(PRESETS["tiny-llama-test"])
    assert not (tmp_path / "weights").exists(), "no file was read"
