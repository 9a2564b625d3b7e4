"""The environment variables that OptiGPU reads, and what to say of one that it does not."""

from collections.abc import Iterable
from difflib import get_close_matches

PREFIX = "OPTIGPU_"
DEFAULT_URL = "http://127.0.0.1:8000"
"""The address of the service where OPTIGPU_URL gives none."""
KNOWN = (
    "OPTIGPU_ALLOWED_HOSTS",
    "OPTIGPU_API_KEY",
    "OPTIGPU_CORS_ORIGINS",
    "OPTIGPU_DATABASE_URL",
    "OPTIGPU_DATASETS_DIR",
    "OPTIGPU_DATA_DIR",
    "OPTIGPU_DECODE_CACHE_GB",
    "OPTIGPU_DEVICE_RATE_LIMIT",
    "OPTIGPU_EMBEDDED_WORKER",
    "OPTIGPU_ENDPOINT_HOSTS",
    "OPTIGPU_ENDPOINT_KEYS",
    "OPTIGPU_CONVERTED_CACHE_GB",
    "OPTIGPU_HEARTBEAT_FILE",
    "OPTIGPU_HOST",
    "OPTIGPU_HSTS_S",
    "OPTIGPU_HUB_ORGANISATIONS",
    "OPTIGPU_IMAGE",
    "OPTIGPU_LAUNCH_AT_ONCE",
    "OPTIGPU_LAUNCH_OPTIONS",
    "OPTIGPU_LAUNCH_POLL_S",
    "OPTIGPU_LAUNCH_SETUP",
    "OPTIGPU_LEASE_S",
    "OPTIGPU_LOCK_DIR",
    "OPTIGPU_LOG_LEVEL",
    "OPTIGPU_MAX_BODY_BYTES",
    "OPTIGPU_MAX_IMPORT_BYTES",
    "OPTIGPU_MCP",
    "OPTIGPU_MIN_FREE_BYTES",
    "OPTIGPU_MODELS_DIR",
    "OPTIGPU_PILOT_TOKEN",
    "OPTIGPU_POLL_S",
    "OPTIGPU_PORT",
    "OPTIGPU_PUBLIC_READ",
    "OPTIGPU_RATE_LIMIT",
    "OPTIGPU_REDIS_URL",
    "OPTIGPU_REVISION",
    "OPTIGPU_ROOT_PATH",
    "OPTIGPU_SESSION_S",
    "OPTIGPU_SWEEP_S",
    "OPTIGPU_TEST_DATABASE_URL",
    "OPTIGPU_TEST_EDGE_PYTHON",
    "OPTIGPU_TEST_MICROPYTHON",
    "OPTIGPU_TEST_MPY_CROSS",
    "OPTIGPU_TEST_REDIS_URL",
    "OPTIGPU_TEST_TOOLS",
    "OPTIGPU_TEST_WASM",
    "OPTIGPU_URL",
    "OPTIGPU_WALL_METER",
    "OPTIGPU_WEBHOOK_ALLOWED_HOSTS",
)
"""Every row of the table in docs/settings.md, of whichever program."""


def unknown_variables(names: Iterable[str]) -> list[str]:
    """One sentence for each name that begins as ours do and that no program of ours reads, in their order."""
    return [
        _sentence(name)
        for name in sorted(names)
        if name.upper().startswith(PREFIX) and name.upper() not in KNOWN
    ]


def _sentence(name: str) -> str:
    close = get_close_matches(name.upper(), KNOWN, n=1)
    meant = f"did you mean {close[0]}?" if close else "docs/settings.md lists those that there are."
    return f"{name} is not a setting and changes nothing; {meant}"
