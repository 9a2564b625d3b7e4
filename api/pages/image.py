"""`/results/{id}/image.png`: a result as the picture that shows where its address is shared (Open Graph)."""

from fastapi import APIRouter, Response

from api.auth import Reader
from api.inputs import Id
from api.pages.badge import badge_words
from api.pages.result import primary_of
from api.rendering import metric_heading, variant_line
from api.service import ServiceDep
from optigpu.documents.older import current
from optigpu.report.charts.svg.markup import element, shortened, text, text_width
from optigpu.report.charts.svg.picture import FAMILY, png
from optigpu.store import leaderboard, results
from optigpu.vocabulary import Document

router = APIRouter()
WIDTH, HEIGHT = 1200, 630
LEFT, ROOM = 80.0, 1040.0
KEPT_S = 300
INK, SOFT, GROUND, FILL, GOOD, BAD = "#e7eaf0", "#a4adbc", "#0e1117", "#4b94dd", "#6bd3a8", "#ff9c92"


@router.get("/results/{id}/image.png")
def read_image(service: ServiceDep, _: Reader, result_id: Id) -> Response:
    """The SVG as PNG: who shows shared addresses shows no SVG."""
    with service.database.read() as session:
        document = current(results.get(session, result_id))
        baseline = leaderboard.baseline_of(session, result_id)
    words = badge_words(document, None if baseline is None else baseline.value)
    picture = png(_svg(document, words))
    return Response(picture, media_type="image/png", headers={"Cache-Control": f"public, max-age={KEPT_S}"})


def _svg(document: Document, words: str) -> str:
    primary = primary_of(document)
    valid = document["verdict"]["valid"]
    unit = metric_heading(document["variant"]["primary_metric"])
    return element(
        "svg",
        element("rect", width=WIDTH, height=HEIGHT, fill=GROUND),
        _line("OptiGPU", 90, 30, SOFT),
        _line(document["variant"]["label"], 190, _size_of(document["variant"]["label"]), INK, bold=True),
        _line(variant_line(document["variant"]), 250, 30, SOFT),
        _line(f"{primary.figure.text} {primary.figure.spread} {unit}", 390, 84, INK, bold=True),
        *_interval(primary.summary),
        _line(words if valid else "not valid: it is not ranked", 530, 40, GOOD if valid else BAD, bold=True),
        _line(document["environment"]["hardware_class"], 580, 26, SOFT),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
        font_family=FAMILY,
    )


def _line(words: str, y: float, size: float, colour: str, *, bold: bool = False) -> str:
    shown = shortened(words, ROOM, size * 1.08 if bold else size)
    inner = text(LEFT, y, shown)
    return element("g", inner, fill=colour, font_size=size, font_weight="bold" if bold else None)


def _size_of(label: str) -> float:
    """Smaller letters for a long name."""
    return next((size for size in (54.0, 44.0) if text_width(label, 1.08 * size) <= ROOM), 34.0)


def _interval(summary: Document) -> list[str]:
    """A bar from 0 with its whiskers; nothing without a figure."""
    value, ci = summary.get("value"), summary.get("ci")
    if not value or value < 0:
        return []
    most = max(ci[1] if ci else value, value)
    bar = element("rect", x=LEFT, y=430, width=ROOM * value / most, height=20, fill=FILL)
    if not ci:
        return [bar]
    low, high = (LEFT + ROOM * max(0.0, bound) / most for bound in ci)
    path = f"M{low:.1f} 440H{high:.1f}M{low:.1f} 424V456M{high:.1f} 424V456"
    return [bar, element("path", d=path, stroke=INK, stroke_width=4, fill="none")]
