"""Confines a measuring process, then runs its program in the same process: a second interpreter would cost its start.

    python -m optigpu.child.confined LARGEST_FILE_BYTES network|loopback MODULE ARGUMENTS...

With `loopback` the program has no network but a loopback of its own, where the kernel allows that. No thread may run
before that, so this module imports only what starts none.
"""

import ctypes
import fcntl
import os
import resource
import runpy
import socket
import struct
import sys
from pathlib import Path
from typing import Literal

MOST_OPEN_FILES = 65536
NETWORK, LOOPBACK = "network", "loopback"

_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_CAP_SYS_ADMIN = 1 << 21
_CAPABILITIES_VERSION_3 = 0x2008_0522
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def main() -> None:
    """Confines this process and becomes the program."""
    largest_file, reachable, module, *arguments = sys.argv[1:]
    limit(int(largest_file))
    if reachable == LOOPBACK:
        leave_network()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def limit(largest_file: int) -> None:
    """No core files, which hold a model's memory, and files of a bounded size and number. CUDA reserves more of the
    address space than it ever uses, and memory has its own watch."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, largest_file)
    _lower(resource.RLIMIT_NOFILE, MOST_OPEN_FILES)


def leave_network() -> bool:
    """Moves this process to a network of its own that has loopback alone. False where that is not possible. An
    administrator may do so at once. Others need a user namespace of their own, in which they keep their user and have
    no rights. A process that has some rights stays where it is: it would lose them, and with them its priority."""
    if sys.platform != "linux":
        return False
    # The effective capabilities of this process, as bits.
    lines = Path("/proc/self/status").read_text().splitlines()
    rights = int(next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0"), 16)
    if rights & _CAP_SYS_ADMIN:
        return _unshare(_CLONE_NEWNET) and _raise_loopback()
    if rights:
        return False
    # Tried in a copy of this process: one that fails half-way would have lost its user.
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _leave_as_user() else 1)
    return os.waitpid(pid, 0)[1] == 0 and _leave_as_user()


def reach() -> Literal["network", "loopback"] | None:
    """What this process can reach: the host's network, or loopback alone; None where it cannot be told."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    except OSError:
        return None
    alone = {line.partition(":")[0].strip() for line in lines} <= {"lo"}
    return "loopback" if alone else "network"


def _lower(which: int, most: int) -> None:
    """Sets both limits to at most this; a limit that is lower already stays."""
    soft, hard = (
        most if each == resource.RLIM_INFINITY else min(each, most) for each in resource.getrlimit(which)
    )
    resource.setrlimit(which, (soft, hard))


def _leave_as_user() -> bool:
    uid, gid = os.geteuid(), os.getegid()
    if not _unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError:
        return False
    if not _raise_loopback():
        return False
    # The rights over the new namespaces reach parts of the kernel that no measurement needs.
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION_3, 0)
    return bool(ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0)


def _unshare(flags: int) -> bool:
    return bool(ctypes.CDLL(None, use_errno=True).unshare(flags) == 0)


def _raise_loopback() -> bool:
    """Libraries that talk to their own processes over loopback need it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
