"""Reads charts for pages as a browser would: their elements, where these lie, and what they may not hold."""

import re
from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

from optigpu.report.charts.svg.labels import Box
from optigpu.report.charts.svg.markup import SIZE, SMALL, text_width

SVG = "{http://www.w3.org/2000/svg}"
ALLOWED = {
    "svg", "title", "desc", "g", "a", "text", "tspan", "line", "rect", "path", "circle", "polygon", "polyline",
}  # fmt: skip
SMALL_IN = {"c-axis", "c-name", "c-key", "c-changes", "c-change", "c-places", "c-faint", "c-goal", "c-roof"}
"""Classes whose texts are small in charts.css."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
EDGE = 0.6
"""Coordinates are rounded to a tenth, and lines have a width."""


@dataclass(frozen=True)
class Words:
    """A text of a drawing, and the box that it covers at most."""

    text: str
    box: Box


def drawings(svg: str) -> list[ElementTree.Element]:
    """The drawings of a chart, which have to be well-formed and to hold what is allowed alone."""
    root = ElementTree.fromstring(svg)
    found = [root] if root.tag == f"{SVG}svg" else list(root)
    for each in found:
        assert {element.tag.removeprefix(SVG) for element in each.iter()} <= ALLOWED
        for element in each.iter():
            assert not [name for name in element.attrib if name == "style" or name.startswith("on")]
    assert "<script" not in svg
    assert not re.search(r"\bstyle=", re.sub(r">[^<]*<", "><", svg))
    return found


def assert_sound(svg: str, id_prefix: str) -> None:
    """The whole of what every chart promises."""
    pages = drawings(svg)
    ids = [element.get("id") for page in pages for element in page.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert all(str(each).startswith(id_prefix) for each in ids)
    for page in pages:
        assert page.get("role") == ("group" if page.find(f".//{SVG}a") is not None else "img")
        assert page.get("aria-labelledby") in ids
        assert (page.findtext(f"{SVG}title") or "").strip()
        assert_inside(page)
        assert_apart(words_of(page))


def size_of(page: ElementTree.Element) -> tuple[float, float]:
    left, top, width, height = map(float, page.get("viewBox", "").split())
    assert (left, top) == (0, 0)
    return width, height


def assert_inside(page: ElementTree.Element) -> None:
    width, height = size_of(page)
    for element in page.iter():
        for x, y in places(element):
            assert -EDGE <= x <= width + EDGE, ElementTree.tostring(element)
            assert -EDGE <= y <= height + EDGE, ElementTree.tostring(element)
    for each in words_of(page):
        assert each.box.left >= -EDGE, each
        assert each.box.right <= width + EDGE, (each, width)
        assert each.box.bottom <= height + EDGE, each


def assert_apart(words: list[Words]) -> None:
    for one, other in combinations(words, 2):
        assert not one.box.meets_any([other.box]), (one, other)


def places(element: ElementTree.Element) -> list[tuple[float, float]]:
    """The corners of an element."""
    found = element.attrib
    tag = element.tag.removeprefix(SVG)
    if tag in ("polyline", "polygon"):
        numbers = [float(each) for each in found["points"].replace(",", " ").split()]
        return list(zip(numbers[::2], numbers[1::2], strict=True))
    if tag == "path":
        return path_places(found["d"])
    at = {name: float(value) for name, value in found.items() if name in _COORDINATES}
    if tag == "rect":
        return [(at["x"], at["y"]), (at["x"] + at["width"], at["y"] + at["height"])]
    if tag == "circle":
        return [(at["cx"] - at["r"], at["cy"] - at["r"]), (at["cx"] + at["r"], at["cy"] + at["r"])]
    if tag == "line":
        return [(at["x1"], at["y1"]), (at["x2"], at["y2"])]
    return []


_COORDINATES = ("x", "y", "width", "height", "cx", "cy", "r", "x1", "y1", "x2", "y2")


def path_places(d: str) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    assert re.fullmatch(r"(?:[MLHV][-\d.,]+)*", d), d
    for command, rest in re.findall(r"([MLHV])([-\d.,]+)", d):
        numbers = [float(each) for each in NUMBER.findall(rest)]
        x, y = found[-1] if found else (0.0, 0.0)
        found.append({"H": (numbers[0], y), "V": (x, numbers[0])}.get(command) or (numbers[0], numbers[1]))
    return found


def words_of(page: ElementTree.Element) -> list[Words]:
    found: list[Words] = []
    _collect(page, frozenset(), None, found)
    return found


def _collect(
    element: ElementTree.Element, classes: frozenset[str], anchor: str | None, found: list[Words]
) -> None:
    classes = classes | set((element.get("class") or "").split())
    anchor = element.get("text-anchor", anchor)
    if element.tag == f"{SVG}text":
        shown = shown_by(element)
        found.append(Words(shown, _box(element, shown, SMALL if classes & SMALL_IN else SIZE, anchor)))
        return
    for each in element:
        _collect(each, classes, anchor, found)


def shown_by(element: ElementTree.Element) -> str:
    """The text of an element, without the titles that only a pointer shows."""
    parts = [element.text or ""]
    for each in element:
        parts += ["" if each.tag == f"{SVG}title" else each.text or "", each.tail or ""]
    return "".join(parts)


def said(svg: str) -> list[str]:
    """The texts of the wide drawing."""
    return [each.text for each in words_of(drawings(svg)[0])]


def _box(element: ElementTree.Element, shown: str, size: float, anchor: str | None) -> Box:
    width = text_width(shown.strip("\u2068\u2069"), size)
    x, y = float(element.attrib["x"]), float(element.attrib["y"])
    left = x - {"middle": width / 2, "end": width}.get(anchor or "", 0.0)
    return Box(left, y - 0.75 * size, left + width, y + 0.2 * size)


def contrast(one: str, other: str) -> float:
    """How often the lighter of two sRGB colours ("#rrggbb") is as bright as the darker, 1 to 21 (WCAG 2.2)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
