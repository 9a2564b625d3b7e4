"""What a form sends as the JSON of a request, a request as what fills the form in, and the API's errors at fields."""

import json
from collections.abc import Iterable, Mapping, Sequence

from api.job_form.schema import Choice, Field, Group, Kind, Part, Schema, written
from optigpu.documents.fields import WHOLE, Entry
from optigpu.vocabulary import Document

Values = Mapping[str, Sequence[str]]
"""What a form sends: by each field's name its values."""
Errors = dict[str, list[str]]
"""Sentences by the field of the form that they stand at; those of no field under WHOLE."""
UNREADABLE = (ValueError, OverflowError)


def document_of(parts: Iterable[Part], values: Values) -> dict[str, object]:
    """The request, with what was filled in alone. What cannot be read as the field's type stays a text, so that the
    API says in its own words what is wrong with it."""
    found: dict[str, object] = {}
    for part in parts:
        value = _value_of(part, values)
        if value is not None:
            found[part.label] = value[0]
    return found


def values_of(parts: Iterable[Part], document: Document) -> dict[str, list[str]]:
    """What fills the form in as this request says; what has its default is left empty."""
    found: dict[str, list[str]] = {}
    for part in parts:
        if part.label in document:
            found |= _filled(part, document[part.label])
    return found


def errors_at(parts: Sequence[Part], document: Document, entries: Iterable[Entry]) -> Errors:
    """The API's errors, each at the field of the form that it is about, or else at the nearest part around it."""
    found: Errors = {}
    for entry in entries:
        words = str(entry["field"]).split(".")
        place = "" if words == [WHOLE] else _place(parts, document, words)
        found.setdefault(place or WHOLE, []).append(str(entry["message"]))
    return found


def _value_of(part: Part, values: Values) -> tuple[object] | None:
    """The part's value, or None if nothing was filled in."""
    if isinstance(part, Group):
        inside = document_of(part.parts, values)
        return (inside,) if inside else None
    if isinstance(part, Choice):
        return _chosen(part, values)
    texts = [text.replace("\r\n", "\n") for text in values.get(part.name, ()) if text.strip()]
    if not texts:
        return None
    return (_read(part, texts),)


def _chosen(choice: Choice, values: Values) -> tuple[object] | None:
    asked = list(dict.fromkeys(filter(None, values.get(choice.name, ()))))
    known = {member.tag: member for member in choice.members}
    found = [
        {choice.by: tag} | (document_of(known[tag].parts, values) if tag in known else {}) for tag in asked
    ]
    if not found:
        return None
    return (found,) if choice.many else (found[0],)


def _read(field: Field, texts: Sequence[str]) -> object:
    text = texts[0].strip() if field.kind is not Kind.LONG_TEXT else texts[0]
    if text == "null" and field.schema["nullable"]:
        return None
    if field.kind is Kind.DOCUMENT:
        return _scalar({"type": "document"}, text)
    if field.kind is Kind.LIST:
        each = [part.strip() for text in texts for part in text.replace("\n", ",").split(",")]
        return [_scalar(field.schema.get("items", {}), part) for part in each if part]
    return _scalar(field.schema, text)


def _scalar(schema: Schema, text: str) -> object:
    try:
        match schema.get("type"):
            case "boolean":
                return {"true": True, "false": False}.get(text, text)
            case "integer":
                return int(text)
            case "number":
                return _finite(float(text), text)
            case "document":
                return json.loads(text)
    except UNREADABLE:
        pass
    return text


def _finite(value: float, text: str) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if abs(value) < float("inf") else text


def _filled(part: Part, value: object) -> dict[str, list[str]]:
    if isinstance(part, Group):
        return values_of(part.parts, value) if isinstance(value, Mapping) else {}
    if isinstance(part, Choice):
        members = value if isinstance(value, (list, tuple)) else [value]
        return _filled_choice(part, [each for each in members if isinstance(each, Mapping)])
    if part.kind is Kind.DOCUMENT:
        return {part.name: [json.dumps(value, indent=2)]} if value else {}
    text = "null" if value is None and part.default else written(value)
    return {} if text == part.default else {part.name: [text]}


def _filled_choice(choice: Choice, chosen: Sequence[Document]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {choice.name: [str(each.get(choice.by)) for each in chosen]}
    for member in choice.members:
        for each in chosen:
            if each.get(choice.by) == member.tag:
                found |= values_of(member.parts, each)
    return found


def _place(parts: Sequence[Part], document: object, words: Sequence[str]) -> str:
    """The name of the part at a place of the request: `stack.0.mode` is `stack.torch_compile.mode`."""
    part = next((each for each in parts if words and each.label == words[0]), None)
    if part is None:
        return ""
    inside = document.get(part.label) if isinstance(document, Mapping) else None
    if isinstance(part, Group):
        return _place(part.parts, inside, words[1:]) or part.name
    if isinstance(part, Field):
        return part.name
    rest = words[1:]
    if part.many and rest and rest[0].isdecimal() and isinstance(inside, list):
        inside, rest = (inside[int(rest[0])] if int(rest[0]) < len(inside) else None), rest[1:]
    tag = inside.get(part.by) if isinstance(inside, Mapping) else None
    member = next((each for each in part.members if each.tag == tag), None)
    return (_place(member.parts, inside, rest) if member else "") or part.name
