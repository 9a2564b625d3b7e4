"""What lies in the folder of a written model, and what is known of it. Imports no ONNX Runtime."""

from pathlib import Path
from typing import Self

from optigpu.documents.shapes import Footprint, ImageFootprint
from optigpu.vocabulary import Frozen

MODEL, DATA, CONTENTS = "model.onnx", "model.data", "contents.json"


class Contents(Frozen):
    """`parameters` are the model's weights before they were written, `bytes` those of the constants that were.

    `packed` counts the constants' numbers of 8 bits and fewer, with those that fill a row's last group.

    `tensor_types` counts the constants by their type, `files` has the size of each file.
    """

    footprint: Footprint | ImageFootprint
    parameters: int
    packed: int
    bytes: int
    tensor_types: dict[str, int]
    files: dict[str, int]

    def write(self, folder: Path) -> None:
        """As the last file of the folder."""
        (folder / CONTENTS).write_text(self.model_dump_json(), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises OSError or ValueError for a folder whose files are not what was written."""
        contents = cls.model_validate_json((folder / CONTENTS).read_text("utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in contents.files}
        if sizes != contents.files:
            raise ValueError("its files have other sizes than when they were written")
        return contents


def file_sizes(folder: Path) -> dict[str, int]:
    """By name."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
