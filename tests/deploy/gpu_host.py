"""Stand-ins for the programs of a GPU host: `nvidia-smi` and `docker`, on a search path with little else."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.deploy.compose import ROOT

LISTED = {
    "one": """\
GPU 0: NVIDIA H200 (UUID: GPU-5f1c8a52-3c1e-9b1d-7d0e-1f2a3b4c5d6e)
""",
    "mixed": """\
GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-9d02b7c4-8f6e-4a1b-b2c3-d4e5f6a7b8c9)
GPU 1: NVIDIA RTX 6000 Ada Generation (UUID: GPU-1e57a9d3-6b2c-4f8e-9a0b-c1d2e3f4a5b6)
GPU 2: Tesla T4 (UUID: GPU-1e57ffff-0c1d-4e2f-8a3b-4c5d6e7f8091)
""",
    "slices": """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa1111-2222-3333-4444-555566667777)
  MIG 3g.40gb     Device  0: (UUID: MIG-11111111-aaaa-5bbb-8ccc-dddddddddddd)
  MIG 2g.20gb     Device  1: (UUID: MIG-22222222-aaaa-5bbb-8ccc-dddddddddddd)
  MIG 1c.2g.20gb  Device  2: (UUID: MIG-33333333-aaaa-5bbb-8ccc-dddddddddddd)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbb1111-2222-3333-4444-555566667777)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-cccc1111-2222-3333-4444-555566667777)
  MIG 7g.80gb     Device  0: (UUID: MIG-44444444-aaaa-5bbb-8ccc-dddddddddddd)
""",
    "old_slices": """\
GPU 0: A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 3g.20gb Device 0: (UUID: MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0)
  MIG 3g.20gb Device 1: (UUID: MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/2/0)
""",
}
"""What `nvidia-smi -L` prints, in the shapes of several drivers and machines; the UUIDs are made up."""
UNREACHABLE = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)
PROGRAMS = ("sh", "bash", "sed", "od", "tr", "id", "cat", "make", "git", "awk", "grep", "env")
"""What recipes of the Makefile call, besides Docker and Python."""
CHECKOUT = (
    "Dockerfile",
    "Makefile",
    ".env.example",
    ".env.worker.example",
    "docker-compose.yml",
    "docker-compose.worker.yml",
)

NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) cat "{listed}"; exit {status};;
*mig.mode.current) cat "{modes}"; exit {status};;
*driver_version) echo {driver}; exit {status};;
esac
"""
DOCKER = """#!/bin/sh
echo "docker $*" >> "{folder}/docker.log"
case "$*" in
info) exit {daemon};;
*"port api 8000") echo 127.0.0.1:8000;;
esac
"""


class GpuHost:
    """A checkout on a host whose programs are these stand-ins; `make` runs a target there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in PROGRAMS:
            program = shutil.which(name)
            assert program, f"{name} is not installed"
            (self.bin / name).symlink_to(program)
        (self.bin / "python3").symlink_to(sys.executable)
        for name in CHECKOUT:
            shutil.copy(ROOT / name, folder)
        (folder / "tools").mkdir()
        for name in ("__init__.py", "gpu_services.py"):
            shutil.copy(ROOT / "tools" / name, folder / "tools")

    def has_gpus(self, listed: str, *, divided: str = "", status: int = 0, driver: str = "580.65.06") -> None:
        """Puts an `nvidia-smi` there that prints `listed`, and says which GPUs MIG divides and what the driver is."""
        (self.folder / "listed").write_text(listed)
        (self.folder / "modes").write_text(divided)
        files = {"listed": self.folder / "listed", "modes": self.folder / "modes"}
        self._install("nvidia-smi", NVIDIA_SMI.format(**files, status=status, driver=driver))

    def has_docker(self, *, daemon: int = 0) -> None:
        """Puts a `docker` there that notes how it was called; `daemon` is what `docker info` exits with."""
        self._install("docker", DOCKER.format(folder=self.folder, daemon=daemon))

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `make` there; its outputs come back together."""
        return subprocess.run(
            ["make", "--no-print-directory", *arguments],
            cwd=self.folder,
            env={"PATH": str(self.bin), "HOME": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def docker_calls(self) -> list[str]:
        """How docker was called."""
        log = self.folder / "docker.log"
        return log.read_text().splitlines() if log.exists() else []

    def _install(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)
