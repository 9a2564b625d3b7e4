"""Limits of a measuring process: its environment variables, its network, its files.

Only the variables that are listed here are passed on. So neither a preloaded allocator nor a forgotten OMP or TORCH
setting affects a stored figure of this machine, and no key or database address reaches a model's code. A variable that
is passed on and may change what is measured is recorded in the result. Secrets are passed on only to a process that
needs them and are never recorded.

A process has no network where its job needs none, and cannot fill the disk. It has the scratch folder of its job, and a
temporary one of its own.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import optigpu
from optigpu.child import confined
from optigpu.hardware.wall_meter import WALL_METER
from optigpu.job.spec import Variant
from optigpu.meters.base import QualityOptions
from optigpu.models.held import may_download
from optigpu.paths import cache_dir, data_dir, home_dir, plain_path, without_home
from optigpu.proxies import common_exceptions
from optigpu.quality.text import comes_from_hub
from optigpu.vocabulary import DeviceKind, ReplicateError

_PLAIN = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("OPTIGPU_MODELS_DIR", "OPTIGPU_DATASETS_DIR"),
    "OPTIGPU_HUB_ORGANISATIONS",
    # Where a server may be; the variant says which one was asked.
    "OPTIGPU_ENDPOINT_HOSTS",
    # Not recorded: an address may hold a password. The facts of the energy meter name what was read.
    "OPTIGPU_WALL_METER",
    # They select GPUs; the result's `accelerators` say which.
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    # What an image asks of the driver; the result names the driver itself.
    "NVIDIA_REQUIRE_CUDA",
}
_PLAIN_PREFIXES = ("LC_", "XDG_", "HF_")
"""HF_: the source and the folder of downloads. The hash of the weights identifies what was downloaded."""

_RECORDED = {
    *("CC", "CXX", "LD_LIBRARY_PATH"),
    *("OPTIGPU_DECODE_CACHE_GB", "OPTIGPU_CONVERTED_CACHE_GB", "OPTIGPU_REFERENCES_GB"),
    # The first takes kernels of another AMD GPU, the second the CPU's operators in the place of those that Metal lacks.
    *("HSA_OVERRIDE_GFX_VERSION", "PYTORCH_ENABLE_MPS_FALLBACK"),
}
_RECORDED_PREFIXES = ("CUDA_", "NVIDIA_")
"""For example NVIDIA_TF32_OVERRIDE, which changes numbers, and CUDA_LAUNCH_BLOCKING, which changes times."""
_IMPORT_PATH = "PYTHONPATH"
"""Recorded, and passed on after the folder of this package."""

_HUB_SECRETS = frozenset({"HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"})
_ENDPOINT_SECRETS = frozenset({"OPTIGPU_ENDPOINT_KEYS"})
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "KEY")


PATIENT = {"OMP_WAIT_POLICY": "passive"}
"""For a process whose requests are not timed: its threads sleep while they wait for each other. Where another program
needs a core, threads that spin keep the one from running that they wait for."""


def child_variables(threads: int, *, secrets: Collection[str] = ()) -> dict[str, str]:
    """The variables for a process that computes with `threads` threads, with the `secrets` that it needs."""
    passed = {name: value for name, value in os.environ.items() if _is_passed(name, secrets)}
    return (
        passed
        | common_exceptions(passed)
        | {
            "HOME": str(home_dir()),  # where libraries keep files of their own
            "OPTIGPU_DATA_DIR": str(data_dir()),
            _IMPORT_PATH: os.pathsep.join([str(_source()), *_import_path()]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "GGML_NO_BACKTRACE": "1",  # llama.cpp that aborts would start a debugger, whose output hides its own
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(plain_path(data_dir()) / "inductor"),
            "TRITON_CACHE_DIR": str(plain_path(cache_dir()) / "triton"),
            # NVML counts in this order; torch must mean the same GPU by the same number.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    )


def recorded_variables() -> dict[str, str]:
    """The variables that measuring processes inherit and that may change what is measured; ~ is the home directory, so
    that a result does not name the user."""
    found = {name: value for name, value in sorted(os.environ.items()) if _is_recorded(name)}
    if _import_path():
        found[_IMPORT_PATH] = os.pathsep.join(_import_path())
    return {name: without_home(value) for name, value in found.items()}


def secrets_of(variant: Variant) -> frozenset[str]:
    """The secrets that its process needs: the hub's to download a model, the servers' keys to ask a server."""
    asked = _ENDPOINT_SECRETS if variant.endpoint else frozenset[str]()
    return asked | (_HUB_SECRETS if variant.hub_repositories else frozenset())


def _is_passed(name: str, secrets: Collection[str]) -> bool:
    if _is_secret(name):
        return name in secrets
    return name in _PLAIN or name.startswith(_PLAIN_PREFIXES) or _is_recorded(name)


def _is_recorded(name: str) -> bool:
    known = name in _RECORDED or name.startswith(_RECORDED_PREFIXES)
    return known and name not in _PLAIN and not _is_secret(name)


def _is_secret(name: str) -> bool:
    return name in _HUB_SECRETS or any(word in name for word in _SECRET_WORDS)


def _source() -> Path:
    return Path(optigpu.__file__).resolve().parents[1]


def _import_path() -> list[str]:
    """The entries of PYTHONPATH other than the folder of this package."""
    entries = os.environ.get(_IMPORT_PATH, "").split(os.pathsep)
    return [entry for entry in entries if entry and Path(entry).resolve() != _source()]


RESERVE_BYTES = 2**30
"""Of the disk's free space: not even one file of this size may be taken from what is left."""
LEAST_LARGEST_BYTES = 2**30
OVER_THE_NETWORK = ("vllm", "tensorrt_llm")
"""Engines whose processes find each other by the host's address."""
UVM = Path("/dev/nvidia-uvm")
"""CUDA's first use makes it, by a program of the driver that needs an administrator's rights."""


