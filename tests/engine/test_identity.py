"""Which machine this is, and where the running code comes from: files of other machines, processes, repositories."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import optigpu
from optigpu.documents.result import Accelerator, CpuSetup, Environment, HostIdSource
from optigpu.hardware import probe
from optigpu.hardware.probe import (
    IMAGE,
    REVISION,
    container,
    git_revision,
    hardware_fingerprint,
    host_id,
    image,
    memory_class,
    probed,
    software_fingerprint,
)
from tests.engine.machines import tree

CPUINFO = "model name\t: AMD EPYC 7763 64-Core Processor\nflags\t\t: fpu avx2 fma\n"
FIRMWARE = "4c4c4544-0038-3510-8053-b4c04f4d4232"
GPU = Accelerator(name="NVIDIA H200", memory_bytes=143771 * 2**20, uuid="GPU-a")
GIB = 2**30


def machine(**changes: Any) -> Environment:
    given = Environment(
        hardware_class="1x NVIDIA H200 140 GiB",
        host_id="h",
        cpu_model="AMD EPYC 7763",
        cpu_cores=8,
        cpu_features=("avx2", "fma"),
        memory_bytes=16 * GIB - 500_000_000,
        accelerators=(GPU,),
        driver="570.1",
        os="Linux 6.1",
        software={"torch": "2.13.0"},
    )
    return given.model_copy(update=changes)


def in_another_process(code: str, folder: Path) -> list[str]:
    """The words that a process prints which shares neither this one's directory nor most of its variables."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C", "SOMETHING": "else"}
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    return answer.stdout.split()


@pytest.mark.slow
def test_another_process_sees_the_same_machine(tmp_path: Path) -> None:
    code = "import sys; from optigpu.hardware import probe; here = probe()\n"
    code += (
        "print(here.hardware_fingerprint, here.software_fingerprint, here.host_id, 'torch' in sys.modules)"
    )
    here = probe()
    expected = [here.hardware_fingerprint, here.software_fingerprint, here.host_id, "False"]
    assert in_another_process(code, tmp_path) == expected


def test_another_container_after_a_reboot_sees_the_same_machine(tmp_path: Path) -> None:
    boot = "proc__sys__kernel__random__boot_id"
    ids = {"etc__machine-id": "1" * 32, "proc__sys__kernel__hostname": "first", boot: "a"}
    others = {"etc__machine-id": "2" * 32, "proc__sys__kernel__hostname": "second", boot: "b"}
    shared = {"proc__cpuinfo": CPUINFO, "sys__class__dmi__id__product_uuid": FIRMWARE}
    one = probed(tree(tmp_path / "one", **shared, **ids))
    two = probed(tree(tmp_path / "two", **shared, **others, **{".dockerenv": ""}))
    assert (one.hardware_fingerprint, one.host_id) == (two.hardware_fingerprint, two.host_id)
    assert one.host_id_source is HostIdSource.FIRMWARE
    assert (one.container, two.container) == (None, "docker")


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_model": "AMD EPYC 7713"},
        {"cpu_features": ("avx2",)},
        {"memory_bytes": 32 * GIB},
        {"accelerators": (GPU.model_copy(update={"uuid": "GPU-b"}),)},
    ],
)
def test_what_the_hardware_is_changes_its_fingerprint_alone(changes: dict[str, Any]) -> None:
    assert hardware_fingerprint(machine(**changes)) != hardware_fingerprint(machine())
    assert software_fingerprint(machine(**changes)) == software_fingerprint(machine())


@pytest.mark.parametrize(
    "changes",
    [
        {"software": {"torch": "2.14.0"}},
        {"driver": "580.2"},
        {"compiler": "g++ 14"},
        {"git_revision": "0" * 40},
    ],
)
def test_a_version_changes_the_software_s_fingerprint_alone(changes: dict[str, Any]) -> None:
    assert software_fingerprint(machine(**changes)) != software_fingerprint(machine())
    assert hardware_fingerprint(machine(**changes)) == hardware_fingerprint(machine())


@pytest.mark.parametrize(
    "changes",
    [
        {"host_id": "other"},
        {"cpu_setup": CpuSetup(governor="powersave", boost=False)},
        {"memory_bytes": 16 * GIB - 300_000_000},
        {"accelerators": (GPU.model_copy(update={"power_limit_w": 300.0, "memory_bytes": 1}),)},
        {"cpu_features": ("fma", "avx2")},
    ],
)
def test_a_switch_and_a_size_that_depends_on_the_kernel_change_no_fingerprint(
    changes: dict[str, Any],
) -> None:
    assert hardware_fingerprint(machine(**changes)) == hardware_fingerprint(machine())
    assert software_fingerprint(machine(**changes)) == software_fingerprint(machine())


@given(st.integers(0, 40), st.sampled_from([2, 3]), st.floats(0.0, 0.2))
def test_what_a_kernel_keeps_for_itself_changes_no_class_of_memory(
    power: int, size: int, share: float
) -> None:
    installed = size * GIB * 2**power
    assert memory_class(installed - int(installed * share)) == installed


def network(root: Path, name: str, address: str, *, device: bool) -> None:
    folder = root / "sys/class/net" / name
    (folder / "device" if device else folder).mkdir(parents=True)
    (folder / "address").write_text(f"{address}\n")


def test_the_surest_source_is_taken(tmp_path: Path) -> None:
    tree(tmp_path, proc__sys__kernel__hostname="name")
    sources = [host_id((), tmp_path)]
    network(tmp_path, "eth0", "52:54:00:12:34:56", device=True)
    sources.append(host_id((), tmp_path))
    tree(tmp_path, **{"var__lib__dbus__machine-id": "f" * 32})
    sources.append(host_id((), tmp_path))
    sources.append(host_id(("GPU-a",), tmp_path))
    tree(tmp_path, sys__class__dmi__id__board_serial="..CN7475156D0042.")
    sources.append(host_id(("GPU-a",), tmp_path))
    assert [source for _, source in sources] == list(reversed(HostIdSource))
    assert len({found for found, _ in sources}) == len(HostIdSource)
    assert all(re.fullmatch(r"[0-9a-f]{16}", found) for found, _ in sources)


@pytest.mark.parametrize(
    "left_as_it_was",
    [
        "To be filled by O.E.M.",
        "00000000-0000-0000-0000-000000000000",
        "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF",
        "",
    ],
)
def test_what_a_maker_did_not_fill_in_is_no_identifier(tmp_path: Path, left_as_it_was: str) -> None:
    tree(tmp_path, sys__class__dmi__id__product_uuid=left_as_it_was, proc__sys__kernel__hostname="name")
    assert host_id((), tmp_path)[1] is HostIdSource.HOSTNAME


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


def test_a_package_that_is_installed_inside_somebody_else_s_checkout_has_no_commit(package: Path) -> None:
    installed = package.parent / ".venv/site-packages/optigpu"
    shutil.copytree(package, installed)
    assert git_revision(installed) == (None, None)


def test_an_image_says_what_it_was_built_from_and_a_checkout_knows_better(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REVISION, "f" * 40)
    monkeypatch.setenv(IMAGE, "optigpu:0.1.0")
    assert git_revision(tmp_path / "site-packages/optigpu") == ("f" * 40, None)
    assert git_revision(package) == (git(package, "rev-parse", "HEAD"), False)
    assert image() == "optigpu:0.1.0"


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
