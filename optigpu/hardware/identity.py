"""An anonymous id of this host, and fingerprints of hardware and software. `root` is the root of the file system."""

import hashlib
import platform
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from optigpu.documents.result import Environment, HostIdSource
from optigpu.hardware.cgroup import contents
from optigpu.vocabulary import canonical_json

_FIRMWARE = ("product_uuid", "board_serial")
_NO_UUIDS = {"03000200-0400-0500-0006-000700080009", "00020003-0004-0005-0006-000700080009"}
"""Placeholders for identifiers on boards, in both byte orders."""


def host_id(gpu_uuids: Sequence[str], root: Path) -> tuple[str, HostIdSource]:
    """A hash of the most reliable identifier that can be read, and its source.

    Root alone can often read the firmware's; all of a machine's GPUs, the hidden ones as well, come next. The rest may
    be a container's instead of the machine's. Then one machine counts as two, which is the lesser evil: hosts that are
    taken for one would continue each other's jobs.
    """
    text, source = next(_known(gpu_uuids, root))
    return hashlib.sha256(f"optigpu {text}".encode()).hexdigest()[:16], source


def hardware_fingerprint(environment: Environment) -> str:
    """A digest of the hardware that this process may use, the same for every user and container.

    It leaves out what needs rights to be read, what an administrator can switch, and the exact sizes of memory. Without
    a GPU, whose UUID is unique, machines of one make and size share a fingerprint.
    """
    return _digest(
        {
            "cpu": environment.cpu_model,
            "cores": environment.cpu_cores,
            "features": sorted(environment.cpu_features),
            "memory": memory_class(environment.memory_bytes),
            "gpus": sorted(gpu.uuid for gpu in environment.accelerators),
        }
    )


def software_fingerprint(environment: Environment) -> str:
    """A digest of the versions that results depend on: packages, commit, driver, compiler, system, image."""
    names = {"software", "driver", "cuda", "compiler", "os", "image", "git_revision", "git_dirty"}
    return _digest(environment.model_dump(mode="json", include=names))


def memory_class(size_bytes: int) -> int:
    """The next of 2^n and 1.5 * 2^n bytes: the installed memory, without what the kernel reserves."""
    power = 1 << max(size_bytes - 1, 1).bit_length() - 1
    return next(size for size in (power, power * 3 // 2, power * 2) if size >= size_bytes)


def _known(gpu_uuids: Sequence[str], root: Path) -> Iterator[tuple[str, HostIdSource]]:
    for name in _FIRMWARE:
        if text := _filled_in(contents(root / "sys/class/dmi/id" / name)):
            yield text, HostIdSource.FIRMWARE
    if gpu_uuids:
        yield " ".join(sorted(gpu_uuids)), HostIdSource.GPUS
    for path in ("etc/machine-id", "var/lib/dbus/machine-id"):
        if text := contents(root / path):
            yield text, HostIdSource.MACHINE_ID
    if address := _network_address(root):
        yield address, HostIdSource.NETWORK_ADDRESS
    yield contents(root / "proc/sys/kernel/hostname") or platform.node(), HostIdSource.HOSTNAME


def _filled_in(text: str) -> str | None:
    """A valid identifier in lower case; None for a placeholder of the maker."""
    text = text.lower()
    digits = re.sub(r"[^0-9a-z]", "", text)
    words = re.search(r"fill|default|specified|serial|none|applicable|0123456789", text)
    return None if len(digits) < 4 or len(set(digits)) < 3 or words or text in _NO_UUIDS else text


def _network_address(root: Path) -> str | None:
    """The lowest address of a network interface with a device, which virtual interfaces lack."""
    folders = (folder for folder in (root / "sys/class/net").glob("*") if (folder / "device").exists())
    texts = (contents(folder / "address") for folder in folders)
    addresses = sorted(text for text in texts if text.strip("0:"))
    if addresses or (root / "sys/class/net").is_dir():
        return addresses[0] if addresses else None
    node = uuid.getnode()  # where there is no such folder (macOS)
    local_or_random = node >> 40 & 0b11
    return None if local_or_random else f"{node:012x}"


def _digest(document: object) -> str:
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()[:16]
