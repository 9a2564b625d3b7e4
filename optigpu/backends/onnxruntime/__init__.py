"""The onnxruntime backend: ONNX graphs in ONNX Runtime's CPU provider, text as well as images.

Without a technique a variant is the baseline: weights, keys and values in float32, the graph rewritten as far as the
engine can. What a written model holds, its numbers, and which families are written stand here: only `start` and
`prepare` import ONNX Runtime.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from optigpu.backends.engine import EngineBackend
from optigpu.documents.facts import Footprint, ImageFootprint
from optigpu.models.families import FAMILIES, AttentionParts, Decoder, Mlp, family_of
from optigpu.techniques.base import Technique, engine_options
from optigpu.vocabulary import Frozen, UnsupportedError


class OnnxRuntimeBackend(EngineBackend):
    """Decodes and classifies on a CPU."""

    name = "onnxruntime"
    summary = "decoders and image classifiers as ONNX graphs in ONNX Runtime, on a CPU"
    packages = ("onnxruntime", "onnx")
    install = 'pip install -e ".[onnxruntime]"'
    workloads = ("generate", "prefill", "quality", "classify")


_BITS = {"float32": 32, "int8": 8, "int4": 4}
_ACCURACY = {"float": 1, "int8": 4}


@dataclass(frozen=True)
class Format:
    """`group` inputs of an output share a scale; `accuracy_level` is MatMulNBits' word for what it multiplies.

    Both are 0 in float32.
    """

    bits: int
    group: int = 0
    accuracy_level: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """The format of that name."""
        return cls(*map(int, text.split("-")))

    @property
    def name(self) -> str:
        """Such as "4-32-4"; part of a kept model's name."""
        return f"{self.bits}-{self.group}-{self.accuracy_level}"

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """What is multiplied besides floats: activations are rounded to int8 at accuracy level 4."""
        return ("int8",) if self.accuracy_level == _ACCURACY["int8"] else ()


def format_of(stack: tuple[Technique, ...]) -> Format:
    """What a stack asks for; float32 without a technique that says otherwise.

    Raises UnsupportedError for numbers that MatMulNBits does not store.
    """
    options = engine_options(stack)
    bits = _BITS.get(options.weights)
    if bits is None:
        raise UnsupportedError(
            f"onnxruntime does not support weights of the type {options.weights}; choose one of {', '.join(_BITS)}."
        )
    if bits == 32:
        return Format(bits)
    return Format(bits, options.group, _ACCURACY[options.products or "int8"])


def graph_level_of(stack: tuple[Technique, ...]) -> str:
    """How far a session rewrites the graph; ONNX Runtime's own default is all."""
    return engine_options(stack).graph or "all"


@dataclass(frozen=True)
class Parts:
    """As ModelFamily, of a family whose parts are all known; `activation` is a name in the configuration."""

    decoder: Decoder
    attention: AttentionParts
    mlp: Mlp
    conv1d: bool
    activation: str


def parts_of(name: str) -> Parts:
    """The parts of a model_type. Raises UnsupportedError for one whose blocks are not all known."""
    family = family_of(name)
    if family.decoder and family.attention and family.mlp:
        return Parts(family.decoder, family.attention, family.mlp, family.conv1d, family.keys.activation)
    written = ", ".join(
        name for name, each in FAMILIES.items() if each.decoder and each.attention and each.mlp
    )
    raise UnsupportedError(
        f"{name} models cannot be written as ONNX graphs here, only {written}; ask for the backend torch."
    )


MODEL, DATA, CONTENTS = "model.onnx", "model.data", "contents.json"


class Contents(Frozen):
    """`parameters` are the model's weights before they were written, `bytes` those of the constants that were.

    `packed` counts the constants' numbers of 8 bits and fewer, with those that fill a row's last group. `tensor_types`
    counts the constants by their type, `files` has the size of each file.
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
        if {name: (folder / name).stat().st_size for name in contents.files} != contents.files:
            raise ValueError("its files have other sizes than when they were written")
        return contents


def file_sizes(folder: Path) -> dict[str, int]:
    """By name."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
