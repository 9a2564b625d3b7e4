"""The environment variables of a measuring process: what it needs, and nothing that would change a measurement.

Only what is listed passes, so that neither a preloaded allocator nor a forgotten OMP or TORCH setting shapes a figure
that is stored as if it were this machine's, and no key or database address reaches a model's code.
"""

import os
from pathlib import Path

import optigpu
from optigpu.paths import data_dir

_NAMES = {
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "CC",
        "CXX",
    ),
    *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *(
        "OPTIGPU_DATA_DIR",
        "OPTIGPU_MODELS_DIR",
        "OPTIGPU_DATASETS_DIR",
        "OPTIGPU_DECODE_CACHE_GB",
        "OPTIGPU_GGUF_CACHE_GB",
    ),
}
_PREFIXES = ("LC_", "XDG_", "CUDA_", "NVIDIA_", "HF_")


def child_variables(threads: int) -> dict[str, str]:
    """The variables for a process that computes with `threads` threads."""
    passed = {
        name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)
    }
    source = str(Path(optigpu.__file__).resolve().parents[1])
    return passed | {
        "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(data_dir() / "inductor"),
        # NVML counts in this order; torch must mean the same GPU by the same number.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
