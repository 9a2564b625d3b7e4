"""Text of a chart: how wide it is, what is cut from it, and what of it may stand in a page."""

import re
import unicodedata
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
_ISOLATE, _END = "\u2068", "\u2069"
_HELD_TO_THE_ONE_BEFORE = ("Mn", "Me", "Cf", "Sk")


def text_width(text: str, size: float = SIZE) -> float:
    """An upper estimate for sans-serif letters (DejaVu Sans, one of the widest)."""
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
    return f"{_ISOLATE}{found}{_END}" if _turns(found) else found


def _turns(text: str) -> bool:
    return not text.isascii() and any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in text)
