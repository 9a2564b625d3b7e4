"""JSON that people write, in files and in requests, and its errors: which field is wrong, why, which values are valid.

pydantic places an error at ("stack", 0, "torch_compile", "mode"), where "torch_compile" is a member of a union. A
person wrote `stack.0.mode`. The walk along the JSON schema tells the two apart.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from optigpu.vocabulary import Document, SpecError

MOST_ERRORS = 20
LONGEST_MESSAGE = 1000
LARGEST_SHOWN = 2**256
"""Of a number: Python refuses to write one of thousands of digits."""
WHOLE = "body"
"""The field of an error that concerns the whole document."""
_QUOTED = re.compile(r"'([^']*)'")
_NAMED = re.compile(r"^([a-z_]+(?:\.\w+)*): (.+)$", re.DOTALL)

_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "an object"),
}
"""What a value should be, by the type of pydantic's error, which differs between JSON, Python and flags."""

_BOUNDS: Mapping[str, str] = {
    "greater_than_equal": "{value} is too small; the least is {ge}.",
    "greater_than": "{value} is too small; it must be more than {gt}.",
    "less_than_equal": "{value} is too large; the most is {le}.",
    "less_than": "{value} is too large; it must be less than {lt}.",
    "too_long": "It has too many items; the most is {max_length}.",
    "too_short": "It has too few items; the least is {min_length}.",
    "string_too_long": "It has too many characters; the most is {max_length}.",
    "string_too_short": "It has too few characters; the least is {min_length}.",
    "string_pattern_mismatch": "{value} does not fit the pattern {pattern}.",
}
"""What is wrong with a value of the right kind."""

Entry = dict[str, str | list[str]]
"""One wrong field: `field`, `message`, and `valid` where the valid names can be listed."""


class FieldsError(SpecError, ValueError):
    """A document has wrong fields: `entries` name each of them, and the text has a line for each."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__("\n".join(map(line, entries)))
        self.entries = tuple(entries)


def line(entry: Entry) -> str:
    """The field and its sentence; the sentence alone where it concerns the whole document."""
    message = str(entry["message"])
    return message if entry["field"] == WHOLE else f"{entry['field']}: {message}"


@contextmanager
def refusing(model: type[BaseModel]) -> Iterator[None]:
    """Raises FieldsError in place of pydantic's error about a document of that model."""
    try:
        yield
    except ValidationError as error:
        raise FieldsError(fields_of(model).describe(error.errors(include_url=False))) from None


@cache
def fields_of(model: type[BaseModel]) -> "Fields":
    """The fields of a model; its schema is made once."""
    return Fields(model)


