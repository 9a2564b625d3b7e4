"""Writes what the presets and bundled models are made of: `python -m tools.describe_models`."""

from optigpu.models.described import PACKAGED
from optigpu.models.loading.describing import description
from optigpu.models.loading.load import config_of
from optigpu.models.reference import BUNDLED, PRESETS, parse_reference
from optigpu.vocabulary import canonical_json


def packaged_text() -> str:
    """A line for each model."""
    names = (*(f"preset:{name}" for name in PRESETS), *(f"bundled:{name}" for name in BUNDLED))
    lines = (f'"{name}":{canonical_json(_of(name))}' for name in names)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _of(name: str) -> object:
    return description(config_of(parse_reference(name))).model_dump(mode="json")


if __name__ == "__main__":
    PACKAGED.write_text(packaged_text(), "utf-8")
