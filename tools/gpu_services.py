"""Writes docker-compose.gpus.yml: a worker for each NVIDIA GPU and each MIG slice of this host, by its UUID.

    python3 -m tools.gpu_services --base docker-compose.yml --gpu all

`make up` and `make workers` run it on the host, where nothing is installed: it needs Python 3.9 and no package.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OUTPUT = "docker-compose.gpus.yml"
ALL, NONE = "all", "none"
OLDEST_DRIVERS = {12: 525, 13: 580}
"""For each major version of CUDA the oldest driver that runs it.

Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""
HEAD = "# Written by tools/gpu_services.py; the next `make up` or `make workers` writes it again.\n\n"
_GPU = re.compile(r"GPU (?P<number>\d+): (?P<name>.+) \(UUID: (?P<uuid>GPU-\S+)\)")
_SLICE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+(?P<number>\d+): \(UUID: (?P<uuid>MIG-\S+)\)")
_SERVICE = """  # {name}
  {service}:
    <<: *worker
    command: ["python", "-m", "worker", "--device", "cuda", "--gpu", "{uuid}"]
    # Needs the NVIDIA Container Toolkit on the host.
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              device_ids: ["{uuid}"]
              capabilities: [gpu]
"""


class RefusedError(Exception):
    """The file cannot be written; the text says why and what to do."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one slice of it."""

    service: str
    name: str
    uuid: str


def parse(listed: str, divided: frozenset[str] = frozenset()) -> list[Gpu]:
    """The GPUs that `nvidia-smi -L` lists; in place of one with MIG slices, its slices.

    `divided` are the UUIDs of GPUs on which MIG is on: nothing runs on such a one without a slice, so it is left out.
    """
    found: list[Gpu] = []
    whole: Gpu | None = None
    for line in listed.splitlines():
        if (match := _GPU.fullmatch(line.rstrip())) is not None:
            whole = Gpu(f"worker-gpu-{match['number']}", match["name"], match["uuid"])
            if whole.uuid not in divided:
                found.append(whole)
        elif (match := _SLICE.fullmatch(line.rstrip())) is not None and whole is not None:
            found = [gpu for gpu in found if gpu != whole]
            service, name = f"{whole.service}-mig-{match['number']}", f"{whole.name} MIG {match['profile']}"
            found.append(Gpu(service, name, match["uuid"]))
    return found


def chosen(gpus: Sequence[Gpu], words: str) -> list[Gpu]:
    """Those that `words` names: "all", "none", or UUIDs or their beginnings with commas between.

    Raises RefusedError for one that names no GPU or several.
    """
    if words == NONE:
        return []
    if words == ALL:
        return list(gpus)
    found: list[Gpu] = []
    for word in filter(None, (part.strip() for part in words.split(","))):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
        if len(matches) != 1:
            listed = ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in gpus) or "none"
            what = "no GPU begins" if not matches else "several GPUs begin"
            raise RefusedError(f"GPU={word}: {what} with this UUID. This host has: {listed}.")
        found += [gpu for gpu in matches if gpu not in found]
    return found


def compose_file(base: str, gpus: Sequence[Gpu]) -> str:
    """The text of the file: what stands before the services in the text of `base`, and a service for each GPU."""
    if not gpus:
        return f"{HEAD}services: {{}}\n"
    before, found, _ = base.partition("\nservices:\n")
    if not found or "&worker" not in before:
        raise RefusedError(
            "The base file has no block x-worker before its services; name docker-compose.yml."
        )
    services = "\n".join(_SERVICE.format(**vars(gpu)) for gpu in gpus)
    return f"{HEAD}{before}\nservices:\n{services}"


def require_driver(driver: str, dockerfile: str) -> None:
    """Raises RefusedError if a driver, "535.183.01" for example, is older than the image of this Dockerfile wants."""
    cuda = re.search(r"^ARG CUDA=((\d+)\.\d+)$", dockerfile, re.MULTILINE)
    found = re.match(r"\d+", driver)
    if not cuda or not found:
        return
    oldest = OLDEST_DRIVERS.get(int(cuda[2]), 0)
    if int(found[0]) < oldest:
        raise RefusedError(
            f"The NVIDIA driver is {driver}, and the image's CUDA {cuda[1]} needs {oldest} or newer: update the "
            "driver, or start without workers for GPUs: GPU=none."
        )


def on_this_host() -> list[Gpu]:
    """The GPUs and slices of this host; none without a driver. Raises RefusedError if the driver does not answer."""
    listed = _asked("-L")
    return parse(listed, _divided()) if listed else []


def _divided() -> frozenset[str]:
    """The UUIDs of the GPUs on which MIG is on."""
    lines = _asked("--query-gpu=uuid,mig.mode.current", "--format=csv,noheader").splitlines()
    pairs = [line.partition(", ") for line in lines]
    return frozenset(uuid for uuid, _, mode in pairs if mode.strip() == "Enabled")


def _driver() -> str:
    """The driver's version; all GPUs of a host have the same one."""
    return _asked("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()


def _asked(*arguments: str) -> str:
    """What nvidia-smi prints; nothing where there is no such program or no GPU."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(_failed(str(error))) from error
    if "No devices were found" in answer.stdout:
        return ""
    if answer.returncode != 0:
        raise RefusedError(_failed(" ".join(answer.stdout.split()) or f"exit status {answer.returncode}"))
    return answer.stdout


def _failed(why: str) -> str:
    return (
        f"nvidia-smi failed: {why.rstrip('.')}. Repair the driver (after an update of it, restart the host), or start "
        "without workers for GPUs: GPU=none."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file and says which workers it has; returns the exit status: 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.gpu_services", description="A worker for each GPU."
    )
    parser.add_argument(
        "--base", default="docker-compose.yml", type=Path, help="the file with the other services"
    )
    parser.add_argument(
        "--gpu", default=ALL, help="all, none, or UUIDs of `nvidia-smi -L` with commas between"
    )
    given = parser.parse_args(arguments)
    try:
        gpus = [] if given.gpu == NONE else chosen(on_this_host(), given.gpu)
        if gpus:
            require_driver(_driver(), Path("Dockerfile").read_text())
        Path(OUTPUT).write_text(compose_file(given.base.read_text(), gpus))
    except (RefusedError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for gpu in gpus:
        print(f"{gpu.service}: {gpu.name} ({gpu.uuid})")
    if not gpus:
        why = "GPU=none" if given.gpu == NONE else "no NVIDIA GPU or MIG slice found"
        print(f"No worker for a GPU: {why}; the worker for the CPU starts.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
