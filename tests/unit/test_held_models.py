"""Which models a worker says that it has; bounded folders, whose least recently used files go first."""

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from optigpu.backends.converted import whole
from optigpu.models.held import DEEPEST, MODELS_DIR, held_models, may_download, model_directory
from optigpu.paths import Bound, BoundedFolder, mark_used
from optigpu.vocabulary import OptiGPUError, UnsupportedError

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


SIZE = 100
BOUND = Bound("OPTIGPU_TEST_CACHE_GB", default=3 * 2**30, files="test files")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the folder is; it does not exist yet."""
    return tmp_path / "cache" / "kept"


def write(folder: BoundedFolder, stem: str, size: int = SIZE) -> Path:
    target = folder.path / f"{stem}.data"
    with folder.locked(), folder.draft_of(target) as draft:
        draft.write_bytes(b"x" * size)
        folder.admit(draft)
    return target


def names_in(path: Path) -> set[str]:
    """All but the lock, which filelock may leave or take away."""
    return {file.name for file in path.iterdir()} - {"kept.lock"}


@pytest.mark.parametrize(
    ("text", "size"), [("", 3 * 2**30), ("20", 20 * 2**30), ("0.5", 2**29), ("0", 0), ("0.0", 0)]
)
def test_the_environment_s_bound_comes_before_the_default(
    monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    monkeypatch.delenv(BOUND.variable, raising=False)
    assert BOUND.most_bytes() == BOUND.default
    monkeypatch.setenv(BOUND.variable, text)
    assert BOUND.most_bytes() == size


@pytest.mark.parametrize("text", ["many", "5GB", "-1", "nan", "inf", "1e400"])
def test_a_bound_that_is_not_a_number_from_0_on_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(BOUND.variable, text)
    sentence = f"{BOUND.variable} must be a number of GiB, 0 or more, not '{text}'; 0 keeps no test files."
    with pytest.raises(UnsupportedError, match=f"^{sentence}$"):
        BOUND.most_bytes()


def test_a_draft_gets_its_name_when_it_is_admitted(path: Path) -> None:
    folder = BoundedFolder(path, ".data", math.inf)
    target = path / "preset-2.5-a.data"
    with folder.locked(), folder.draft_of(target) as draft:
        draft.write_bytes(b"whole")
        assert not target.exists()
        folder.admit(draft)
    assert target.read_bytes() == b"whole"
    assert names_in(path) == {target.name}
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_draft_that_is_not_admitted_is_removed(path: Path) -> None:
    folder = BoundedFolder(path, ".data", math.inf)
    earlier = write(folder, "a")
    with folder.locked(), folder.draft_of(earlier) as draft:
        draft.write_bytes(b"half")
    with pytest.raises(FileNotFoundError), folder.locked(), folder.draft_of(earlier) as draft:
        draft.write_bytes((path / "missing").read_bytes())
    assert names_in(path) == {"a.data"}
    assert earlier.stat().st_size == SIZE


def test_the_least_recently_used_make_room(path: Path) -> None:
    folder = BoundedFolder(path, ".data", 3 * SIZE)
    for second, stem in enumerate("abc"):
        os.utime(write(folder, stem), (second + 1, second + 1))
    mark_used(path / "a.data")
    write(folder, "d")
    assert names_in(path) == {"a.data", "c.data", "d.data"}
    write(BoundedFolder(path, ".data", 2 * SIZE - 1), "e")
    assert names_in(path) == {"e.data"}


def test_a_file_that_is_larger_than_the_bound_is_admitted_alone(path: Path) -> None:
    folder = BoundedFolder(path, ".data", 2 * SIZE)
    for stem, size in (("a", SIZE), ("b", SIZE), ("c", 3 * SIZE)):
        write(folder, stem, size)
    assert names_in(path) == {"c.data"}


def test_what_killed_processes_left_is_removed_and_nothing_else(path: Path) -> None:
    folder = BoundedFolder(path, ".data", 2 * SIZE)
    write(folder, "a")
    for name in ("b.unfinished", ".tmpAbCdEf", "README"):
        (path / name).write_bytes(b"x")
    with folder.locked():
        assert names_in(path) == {"a.data", "README"}


def test_a_process_that_is_killed_leaves_no_file_and_no_lock(path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from optigpu.paths import BoundedFolder
folder = BoundedFolder(Path({str(path)!r}), ".data", {SIZE})
with folder.locked(), folder.draft_of(folder.path / "a.data") as draft:
    draft.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert names_in(path) == {"a.unfinished"}
    write(BoundedFolder(path, ".data", SIZE), "b")
    assert names_in(path) == {"b.data"}


def test_one_writes_at_a_time(path: Path) -> None:
    folder = BoundedFolder(path, ".data", math.inf)
    inside: list[int] = []

    def enter() -> None:
        with folder.locked():
            inside.append(1)
            assert len(inside) == 1
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    with folder.locked():
        for thread in threads:
            thread.start()
        assert not inside
    for thread in threads:
        thread.join(30)
    assert not inside


def test_a_lock_that_others_hold_for_too_long_is_an_error_of_the_operating_system(path: Path) -> None:
    path.mkdir(parents=True)
    folder = BoundedFolder(path, ".data", math.inf)
    with FileLock(path / "kept.lock"), pytest.raises(OSError, match=r"kept\.lock"), folder.locked(0.05):
        raise AssertionError("Two hold the lock.")


def test_who_may_only_read_marks_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError

    target = write(BoundedFolder(path, ".data", math.inf), "a")
    monkeypatch.setattr(os, "utime", refuse)
    mark_used(target)


@pytest.fixture(params=["file", "folder"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model that was written as one file, or as a folder of files."""
    path = tmp_path / "model.kept"
    if request.param == "folder":
        path.mkdir()
        (path / "weights").write_bytes(b"half")
    else:
        path.write_bytes(b"half")
    return path


@pytest.mark.parametrize(
    "error", [RuntimeError("no graph.\nmore"), ValueError("no graph"), OSError("no graph")]
)
def test_a_model_that_cannot_be_read_is_removed(kept: Path, error: Exception) -> None:
    said = (
        r"Engine cannot load model\.kept: no graph\. .* was damaged and has been removed; run the job again"
    )
    with pytest.raises(OptiGPUError, match=said), whole(kept, "Engine"):
        raise error
    assert not kept.exists()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("std::bad_alloc"), MemoryError(), UnsupportedError("no such type"), KeyError("a bug")],
)
def test_an_error_that_says_nothing_of_the_model_leaves_it(kept: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, whole(kept, "Engine"):
        raise error
    assert raised.value is error
    assert kept.exists()
