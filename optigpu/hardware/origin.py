"""The origin of the running code: commit, container, image."""

import os
import re
import subprocess
from pathlib import Path

import optigpu
from optigpu.hardware.files import contents

IMAGE = "OPTIGPU_IMAGE"
"""The environment variable with the name of the image; its builder sets it."""
REVISION = "OPTIGPU_REVISION"
"""The environment variable with the commit that an image was built from; an image holds no checkout."""

_GIT_PATIENCE_S = 5.0
_MARKS = {".dockerenv": "docker", "run/.containerenv": "podman"}
_GROUPS = {"kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "lxc": "lxc"}


def git_revision(package: Path | None = None) -> tuple[str | None, bool | None]:
    """The commit of the checkout around the package, and whether the package differs from it, new files included.

    Outside of a checkout the commit is the value of REVISION, and it is unknown whether anything was changed. (None,
    None) where neither is known, or git is missing or refuses a checkout that belongs to another user.
    """
    folder = package or Path(optigpu.__file__).resolve().parent
    if not (folder.parent / ".git").exists():  # not just any checkout around an installed package
        return os.environ.get(REVISION) or None, None
    # Without the variables that select another repository, and without git rewriting its index.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder.parent), "status", "--porcelain=v2", "--branch"]
    command += ["--untracked-files=normal", "--", folder.name]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=variables | {"GIT_OPTIONAL_LOCKS": "0"},
            timeout=_GIT_PATIENCE_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", answer, re.MULTILINE)
    if commit is None:  # a checkout without any commit yet
        return None, None
    return commit[1], any(not line.startswith("#") for line in answer.splitlines())


def container(root: Path) -> str | None:
    """The kind of container that this process runs in; None if no mark of one is found."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    named = contents(root / "run/systemd/container")
    if named:
        return named
    for mark, kind in _MARKS.items():
        if (root / mark).exists():
            return kind
    groups = contents(root / "proc/1/cgroup")
    return next((kind for mark, kind in _GROUPS.items() if mark in groups), None)


def image() -> str | None:
    """The name of the container image, from the environment; None if it is not set."""
    return os.environ.get(IMAGE) or None
