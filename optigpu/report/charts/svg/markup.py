"""Elements of SVG as text. Styles are classes of charts.css: no element has a style or a script."""

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

SIZE = 12.0
"""Of the letters, in units of the drawing."""
SMALL = 11.0
TAIL = 0.5
"""The share of a name's room that its end gets, where it is cut."""
_NARROW, _WIDE = frozenset("ijlIt.,:;'|!()[]{}`/\\ "), frozenset("mwMW@%&—…±")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_DIRECTIONS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
KEPT = 4096
"""Letters whose widths are kept, and texts that are kept as they stand in pages: charts repeat them."""
_HELD_TO_THE_ONE_BEFORE = ("Mn", "Me", "Cf", "Sk")


def text_width(text: str, size: float = SIZE) -> float:
    """An upper estimate for sans-serif letters: DejaVu Sans, one of the widest; files are drawn in Inter."""
    return size * sum(map(_share, text))


@lru_cache(KEPT)
def _share(letter: str) -> float:
    """The width of a letter over its height."""
    if letter in _NARROW:
        return 0.38
    if letter in _WIDE:
        return 1.0
    if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF" or ord(letter) > 0xFFFF:
        return 1.3
    return 0.74 if letter.isupper() else 0.64


def shortened(text: str, width: float, size: float = SIZE, *, tail: float = 0.0) -> str:
    """The text on one line, cut with an ellipsis where it is wider. `tail` is the share of the width that its end gets:
    of names that begin alike, the end tells them apart."""
    line = clean(text)
    if len(line) <= width and text_width(line, size) <= width:
        return line
    room = max(0.0, width - text_width("…", size))
    end = _begin(line[::-1][: int(width)], tail * room, size)[::-1] if tail else ""
    while end and _is_bound(end[0], line[len(line) - len(end) - 1]):
        end = end[1:]
    begin = _begin(line, room - text_width(end, size), size)
    while begin and _is_bound(line[len(begin)], begin[-1]):
        begin = begin[:-1]
    return f"{begin.rstrip()}…{end.lstrip()}"


def _begin(line: str, room: float, size: float) -> str:
    """As many letters as there is room for."""
    for kept, letter in enumerate(line):
        room -= size * _share(letter)
        if room < 0:
            return line[:kept]
    return line


def _is_bound(letter: str, before: str) -> bool:
    """Whether a letter may not be cut from the one before: an accent, or the next part of an emoji."""
    return unicodedata.category(letter) in _HELD_TO_THE_ONE_BEFORE or before == "\u200d"


def wrapped(text: str, width: float, lines: int, size: float = SIZE, *, tail: float = 0.0) -> list[str]:
    """The text in at most so many lines, broken between words; the last is shortened where more is left."""
    words, found = clean(text).split(" "), [""]
    while words and len(found) <= lines:
        longer = f"{found[-1]} {words[0]}".strip()
        if text_width(longer, size) <= width:
            found[-1] = longer
            words.pop(0)
        elif len(found) < lines and found[-1]:
            found.append("")
        else:
            break
    if words:
        found[-1] = shortened(" ".join([found[-1], *words]).strip(), width, size, tail=tail)
    return found


def clean(text: str) -> str:
    """One line without what XML cannot hold and without marks of direction."""
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    return " ".join(_DIRECTIONS.sub("", _NOT_XML.sub("\ufffd", text.replace("\t", " "))).split())


@lru_cache(KEPT)
def escaped(text: str) -> str:
    """Text as content or as a quoted attribute of a page. Text from right to left is isolated, so that it turns nothing
    around it."""
    found = clean(text).translate(_ENTITIES)
    turns = not found.isascii() and any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in found)
    return f"\u2068{found}\u2069" if turns else found


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
    The style sheet sets the size by class; `size` is what `width` is counted in."""
    shown = words if width is None else shortened(words, width, size)
    more = title(words) if shown.endswith("…") and shown != words else ""
    lighter = (" ", element("tspan", escaped(rest), class_="c-rest")) if rest else ()
    return element("text", more, escaped(shown), *lighter, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str | None = None) -> Svg:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str | None = None) -> Svg:
    return element("rect", x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str) -> Svg:
    places = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return element("polyline", points=places, class_=class_)


def linked(link: Link | None, source: str | None, label: str | None, *children: str) -> Svg:
    """The children as a link to the page of their result, where there is one. `label` names it where no text does."""
    address = link(source) if link and source else None
    if address is None:
        return Svg("".join(children))
    return element("a", *children, href=address, aria_label=label)


@dataclass(frozen=True)
class Frame:
    """How wide a drawing is laid out, in units that are about pixels. `alone` is one in a file, which has no table
    beside it and shows nothing more under a pointer: it leaves nothing out."""

    name: str
    width: float
    alone: bool = False

    @property
    def is_narrow(self) -> bool:
        return self.width < 500


@dataclass(frozen=True)
class Drawing:
    """What is drawn in one frame, and how high it is."""

    height: float
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Sketch:
    """A chart before its layout. `description` says in words what it shows."""

    heading: str
    description: str
    draw: Callable[[Frame], Drawing]