class Fields:
    """The fields of one model, which locate its errors."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._names = tuple(model.model_fields)
        self._schema = model.model_json_schema()

    def describe(self, errors: Sequence[ErrorDetails]) -> list[Entry]:
        """At most MOST_ERRORS entries; a last one counts what is left out."""
        # A list is also called too short because an item of it is wrong, and a field has no default because another one
        # that it depends on is wrong. Both of these others have errors of their own.
        places = [error["loc"] for error in errors]
        told = [
            error
            for error in errors
            if error["type"] != "default_factory_not_called"
            and (
                error["type"] != "too_short"
                or not any(
                    place != error["loc"] and place[: len(error["loc"])] == error["loc"] for place in places
                )
            )
        ]
        return _capped([self._entry(error) for error in told[:MOST_ERRORS]], len(told))

    def named(self, message: str) -> Entry:
        """An entry from a sentence that begins with its field ("stack: ..."), as the spec's own errors do."""
        match = _NAMED.match(message)
        if match and match.group(1).split(".")[0] in self._names:
            return _entry(match.group(1).split("."), match.group(2))
        return _entry((), message)

    def _entry(self, error: ErrorDetails) -> Entry:
        path, node = self._walk(error["loc"])
        if error["type"] == "value_error" and not path:
            return self.named(_sentence(error))
        if error["type"] == "extra_forbidden":
            _, parent = self._walk(error["loc"][:-1])
            return unknown(path, "field", str(path[-1]), parent.get("properties", ()))
        if error["type"] == "union_tag_not_found":
            tag = node.get("discriminator", {})
            path = [*path, tag.get("propertyName", "")]
            return _entry(path, "This field is required.", sorted(tag.get("mapping", ())))
        return entry_of(path, error)

    def _walk(self, loc: Iterable[int | str]) -> tuple[list[int | str], Mapping[str, Any]]:
        """The location without the names of union members, and the schema at that location."""
        path: list[int | str] = []
        node: Mapping[str, Any] = self._schema
        for part in loc:
            mapping = node.get("discriminator", {}).get("mapping", {})
            if part in mapping:
                node = self._resolve({"$ref": mapping[part]})
                continue
            path.append(part)
            child = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
            node = self._resolve(child if isinstance(child, Mapping) else {})
        return path, node

    def _resolve(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        definitions: Mapping[str, Mapping[str, Any]] = self._schema.get("$defs", {})
        return definitions[node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node


def describe_parameters(errors: Sequence[ErrorDetails]) -> list[Entry]:
    """Entries for a path, query or header parameter; the first part of the location says which it was."""
    return _capped([entry_of(error["loc"][1:], error) for error in errors[:MOST_ERRORS]], len(errors))


def describe_settings(error: ValidationError, prefix: str) -> str:
    """A sentence for each environment variable that is wrong. It shows no values: one may be a secret."""
    errors = error.errors(include_url=False, include_input=False)
    return " ".join(line(entry_of([f"{prefix}{each['loc'][0]}".upper()], each)) for each in errors)


def entry_of(path: Sequence[int | str], error: ErrorDetails) -> Entry:
    """An entry for an error whose place is known; lists the valid names where pydantic knows them."""
    context = error.get("ctx", {})
    match error["type"]:
        case "union_tag_invalid":
            place = [*path, *_QUOTED.findall(context["discriminator"])]
            return unknown(place, "name", str(context["tag"]), _QUOTED.findall(context["expected_tags"]))
        case "literal_error" | "enum":
            valid = _QUOTED.findall(context["expected"])
            if isinstance(given := error.get("input"), str):
                return unknown(path, "value", given, valid)
            return _entry(path, f"{_shown(error)} is not one of them.", sorted(valid))
        case "missing":
            return _entry(path, "This field is required.")
        case _:
            return _entry(path, _sentence(error))


def unknown(path: Iterable[int | str], what: str, given: str, valid: Iterable[str]) -> Entry:
    """An entry for a name that is not among the valid ones; the names that are close to it come first."""
    names = sorted(valid)
    close = closest(given, names)
    message = f"Unknown {what} {_cut(given, LONGEST_NAME)!r}.{did_you_mean(close)}"
    return _entry(path, message, dict.fromkeys([*close, *names]))


def _entry(path: Iterable[int | str], message: str, valid: Iterable[str] = ()) -> Entry:
    names = list(valid)
    if names:
        message = f"{message} Valid: {', '.join(names)}."
    field = ".".join(_cut(str(part), LONGEST_NAME) for part in path) or WHOLE
    entry: Entry = {"field": field, "message": _cut(message, LONGEST_MESSAGE)}
    return entry | {"valid": names} if names else entry


def _sentence(error: ErrorDetails) -> str:
    """Ours where we have one, else pydantic's."""
    kind = error["type"]
    if kind in _KINDS:
        return f"{_shown(error)} is not {_KINDS[kind]}."
    if kind in _BOUNDS:
        bounds = {name: _neat(bound) for name, bound in error.get("ctx", {}).items()}
        return _BOUNDS[kind].format(value=_shown(error), **bounds)
    text = error["msg"].removeprefix("Value error, ")
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _shown(error: ErrorDetails) -> str:
    """The value that was given, as JSON would have it, where it is short and may be shown."""
    match error.get("input", ...):
        case None:
            return "null"
        case bool() as given:
            return str(given).lower()
        case str() as given:
            return repr(_cut(given, LONGEST_NAME))
        case float() as given:
            return str(_neat(given))
        case int() as given if abs(given) < LARGEST_SHOWN:
            return str(given)
        case Mapping():
            return "An object"
        case list() | tuple():
            return "A list"
        case _:
            return "The value"


def _neat(value: object) -> object:
    """2 for 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _capped(entries: list[Entry], count: int) -> list[Entry]:
    left_out = count - len(entries)
    more: Entry = {"field": WHOLE, "message": f"{left_out} more errors are not listed."}
    return [*entries, more] if left_out else entries


LONGEST_NAME = 80
MOST_CLOSE = 4
LEAST_ALIKE = 0.6
SHORT, SHORT_ALIKE = 3, 0.7
"""Two letters of three say little: who writes gpu does not mean cpu."""


def closest(given: str, names: Iterable[str]) -> list[str]:
    """The names that begin with the given one, contain it, or are spelled alike, in this order."""
    spelled = {name.casefold(): name for name in sorted(names)}
    wanted = given[:LONGEST_NAME].casefold()
    begun = [name for name in spelled if wanted and name.startswith(wanted)]
    containing = [name for name in spelled if len(wanted) >= SHORT and wanted in name]
    alike = get_close_matches(wanted, spelled, cutoff=LEAST_ALIKE if len(wanted) > SHORT else SHORT_ALIKE)
    found = dict.fromkeys([*sorted(begun, key=len), *sorted(containing, key=len), *alike])
    return [spelled[name] for name in found][:MOST_CLOSE]


def require_known(given: str, known: Collection[str], unknown: str, listed: str) -> None:
    """Raises SpecError for a name that is none of the known ones, with the close ones, and all behind `listed`."""
    if given not in known:
        raise SpecError(f"{unknown}.{did_you_mean(closest(given, known))} {listed} {', '.join(known)}.")


def did_you_mean(close: Sequence[str]) -> str:
    """A question that goes on a sentence, with a space before it; empty where nothing is close."""
    if not close:
        return ""
    *others, last = close
    return f" Did you mean {', '.join(others)} or {last}?" if others else f" Did you mean {last}?"


_NOT_READ = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}


def read_json(path: Path) -> object:
    """What the file holds. Raises SpecError, in one sentence, if it cannot be read or is not JSON."""
    content = read_bytes(path)
    try:
        return parse_json(content, str(path))
    except SpecError as error:
        form = _NOT_READ.get(path.suffix.lower())
        raise SpecError(f"{error} {form} is not read; write it as JSON." if form else str(error)) from None


def read_text(path: Path) -> str:
    """Raises SpecError, in one sentence, if the file cannot be read or is not UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 at byte {error.start}.") from None


def read_bytes(path: Path) -> bytes:
    """Raises SpecError, in one sentence, if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from error


def is_report(document: object) -> TypeGuard[Document]:
    """Whether a document has the parts of a report that are read again: a request, and results of any version."""
    if not isinstance(document, dict) or not isinstance(document.get("spec"), dict):
        return False
    results = document.get("results")
    parts = {"variant", "verdict", "metrics", "environment"}
    if not isinstance(results, list):
        return False
    return all(isinstance(each, dict) and parts <= set(each) for each in results)


def parse_json(content: bytes, what: str, *, strict: bool = True) -> object:
    """What the JSON says; `what` names it in an error. Raises SpecError also for text that is not UTF-8 or begins with
    a byte order mark, and, where it is `strict`, for NaN and a key that occurs twice."""

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number.")

    if content.startswith(codecs.BOM_UTF8):
        why = f"{what} begins with a byte order mark, which JSON does not have; save it as UTF-8 without one."
        raise SpecError(why)
    try:
        text = content.decode()
        if not strict:
            return json.loads(text)
        return json.loads(text, parse_constant=no_constant, object_pairs_hook=_no_key_twice)
    except UnicodeDecodeError as error:
        why = f"{what} is not UTF-8 at byte {error.start}."
    except json.JSONDecodeError as error:
        why = f"{what} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
    except RecursionError:
        why = f"{what} is nested too deeply."
    except ValueError as error:
        why = f"{what} is not JSON: {error}"
    raise SpecError(why)


def _no_key_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document: dict[str, object] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"the key {key[:LONGEST_NAME]!r} occurs twice.")
        document[key] = value
    return document
