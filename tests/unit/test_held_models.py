"""Which models a worker says that it has: real folders, and a cache of the hub as its library leaves it."""

from pathlib import Path

import pytest

from optigpu.models.held import DEEPEST, MODELS_DIR, held_models, may_download, model_directory
from optigpu.vocabulary import UnsupportedError

COMMIT = "1" * 40


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model directory, on a machine that may download."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv(MODELS_DIR, str(folder))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return folder


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_folders_with_a_configuration_are_named_by_their_references(root: Path) -> None:
    model_in(root / "gpt2")
    model_in(root / "org" / "llama")
    model_in(root / "org" / "llama" / "checkpoint-5")
    (root / "notes").mkdir()
    assert held_models() == ("path:gpt2", "path:org/llama", "path:org/llama/checkpoint-5")


def test_without_a_variable_they_are_in_the_data_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_in(root / "gpt2")
    monkeypatch.setenv(MODELS_DIR, str(root / "missing"))
    assert held_models() == ()
    monkeypatch.delenv(MODELS_DIR)
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(root.parent))
    assert held_models() == ("path:gpt2",)


def test_a_model_that_can_be_brought_is_told_how(root: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"; `optigpu models get smollm2-135m` brings it\.$"):
        model_directory("smollm2-135m")


def test_nothing_outside_of_the_model_directory_is_named(root: Path, tmp_path: Path) -> None:
    elsewhere = model_in(tmp_path / "private")
    (root / "link").symlink_to(elsewhere)
    (root / "up").symlink_to(tmp_path)
    inside = model_in(root / "gpt2")
    (root / "same").symlink_to(inside)
    assert held_models() == ("path:gpt2", "path:same")


def test_each_reference_is_one_that_a_job_may_load(root: Path) -> None:
    (root / "loop").symlink_to(root)
    model_in(root / "gpt2")
    for reference in held_models():
        assert model_directory(reference.removeprefix("path:")).is_dir()


def test_hidden_odd_and_very_deep_folders_are_left_out(root: Path) -> None:
    model_in(root / ".cache" / "gpt2")
    model_in(root / "two\nlines")
    deep = root.joinpath(*["level"] * DEEPEST)
    model_in(deep)
    model_in(deep / "below")
    assert held_models() == ("path:" + "/".join(["level"] * DEEPEST),)


def test_a_folder_that_cannot_be_read_is_left_out(root: Path) -> None:
    model_in(root / "gpt2")
    broken = root / "broken"
    broken.mkdir()
    (broken / "config.json").symlink_to(root / "nowhere")
    assert held_models() == ("path:gpt2",)


@pytest.mark.parametrize(
    ("value", "may"), [("1", False), ("true", False), ("ON", False), ("0", True), ("", True)]
)
def test_the_hub_s_own_variable_forbids_downloads(
    monkeypatch: pytest.MonkeyPatch, value: str, may: bool
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert may_download() is may


@pytest.fixture
def cache(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    import huggingface_hub.constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


def cached(cache: Path, repository: str, branch: str, *files: str) -> None:
    snapshot = cache / repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text("{}")
    refs = cache / repository / "refs"
    refs.mkdir()
    (refs / branch).write_text(COMMIT)


def test_offline_the_whole_models_of_the_hub_s_cache_are_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(cache, "models--nobody--tiny", "main", "config.json", "model.safetensors")
    cached(cache, "models--nobody--branch", "v2", "config.json", "model.safetensors")
    cached(cache, "models--nobody--pickled", "main", "config.json", "pytorch_model.bin")
    cached(cache, "datasets--nobody--texts", "main", "config.json", "text.safetensors")
    assert held_models() == (), "what may be downloaded need not be named"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert held_models() == (
        f"hub:nobody/branch@{COMMIT}",
        "hub:nobody/branch@v2",
        "hub:nobody/tiny",
        f"hub:nobody/tiny@{COMMIT}",
        "hub:nobody/tiny@main",
    )
