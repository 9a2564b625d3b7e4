"""A request's schema as fields, groups and choices, what a form sends as the JSON of a request, a request as what fills
the form in, and the API's errors at fields.

A field's name is its place in the request, with the member of a choice between: `workload.generate.batch_size`,
`stack.torch_compile.mode`. So the fields of all members can be on one form, and only those of the chosen ones count.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from optigpu.documents.fields import WHOLE, Entry
from optigpu.job.spec import JobSpec
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Document
from optigpu.workloads import WORKLOADS

Schema = Document
"""A JSON schema, or a part of one."""


class Kind(StrEnum):
    """How a field is filled in."""

    TEXT = "text"
    LONG_TEXT = "long_text"
    NUMBER = "number"
    CHOICE = "choice"
    LIST = "list"
    DOCUMENT = "document"
    """A part of the request that is written as JSON."""


LONG_TEXT_FROM = 1000
"""Of the longest text that a field takes."""


@dataclass(frozen=True)
class Field:
    """One value. `default` is what it is where the field is left empty, as a person writes it; null: it is required."""

    name: str
    label: str
    help: str
    kind: Kind
    schema: Schema
    default: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """An object within the request."""

    name: str
    label: str
    help: str
    parts: tuple["Part", ...]


@dataclass(frozen=True)
class Member:
    """One that can be chosen: a workload, a technique. `section` is under what it is listed."""

    name: str
    tag: str
    help: str
    section: str
    parts: tuple["Part", ...]


@dataclass(frozen=True)
class Choice:
    """One of several members, or as many of them as one likes. `by` is the field that names the member."""

    name: str
    label: str
    help: str
    by: str
    many: bool
    members: tuple[Member, ...]

    def sections(self) -> dict[str, list[Member]]:
        """The members by what they are listed under, in their order."""
        found: dict[str, list[Member]] = {}
        for member in self.members:
            found.setdefault(member.section, []).append(member)
        return found


Part = Field | Group | Choice


@cache
def job_form() -> tuple[Part, ...]:
    """The form of today's request."""
    return parts_of(JobSpec.model_json_schema())


def parts_of(schema: Schema) -> tuple[Part, ...]:
    """The parts of a request with that schema."""
    return tuple(_Reader(schema).parts(schema, ""))


def fields(parts: tuple[Part, ...]) -> Iterator[Field | Choice]:
    """Every field, of all members too, and every choice."""
    for part in parts:
        if not isinstance(part, Group):
            yield part
        if isinstance(part, Group):
            yield from fields(part.parts)
        if isinstance(part, Choice):
            for member in part.members:
                yield from fields(member.parts)


def written(value: object) -> str:
    """A value as a person writes it into a field."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: ""}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(written, value))
    return str(value).removesuffix(".0")


class _Reader:
    def __init__(self, schema: Schema) -> None:
        self._definitions: Schema = schema.get("$defs", {})

    def parts(self, schema: Schema, place: str, leaving_out: str = "") -> Iterator[Part]:
        for label, node in schema.get("properties", {}).items():
            if label != leaving_out:
                yield self._part(node, f"{place}.{label}" if place else label, label)

    def _part(self, node: Schema, name: str, label: str) -> Part:
        found = self._resolved(node)
        items = self._resolved(found.get("items", {}))
        help_ = node.get("description", "")
        if "discriminator" in found:
            return self._choice(found, name, label, help_, many=False)
        if "discriminator" in items:
            return self._choice(items, name, label, help_, many=True)
        if found.get("type") == "object" and "properties" in found:
            words = help_ or _first_sentence(found.get("description", ""))
            return Group(name, label, words, tuple(self.parts(found, name)))
        return self._field(node, found, name, label)

    def _choice(self, node: Schema, name: str, label: str, help_: str, *, many: bool) -> Choice:
        discriminator = node["discriminator"]
        by = discriminator["propertyName"]
        members = []
        for place in (each["$ref"] for each in node["oneOf"]):
            tag = next(tag for tag, target in discriminator["mapping"].items() if target == place)
            found = self._resolved({"$ref": place})
            summary, section = _about(by, tag, found)
            parts = tuple(self.parts(found, f"{name}.{tag}", leaving_out=by))
            members.append(Member(f"{name}.{tag}", tag, summary, section, parts))
        return Choice(name, label, help_, by, many, tuple(members))

    def _field(self, node: Schema, found: Schema, name: str, label: str) -> Field:
        options = [self._resolved(each) for each in found.get("anyOf", [found])]
        value = next((each for each in options if each.get("type") != "null"), {})
        kind, choices = self._kind(value)
        default = node.get("default")
        if kind is Kind.DOCUMENT:
            default = None
        merged = {**value, "nullable": len(options) > 1}
        return Field(name, label, node.get("description", ""), kind, merged, written(default), choices)

    def _kind(self, value: Schema) -> tuple[Kind, tuple[str, ...]]:
        if "enum" in value:
            return Kind.CHOICE, tuple(map(written, value["enum"]))
        match value.get("type"):
            case "boolean":
                return Kind.CHOICE, ("true", "false")
            case "integer" | "number":
                return Kind.NUMBER, ()
            case "string":
                long = value.get("maxLength", 0) >= LONG_TEXT_FROM
                return (Kind.LONG_TEXT if long else Kind.TEXT), ()
            case "array" if self._resolved(value.get("items", {})).get("type") != "object":
                return Kind.LIST, tuple(map(written, value["items"].get("enum", ())))
            case _:
                return Kind.DOCUMENT, ()

    def _resolved(self, node: Schema) -> Schema:
        reference = node.get("$ref")
        found: Schema = self._definitions[reference.rsplit("/", 1)[1]] if reference else node
        return found


def _about(by: str, tag: str, schema: Schema) -> tuple[str, str]:
    """What a member does, and under what it is listed; workloads are named by `kind`, techniques by `name`."""
    if by == "name" and tag in TECHNIQUES:
        return TECHNIQUES[tag].summary, TECHNIQUES[tag].layer.value
    if by == "kind" and tag in WORKLOADS:
        return WORKLOADS[tag].summary, ""
    return _first_sentence(schema.get("description", "")), ""


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


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
