"""Turns pydantic's errors into entries for people: which field is wrong, why, and which values are valid.

pydantic places an error at ("stack", 0, "torch_compile", "mode"), where "torch_compile" says which member of a union
it tried. A person wrote `stack.0.mode`. The walk along the JSON schema tells the two apart.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

MOST_ERRORS = 20
LONGEST_MESSAGE = 500
LONGEST_NAME = 80
MOST_CLOSE = 3
_QUOTED = re.compile(r"'([^']*)'")
_NAMED = re.compile(r"^([a-z_]+(?:\.\w+)*): (.+)$", re.DOTALL)

Entry = dict[str, str | list[str]]
"""One wrong field: `field`, `message`, and `valid` where the valid names can be listed."""


class Fields:
    """The fields of one model, which locate its errors."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._names = tuple(model.model_fields)
        self._schema = model.model_json_schema()

    def describe(self, errors: Sequence[ErrorDetails]) -> list[Entry]:
        """At most MOST_ERRORS entries; a last one counts what is left out."""
        return _capped([self._entry(error) for error in errors[:MOST_ERRORS]], len(errors))

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
            path = [*path, node.get("discriminator", {}).get("propertyName", "")]
            return _entry(
                path, "This field is required.", sorted(node.get("discriminator", {}).get("mapping", ()))
            )
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
            node = self._resolve(_child(node, part))
        return path, node

    def _resolve(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        reference = node.get("$ref")
        definition: Mapping[str, Any] = (
            self._schema["$defs"][reference.rsplit("/", 1)[1]] if reference else node
        )
        return definition


def _child(node: Mapping[str, Any], part: int | str) -> Mapping[str, Any]:
    child = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
    return child if isinstance(child, Mapping) else {}


def describe_parameters(errors: Sequence[ErrorDetails]) -> list[Entry]:
    """Entries for a path, query or header parameter; the first part of the location says which it was."""
    return _capped([entry_of(error["loc"][1:], error) for error in errors[:MOST_ERRORS]], len(errors))


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
            return _entry(path, "Unknown value.", sorted(valid))
        case "missing":
            return _entry(path, "This field is required.")
        case _:
            return _entry(path, _sentence(error))


def unknown(path: Iterable[int | str], what: str, given: str, valid: Iterable[str]) -> Entry:
    """An entry for a name that is not among the valid ones; the names that are close to it come first."""
    names = sorted(valid)
    close = _close(given, names)
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    shown = _cut(given, LONGEST_NAME)
    return _entry(
        path, f"Unknown {what} {shown!r}.{meant}", [*close, *(name for name in names if name not in close)]
    )


def _close(given: str, names: Sequence[str]) -> list[str]:
    """The names that contain the given one or are spelled alike, the closest first."""
    spelled = {name.casefold(): name for name in names}
    wanted = given[:LONGEST_NAME].casefold()
    containing = sorted((name for name in spelled if wanted and wanted in name), key=len)
    alike = get_close_matches(wanted, spelled, MOST_CLOSE)
    return [spelled[name] for name in dict.fromkeys([*containing, *alike])][:MOST_CLOSE]


def _entry(path: Iterable[int | str], message: str, valid: Iterable[str] = ()) -> Entry:
    names = list(valid)
    if names:
        message = f"{message} Valid: {', '.join(names)}."
    field = ".".join(_cut(str(part), LONGEST_NAME) for part in path) or "body"
    entry: Entry = {"field": field, "message": _cut(message, LONGEST_MESSAGE)}
    return entry | {"valid": names} if names else entry


def _sentence(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _capped(entries: list[Entry], count: int) -> list[Entry]:
    left_out = count - len(entries)
    return (
        [*entries, {"field": "body", "message": f"{left_out} more errors are not listed."}]
        if left_out
        else entries
    )
