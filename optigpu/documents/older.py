"""Reads stored results of older schema versions by the current field names.

Stored documents are never changed; code that reads a field uses this module.
"""

from collections.abc import Mapping
from typing import Any

from optigpu.documents.facts import RunFacts
from optigpu.vocabulary import SCHEMA_VERSION

Document = Mapping[str, Any]

_WEIGHT_REASONS = {"model_revision": "revision", "weight_hash": "hash"}
"""What version 1 called the fields of `weights` in their reasons."""


def current(result: Document) -> dict[str, Any]:
    """Returns a stored result as a document of the current schema version. It is not validated: its version had other
    rules."""
    if result.get("schema_version", 1) >= SCHEMA_VERSION:
        return dict(result)
    others = {name: value for name, value in result.items() if name != "details"}
    facts = _facts(result.get("details") or {})
    return others | {"schema_version": SCHEMA_VERSION, "facts": facts}


def facts_of(result: Document) -> dict[str, Any]:
    """The facts of a stored result, by the names of RunFacts. Empty where the result has none."""
    found: dict[str, Any] = current(result).get("facts") or {}
    return found


def _facts(details: Document) -> dict[str, Any]:
    """Version 1 kept everything in one dictionary, and a library's version under the library's name."""
    known = {name: value for name, value in details.items() if name in RunFacts.model_fields}
    recorded = {name: value for name, value in details.items() if name not in known}
    if "transformers" in recorded:
        known["versions"] = {"transformers": recorded.pop("transformers")}
    if known.get("weights"):
        known["weights"] = _weights(known["weights"])
    return known | {"recorded": recorded}


def _weights(weights: Document) -> dict[str, Any]:
    reasons = {_WEIGHT_REASONS.get(name, name): why for name, why in weights.get("reasons", {}).items()}
    return dict(weights) | {"reasons": reasons}
