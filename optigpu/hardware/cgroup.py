"""The limits of this process's control group (versions 1 and 2), the memory that is free, and the kernel's kills.

`root` is the root of the file system.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil


def contents(path: Path) -> str:
    """The stripped text of a file; empty if it is missing or unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> int | None:
    """The smallest limit in bytes from here up to the root group; None without a limit."""
    texts = [*_read_all(root, "memory", "memory.max"), *_read_all(root, "memory", "memory.limit_in_bytes")]
    return min((int(text) for text in texts if text != "max"), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that may still be used before a limit is reached, from here up to the root group; None without a limit.

    A group's use counts its page cache only as far as the kernel could not give it back.
    """
    left = []
    for folder in _folders(root, "memory"):
        limit = contents(folder / "memory.max") or contents(folder / "memory.limit_in_bytes")
        used = contents(folder / "memory.current") or contents(folder / "memory.usage_in_bytes")
        if limit not in ("", "max") and used:
            # Version 1 counts the page cache of children in `total_` fields.
            fields = dict(line.split() for line in contents(folder / "memory.stat").splitlines())
            cache = int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)
            left.append(max(0, int(limit) - int(used) + cache))
    return min(left, default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many CPUs' time may be used at most, from here up to the root group; None where there is no quota."""
    quotas = [text.split() for text in _read_all(root, "cpu", "cpu.max")]
    old = zip(
        _read_all(root, "cpu", "cpu.cfs_quota_us"), _read_all(root, "cpu", "cpu.cfs_period_us"), strict=True
    )
    pairs = [(quota, period) for quota, period in (*quotas, *old) if quota not in ("max", "-1")]
    return min((int(quota) / int(period) for quota, period in pairs), default=None)


def quota_wait_s(root: Path = ROOT) -> float:
    """Seconds, summed over CPUs, that the quotas from here up to the root group have kept processes waiting."""
    texts = _read_all(root, "cpu", "cpu.stat")
    fields = [dict(line.split() for line in text.splitlines()) for text in texts]
    micro = sum(int(field.get("throttled_usec", 0)) for field in fields)
    nano = sum(int(field.get("throttled_time", 0)) for field in fields)  # version 1
    return micro / 1e6 + nano / 1e9


def oom_kills(root: Path = ROOT) -> int:
    """A counter that grows when the kernel kills a process for memory, in this group or on this host."""
    texts = [contents(root / "proc/vmstat"), *_read_all(root, "memory", "memory.events")]
    texts += _read_all(root, "memory", "memory.oom_control")
    lines = (line.split() for text in texts for line in text.splitlines())
    return sum(int(words[1]) for words in lines if words[0] == "oom_kill")


def _read_all(root: Path, controller: str, name: str) -> list[str]:
    return [text for folder in _folders(root, controller) if (text := contents(folder / name))]


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Our group's folders from the group itself up to the root group, of both versions."""
    mount = root / "sys/fs/cgroup"
    for line in contents(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controller, mount / controllers]
        else:
            continue
        for top in dict.fromkeys(tops):
            group = top / path.lstrip("/")
            yield from (group, *(parent for parent in group.parents if parent.is_relative_to(top)))


def free_host_bytes(root: Path = ROOT) -> int:
    """Bytes that a new process can have: what the machine has available, and the control group's limit still allows."""
    available = int(psutil.virtual_memory().available)
    left = memory_left(root)
    return available if left is None else min(available, left)
