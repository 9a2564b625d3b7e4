"""The environment variables that OptiGPU reads, and what to say of one that it does not.

One of them says from which organisations of the model hub anything may be downloaded: all, unless it is set.
"""

import os
from collections.abc import Iterable
from difflib import get_close_matches

PREFIX = "OPTIGPU_"
DEFAULT_URL = "http://127.0.0.1:8000"
"""The address of the service where OPTIGPU_URL gives none."""
_NAMES = """
    ALLOWED_HOSTS API_KEY CONVERTED_CACHE_GB CORS_ORIGINS DATABASE_URL DATASETS_DIR DATA_DIR
    DECODE_CACHE_GB DEVICE_RATE_LIMIT EMBEDDED_WORKER ENDPOINT_HOSTS ENDPOINT_KEYS HEARTBEAT_FILE
    HOST HSTS_S HUB_ORGANISATIONS IMAGE KERNELS LAUNCH_AT_ONCE LAUNCH_OPTIONS LAUNCH_POLL_S LAUNCH_SETUP
    LEASE_S LOCK_DIR LOG_LEVEL MAX_BODY_BYTES MAX_IMPORT_BYTES MCP MIN_FREE_BYTES MODELS_DIR
    PILOT_TOKEN POLL_S PORT PUBLIC_READ RATE_LIMIT REDIS_URL REFERENCES_GB REVISION ROOT_PATH SESSION_S SWEEP_S
    TEST_DATABASE_URL TEST_EDGE_PYTHON TEST_MICROPYTHON TEST_MPY_CROSS TEST_REDIS_URL TEST_TOOLS
    TEST_WASM URL WALL_METER WEBHOOK_ALLOWED_HOSTS
"""
KNOWN = tuple(PREFIX + name for name in _NAMES.split())
"""Every row of the table in docs/service.md, of any program."""


def unknown_variables(names: Iterable[str]) -> list[str]:
    """One sentence for each name that begins as ours do and that no program of ours reads, in their order."""
    found = []
    for name in sorted(names):
        whole = name.upper()
        if whole.startswith(PREFIX) and whole not in KNOWN:
            close = get_close_matches(whole, KNOWN, n=1)
            meant = f"did you mean {close[0]}?" if close else "docs/service.md lists all settings."
            found.append(f"{name} is not a setting and changes nothing; {meant}")
    return found


ORGANISATIONS = "OPTIGPU_HUB_ORGANISATIONS"
"""The environment variable: names separated by commas. The service and its workers each look at their own."""


def hub_refusal(repository: str) -> str | None:
    """Why a repository, ORG/NAME, may not be downloaded, or None if it may."""
    allowed = [name.strip() for name in os.environ.get(ORGANISATIONS, "").split(",") if name.strip()]
    organisation, slash, _ = repository.partition("/")
    if not allowed or (slash and organisation.casefold() in {name.casefold() for name in allowed}):
        return None
    why = f"belongs to {organisation}" if slash else "names no organisation"
    return f"hub:{repository} {why}, and {ORGANISATIONS} allows {', '.join(allowed)} alone; ask for a model of theirs."
