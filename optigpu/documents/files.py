"""JSON documents that people write, in files and in requests."""

import codecs
import json
from pathlib import Path
from typing import NoReturn, TypeGuard

from optigpu.documents.fields import LONGEST_NAME
from optigpu.vocabulary import Document, SpecError

_NOT_READ = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}


def read_json(path: Path) -> object:
    """What the file holds. Raises SpecError, in one sentence, if it cannot be read or is not JSON."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        return parse_json(content, str(path))
    except SpecError as error:
        form = _NOT_READ.get(path.suffix.lower())
        raise SpecError(f"{error} {form} is not read; write it as JSON." if form else str(error)) from None


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
