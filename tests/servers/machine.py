"""What the provisioning rule may know about the machine, as one value, so that the rule can be tested."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    environment: Mapping[str, str]
    search_path: str  # folders of programs, as in PATH
    postgres_root: Path  # Debian keeps PostgreSQL's server programs here, off PATH, by version
    families: frozenset[str]  # what /etc/os-release calls the system and what it descends from
    is_root: bool

    def program(self, name: str) -> str | None:
        """The path of a program, looked up anew at each call: it may have just been installed."""
        by_version = sorted(self.postgres_root.glob("*/bin"), key=_version, reverse=True)
        return shutil.which(name, path=os.pathsep.join([self.search_path, *map(str, by_version)]))


def this_machine() -> Machine:
    return Machine(
        environment=dict(os.environ),
        search_path=os.environ.get("PATH", os.defpath),
        postgres_root=Path("/usr/lib/postgresql"),
        families=_os_families(),
        is_root=os.geteuid() == 0,
    )


def _version(folder: Path) -> float:
    return float(folder.parent.name)


def _os_families() -> frozenset[str]:
    try:
        release = platform.freedesktop_os_release()
    except OSError:  # not a Linux
        return frozenset()
    return frozenset({release["ID"], *release.get("ID_LIKE", "").split()})
