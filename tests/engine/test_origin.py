"""Where the running code comes from: real git repositories, and the marks of containers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import optigpu
from optigpu.hardware.probe import IMAGE, REVISION, container, git_revision, image
from tests.engine.trees import tree
from tests.pages import ROOT


@pytest.fixture(autouse=True)
def _a_plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (IMAGE, REVISION, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def git(folder: Path, *words: str) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    answer = subprocess.run(
        ["git", *identity, *words], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a checkout of one commit."""
    tree(tmp_path, README="text", **{"optigpu__code.py": "one", ".gitignore": "*.pyc\n"})
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path / "optigpu"


def test_a_checkout_says_its_commit(package: Path) -> None:
    assert git_revision(package) == (git(package, "rev-parse", "HEAD"), False)


def test_a_change_and_a_new_file_make_it_dirty(package: Path) -> None:
    commit = git(package, "rev-parse", "HEAD")
    (package / "new.pyc").write_text("ignored")
    (package.parent / "README").write_text("changed, but no code")
    assert git_revision(package) == (commit, False)
    (package / "new.py").write_text("")
    assert git_revision(package) == (commit, True)
    (package / "new.py").unlink()
    (package / "code.py").write_text("two")
    assert git_revision(package) == (commit, True)


def test_to_ask_changes_nothing(package: Path) -> None:
    os.utime(package / "code.py", (10**9, 10**9))  # git would like to note that only the time has changed
    index = (package.parent / ".git/index").read_bytes()
    git_revision(package)
    assert (package.parent / ".git/index").read_bytes() == index


def test_the_commit_is_that_of_the_moment(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring processes import what is on disk when they start, so a worker must not report the commit of its own
    start."""
    monkeypatch.setattr(optigpu, "__file__", str(package / "__init__.py"))
    first = probe()
    assert (first.git_revision, first.git_dirty) == (git(package, "rev-parse", "HEAD"), False)
    (package / "code.py").write_text("two")
    assert probe().git_dirty
    git(package, "commit", "--quiet", "--all", "--message", "two")
    second = probe()
    assert (second.git_revision, second.git_dirty) == (git(package, "rev-parse", "HEAD"), False)
    assert second.git_revision != first.git_revision
    assert second.software_fingerprint != first.software_fingerprint
    assert second.hardware_fingerprint == first.hardware_fingerprint


def test_versions_are_those_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(version: str) -> None:
        tree(tmp_path, **{f"numpy-{version}.dist-info__METADATA": f"Name: numpy\nVersion: {version}\n"})

    install("98.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert probe().software["numpy"] == "98.0"
    shutil.rmtree(tmp_path / "numpy-98.0.dist-info")
    install("99.0")
    assert probe().software["numpy"] == "99.0"


def test_variables_that_lead_git_elsewhere_are_not_followed(
    package: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("elsewhere")))
    assert git_revision(package) == (git(package, "rev-parse", "HEAD"), False)


def test_a_package_that_is_installed_inside_somebody_else_s_checkout_has_no_commit(package: Path) -> None:
    installed = package.parent / ".venv/site-packages/optigpu"
    shutil.copytree(package, installed)
    assert git_revision(installed) == (None, None)


def test_a_checkout_without_a_commit_has_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert git_revision(tree(tmp_path, **{"optigpu__code.py": ""}) / "optigpu") == (None, None)


def test_without_git_nobody_knows(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_revision(package) == (None, None)


def test_an_image_says_what_it_was_built_from_and_a_checkout_knows_better(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REVISION, "f" * 40)
    monkeypatch.setenv(IMAGE, "optigpu:0.1.0")
    assert git_revision(tmp_path / "site-packages/optigpu") == ("f" * 40, None)
    assert git_revision(package) == (git(package, "rev-parse", "HEAD"), False)
    assert image() == "optigpu:0.1.0"


def test_an_image_whose_builder_said_nothing_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REVISION, "")
    monkeypatch.setenv(IMAGE, "")
    assert git_revision(tmp_path) == (None, None)
    assert image() is None


def test_the_dockerfile_passes_what_a_result_says_of_its_image() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert f"{IMAGE}=$IMAGE {REVISION}=$REVISION" in text


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, None),
        ({".dockerenv": ""}, "docker"),
        ({"run__.containerenv": ""}, "podman"),
        ({"run__systemd__container": "lxc\n"}, "lxc"),
        ({"proc__1__cgroup": "0::/\n"}, None),
        ({"proc__1__cgroup": "4:memory:/docker/0123\n"}, "docker"),
        ({"proc__1__cgroup": "4:memory:/kubepods/besteffort/pod1\n"}, "kubernetes"),
    ],
)
def test_a_container_is_known_by_its_marks(tmp_path: Path, files: dict[str, str], kind: str | None) -> None:
    assert container(tree(tmp_path, **files)) == kind


def test_a_pod_is_known_by_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert container(tree(tmp_path, **{".dockerenv": ""})) == "kubernetes"
