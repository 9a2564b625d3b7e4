"""Elements of SVG as text. Styles are classes of api/static/charts.css: no element has a style or a script."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from optigpu.report.charts.svg.words import SIZE, escaped, shortened

Link = Callable[[str], str | None]
"""The address of a page about a result, from its id; None where there is none."""


class Svg(str):
    """Markup that is safe in a page as it is. Templates do not escape it, because it says so by `__html__`."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def number(value: float) -> str:
    """A coordinate with a tenth of a unit."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def element(name: str, *children: str, **attributes: str | float | None) -> Svg:
    """Children are markup. An attribute that is None is left out; `class_` is `class`, and `_` stands for `-`."""
    written = "".join(
        f' {_attribute(key)}="{escaped(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(children)
    return Svg(f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>")


@lru_cache
def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def group(class_: str | None, *children: str, hidden: bool = False) -> Svg:
    return element("g", *children, class_=class_, aria_hidden="true" if hidden else None)


def title(text: str) -> Svg:
    """What a pointer shows and a screen reader says of an element."""
    return element("title", escaped(text))


def text(
    x: float,
    y: float,
    words: str,
    *,
    class_: str | None = None,
    anchor: str | None = None,
    width: float | None = None,
    size: float = SIZE,
    rest: str = "",
) -> Svg:
    """A line of text, cut to `width`; its whole words are then what a pointer shows. `rest` follows in a lighter face.

    The style sheet sets the size by class; `size` is what `width` is counted in.
    """
    shown = words if width is None else shortened(words, width, size)
    more = title(words) if shown.endswith("…") and shown != words else ""
    lighter = element("tspan", " ", escaped(rest), class_="c-rest") if rest else ""
    return element("text", more, escaped(shown), lighter, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str | None = None) -> Svg:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str | None = None) -> Svg:
    return element("rect", x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str, *, closed: bool = False) -> Svg:
    places = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return element("polygon" if closed else "polyline", points=places, class_=class_)


def linked(link: Link | None, source: str | None, label: str | None, *children: str) -> Svg:
    """The children as a link to the page of their result, where there is one. `label` names it where no text does."""
    address = link(source) if link and source else None
    if address is None:
        return Svg("".join(children))
    return element("a", *children, href=address, aria_label=label)


@dataclass(frozen=True)
class Frame:
    """How wide a drawing is laid out, in units that are about pixels."""

    name: str
    width: float

    @property
    def is_narrow(self) -> bool:
        return self.width < 500


WIDE, NARROW = Frame("wide", 720.0), Frame("narrow", 340.0)


@dataclass(frozen=True)
class Drawing:
    """What is drawn in one frame, and how high it is."""

    height: float
    parts: tuple[str, ...]

    @property
    def has_links(self) -> bool:
        return any("<a " in part for part in self.parts)


Draw = Callable[[Frame], Drawing]


def chart(draw: Draw, *, heading: str, description: str, id_prefix: str) -> Svg:
    """The drawing laid out twice, for a wide and for a narrow place; the style sheet shows the one that fits."""
    drawings = (_framed(draw(frame), frame, heading, description, id_prefix) for frame in (WIDE, NARROW))
    return element("div", *drawings, class_="c-chart")


def _framed(drawn: Drawing, frame: Frame, heading: str, description: str, id_prefix: str) -> Svg:
    """A drawing with links is a group, since what is inside an image cannot be reached by keyboard."""
    heading_id, description_id = (f"{id_prefix}-{frame.name}-{part}" for part in ("title", "desc"))
    return element(
        "svg",
        element("title", escaped(heading) or "Chart", id=heading_id),
        element("desc", escaped(description), id=description_id),
        *drawn.parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(frame.width)} {number(drawn.height)}",
        class_=f"c-{frame.name}",
        role="group" if drawn.has_links else "img",
        aria_labelledby=heading_id,
        aria_describedby=description_id,
        font_size=SIZE,
    )


def sentence(words: str) -> Svg:
    """What stands in the place of a chart that has nothing to show."""
    return element("p", escaped(words), class_="c-empty")
