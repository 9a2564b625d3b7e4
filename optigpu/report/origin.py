"""When, where and with which software results were measured, so that a table or a chart can stand alone."""

from collections.abc import Sequence

from optigpu.vocabulary import Document

_SHORT_COMMIT = 10


def origin_line(results: Sequence[Document]) -> str | None:
    """One sentence; None without results. Several machines or versions are all named."""
    if not results:
        return None
    environments = [result["environment"] for result in results]
    days = sorted({str(result["created_at"])[:10] for result in results})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    where = " and ".join(dict.fromkeys(environment["hardware_class"] for environment in environments))
    software = " and ".join(dict.fromkeys(map(_software, environments)))
    return f"Measured {when} on {where}; {software}."


def _software(environment: Document) -> str:
    versions = environment.get("software") or {}
    named = [f"{name} {versions[name]}" for name in ("torch", "optigpu") if name in versions]
    if environment.get("driver"):
        named.append(f"driver {environment['driver']}")
    if commit := environment.get("git_revision"):
        changed = " with changes" if environment.get("git_dirty") else ""
        named.append(f"commit {commit[:_SHORT_COMMIT]}{changed}")
    return ", ".join(named) or "software unknown"
