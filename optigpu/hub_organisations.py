"""From which organisations of the model hub anything may be downloaded: all, unless a list is set."""

import os

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