def confined_program(program: Sequence[str], *, network: bool, folder: Path) -> tuple[str, ...]:
    """The command that confines the program `python ... -m MODULE ...` and runs it; any other one stays as it is.
    `folder` is on the disk whose free space bounds a file."""
    if "-m" not in program:
        return tuple(program)
    at = program.index("-m") + 1
    options = (
        confined.__name__,
        str(largest_file(folder)),
        confined.NETWORK if network else confined.LOOPBACK,
    )
    return (*program[:at], *options, *program[at:])


def largest_file(folder: Path) -> int:
    """Bytes: no single file can take the last of the disk's free space."""
    return max(shutil.disk_usage(folder).free - RESERVE_BYTES, LEAST_LARGEST_BYTES)


def needs_network(variant: Variant, quality: QualityOptions | None) -> bool:
    """Whether a process that measures the variant must reach others: the hub, a server, a wall meter. `quality` is
    None where it is not measured."""
    downloads = bool(variant.hub_repositories) or (quality is not None and comes_from_hub(quality.text))
    return (
        (downloads and may_download())
        or variant.endpoint is not None
        or variant.backend in OVER_THE_NETWORK
        or os.environ.get(WALL_METER, "").startswith(("http://", "https://"))
        or (variant.device is DeviceKind.CUDA and not UVM.exists())
    )


ABANDONED_S = 2 * 86400.0
"""A scratch folder that has not changed for so long belongs to a worker that was killed."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one job, removed after it. It is on disk, because the logits in it may not fit into memory."""
    root = _root()
    for folder in root.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix="job-", dir=root, ignore_cleanup_errors=True) as folder_name:
        yield Path(folder_name)


def temporary_folder() -> Path:
    """A new folder for the temporary files of one process, beside the jobs' folders: what a killed worker left is
    removed with theirs. Raises ReplicateError when it cannot be made."""
    try:
        return Path(tempfile.mkdtemp(prefix="tmp-", dir=_root()))
    except OSError as error:
        raise ReplicateError(
            f"No temporary directory for the measuring process can be made in {data_dir()} ({error.strerror})."
        ) from error


def _root() -> Path:
    root = plain_path(data_dir()) / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    return root
