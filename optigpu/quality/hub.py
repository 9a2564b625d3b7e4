"""Datasets from the hub, for workers without a datasets folder. Needs the package `datasets`."""

import bz2
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from optigpu.hub_organisations import hub_refusal
from optigpu.vocabulary import Document, OptiGPUError

_REPOSITORIES: dict[str, tuple[str, str | None, str]] = {
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-v1", "test"),
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
}
"""Repository, configuration and split."""


def read_hub(text: str, file: str) -> tuple[str, bytes]:
    """The origin of a dataset, and its rows in the format of `file`.

    Raises OptiGPUError when the package `datasets` is missing, its organisation is not allowed, or the hub does not
    answer.
    """
    name, configuration, split = _REPOSITORIES[text]
    if refusal := hub_refusal(name):
        raise OptiGPUError(f"{refusal} Or set OPTIGPU_DATASETS_DIR to a folder that holds {file}.")
    if importlib.util.find_spec("datasets") is None:
        raise OptiGPUError(
            f"The dataset {text} was not found: set OPTIGPU_DATASETS_DIR to a folder that holds {file}, or install "
            "the package datasets to read it from the hub."
        )
    try:
        rows: Any = importlib.import_module("datasets").load_dataset(name, configuration, split=split)
    except Exception as error:  # any error of a download
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OptiGPUError(
            f"{text} cannot be read from the hub ({why}); set OPTIGPU_DATASETS_DIR to a folder that holds {file}."
        ) from error
    return f"hub:{name}", wikitext_file(rows) if text == "wikitext-2" else hellaswag_file(rows)


def wikitext_file(rows: Iterable[Document]) -> bytes:
    """The rows of Salesforce/wikitext as one text."""
    return "".join(row["text"] for row in rows).encode()


def hellaswag_file(rows: Iterable[Document]) -> bytes:
    """The rows of Rowan/hellaswag in the format that `optigpu.quality.hellaswag` reads."""
    lines: list[str] = []
    for row in rows:
        lines += [f"{row['activity_label']}: {row['ctx']}", str(row["label"]), *row["endings"]]
    return bz2.compress("\n".join(" ".join(line.split()) for line in lines).encode())
