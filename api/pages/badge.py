"""`/badge/{id}.svg`: a result as a small picture for a README, "23x on EPYC"."""

import re
from html import escape
from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.auth import Reader
from api.inputs import Uuid
from api.pages.bars import speedup_text
from api.rendering import EXPORT_POLICY
from api.service import ServiceDep
from optigpu.documents.result import MetricSummary
from optigpu.documents.versions import current
from optigpu.report.numbers import short
from optigpu.report.rows import heading
from optigpu.store import leaderboard, results
from optigpu.vocabulary import METRICS, Document

router = APIRouter()
KEPT_S = 300
LETTER, ROOM = 6.6, 10
"""The width of a letter and of what is around a text, in pixels."""
LONGEST = 40
_NOISE = re.compile(r"\(R\)|\(TM\)|\bCPU\b|\bProcessor\b|\d+-Core|@.*|\b(AMD|Intel|NVIDIA)\b|^\d+x ")

Named = Annotated[Uuid, Path(alias="id", description="The id of a result.")]


@router.get("/badge/{id}.svg")
def read_badge(service: ServiceDep, _: Reader, result_id: Named) -> Response:
    """Anybody's page may show it."""
    with service.database.read() as session:
        document = current(results.get(session, result_id))
        baseline = leaderboard.baseline_of(session, result_id)
    words = badge_words(document, None if baseline is None else baseline.value)
    headers = {
        "Cache-Control": f"public, max-age={KEPT_S}",
        "Content-Security-Policy": EXPORT_POLICY,
        "Cross-Origin-Resource-Policy": "cross-origin",
    }
    return Response(
        _svg("OptiGPU", words, valid=document["verdict"]["valid"]),
        media_type="image/svg+xml",
        headers=headers,
    )


def badge_words(document: Document, baseline: MetricSummary | None) -> str:
    """`23.1x on EPYC 9654`; without a baseline the figure itself."""
    name = document["variant"]["primary_metric"]
    primary = document["metrics"].get(name)
    where = f"on {short_hardware(document['environment']['hardware_class'])}"
    if not document["verdict"]["valid"]:
        return f"not valid {where}"
    if not primary or primary["value"] is None:
        return f"not measured {where}"
    gain = speedup_text(baseline, primary) if baseline else None
    if gain is not None:
        return f"{gain.text} {where}"
    return f"{short(primary['value'])} {heading(name) if name in METRICS else name} {where}"


def short_hardware(hardware: str) -> str:
    """A class of hardware by its model alone."""
    words = " ".join(_NOISE.sub("", hardware).split()) or hardware
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"


def _svg(name: str, words: str, *, valid: bool) -> str:
    left, right = (round(LETTER * len(text) + 2 * ROOM) for text in (name, words))
    colour = "#0a6847" if valid else "#a3211a"
    label = escape(f"{name}: {words}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{label}">'
        f"<title>{label}</title>"
        f'<rect width="{left + right}" height="20" rx="3" fill="#12161f"/>'
        f'<path fill="{colour}" d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{left}z"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">{escape(name)}</text><text x="{left + right / 2}" y="14">{escape(words)}</text>'
        "</g></svg>"
    )
