"""What a model is, known without loading it or torch: its facts, and the tensors of a decoder with their bytes.

A preset and a bundled one are known by what the package holds of them, and the model of a folder or of the hub's cache
by its config.json: transformers builds it without numbers, in a process of its own, so that nothing else loads torch;
what it found is kept in the cache folder.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from optigpu.documents.facts import ImageFacts, ModelFacts
from optigpu.models import families
from optigpu.models.families import Passes, family_of
from optigpu.models.held import CONFIGURATION, gguf_file, model_directory, read_configuration, weight_files
from optigpu.models.reference import IMAGE_PRESETS, PRESETS, ModelReference, preset_of, tensor_shapes
from optigpu.paths import BoundedFolder, cache_dir
from optigpu.programs import run_program
from optigpu.vocabulary import Changeable, Frozen, UnsupportedError

_FLOAT = 4


class Part(StrEnum):
    """What a matrix is: a linear layer, the head, or a table whose rows are looked up."""

    LINEAR = "linear"
    HEAD = "head"
    EMBEDDING = "embedding"
    POSITIONS = "positions"


class MatrixShape(Frozen):
    """`count` equal matrices [outputs, inner] of a loaded model, each with a bias or without."""

    name: str
    part: Part
    outputs: int
    inner: int
    count: int
    bias: bool


class LayerCache(Frozen):
    """What each of `count` equal layers keeps of a token for each of `kv_heads`; `window`: tokens it reaches back."""

    window: int | None
    kv_heads: int
    key_size: int
    value_size: int
    count: int


class Description(Frozen):
    """What a decoder is made of, in any dtype.

    `numbers` are those beside the matrices in the model's dtype (norms), `fixed_bytes` those in one of their own
    (rotary tables). `caches` is None where a layer keeps other things than keys and values, or it cannot be told.
    """

    facts: ModelFacts
    parameters: int
    matrices: tuple[MatrixShape, ...]
    numbers: int
    fixed_bytes: int
    caches: tuple[LayerCache, ...] | None


@dataclass(frozen=True)
class Matrix:
    """As MatrixShape, with the bytes of one as it is stored: 0 for a tied head until a technique copies it."""

    name: str
    part: Part
    outputs: int
    inner: int
    count: int
    bytes: int
    bias_bytes: int = 0

    @property
    def elements(self) -> int:
        return self.outputs * self.inner

    @property
    def whole(self) -> int:
        """Bytes of all with their biases."""
        return self.count * (self.bytes + self.bias_bytes)


@dataclass(frozen=True)
class OwnPasses:
    """What an operator holds that runs whole passes in the place of transformers, with a cache of its own.

    `token_bytes` of a token's keys and values in all blocks, in multiples of `at_once` tokens; `angle_bytes` of a
    position's sines and cosines, `made_angle_bytes` while they are computed; prompts go in parts of `most_rows` tokens
    of all sequences, with `row_bytes` of activations each.
    """

    token_bytes: int
    at_once: int
    angle_bytes: int
    made_angle_bytes: int
    row_bytes: int
    most_rows: int


@dataclass(frozen=True)
class StoredWeights(Changeable):
    """A decoder's tensors. `width` is that of the dtype that it was loaded in, `half` whether that is bfloat16.

    `other_bytes` are norms (`norm_bytes`) and the tables of rotary embeddings; `tied`: head and embedding share a
    matrix; `widened_bytes`: the largest matrix that a layer widens for a product; `sum_bytes`: what it holds for each
    number of its output before that has its dtype; `own_passes`: None where transformers runs the model.
    """

    facts: ModelFacts
    matrices: tuple[Matrix, ...]
    other_bytes: int
    norm_bytes: int
    width: int
    half: bool
    tied: bool
    widened_bytes: int = 0
    sum_bytes: int = 0
    own_passes: OwnPasses | None = None

    @property
    def bytes(self) -> int:
        return sum(matrix.whole for matrix in self.matrices) + self.other_bytes

    @property
    def linear(self) -> tuple[Matrix, ...]:
        """The layers of the blocks."""
        return tuple(matrix for matrix in self.matrices if matrix.part is Part.LINEAR)

    def with_bytes(
        self, of: Callable[[int, int], int], *, head: bool, float_bias: bool = True
    ) -> "StoredWeights":
        """A copy whose linear layers, and head if asked, take `of(outputs, inner)` bytes; `float_bias`: of float32."""
        wanted = (Part.LINEAR, Part.HEAD) if head else (Part.LINEAR,)

        def quantized(each: Matrix) -> Matrix:
            bias = each.bias_bytes // self.width * _FLOAT if float_bias else each.bias_bytes
            return replace(each, bytes=of(each.outputs, each.inner), bias_bytes=bias)

        changed = (quantized(each) if each.part in wanted else each for each in self.matrices)
        return replace(self, matrices=tuple(changed))


@dataclass(frozen=True)
class DecoderShape:
    reference: ModelReference
    description: Description
    caches: tuple[LayerCache, ...]
    passes: Passes

    @property
    def facts(self) -> ModelFacts:
        return self.description.facts

    @property
    def learns_positions(self) -> bool:
        return any(matrix.part is Part.POSITIONS for matrix in self.description.matrices)

    @property
    def inner_size(self) -> int:
        """The width of the MLP's inner layer: nothing in a block has more inputs than what leads out of it."""
        linear = (matrix.inner for matrix in self.description.matrices if matrix.part is Part.LINEAR)
        return self.facts.inner_size or max(linear)

    def stored(self, width: int, *, half: bool = False) -> StoredWeights:
        found, tied = self.description, self.facts.tied_head

        def loaded(shape: MatrixShape) -> Matrix:
            own = 0 if shape.part is Part.HEAD and tied else width * shape.outputs * shape.inner
            bias = width * shape.outputs if shape.bias else 0
            return Matrix(shape.name, shape.part, shape.outputs, shape.inner, shape.count, own, bias)

        return StoredWeights(
            facts=found.facts,
            matrices=tuple(loaded(matrix) for matrix in found.matrices),
            other_bytes=width * found.numbers + found.fixed_bytes,
            norm_bytes=width * found.numbers,
            width=width,
            half=half,
            tied=tied,
        )


Facts = ModelFacts | ImageFacts
_USUAL_SIZE = 224
"""He et al., Deep Residual Learning, 2015: the crops that ImageNet's classifiers are trained on ever since."""


def known_facts(reference: ModelReference) -> Facts | None:
    """The facts of a preset or a bundled model; None for other models."""
    if reference.kind == "preset" and reference.name in IMAGE_PRESETS:
        preset = IMAGE_PRESETS[reference.name]
        return image_facts_from_config(preset.model_type, preset.config)
    return facts_of(reference)


def facts_of(reference: ModelReference) -> ModelFacts | None:
    """As `known_facts`; None for an image classifier as well."""
    known = packaged().get(str(reference))
    return known.facts if known else None


def image_facts_from_config(family: str, config: Mapping[str, Any]) -> ImageFacts:
    """By the attributes of a transformers configuration; of a size that is not square the longer side counts."""
    size = config.get("image_size") or _USUAL_SIZE
    width = config.get("depth_multiplier", 1)
    return ImageFacts(
        family=family,
        channels=int(config.get("num_channels", 3)),
        image_size=int(size if isinstance(size, int) else max(size)),
        classes=int(config["num_labels"]),
        fixed_size=family_of(family).fixed_image_size,
        alpha=None if width == 1 else f"{width:g}",
    )


PACKAGED = Path(__file__).parent / "packaged.json"


@cache
def packaged() -> Mapping[str, Description]:
    found = json.loads(PACKAGED.read_text("utf-8"))
    return {reference: Description.model_validate(about) for reference, about in found.items()}


PROGRAM = "optigpu.models.loading.describing"
MOST_BYTES = 2**24
"""Of the descriptions that are kept; one takes some KB."""
_LOCK_S = 10.0
_LOADING = Path(families.__file__).parent / "loading"
_SOURCES = (
    Path(families.__file__),
    *(_LOADING / f"{name}.py" for name in ("describing", "load", "footprint")),
)
"""Their text decides what is found."""


class Described(Frozen):
    """What the program answers: one of these. `refused` says why it is neither a decoder nor an image classifier."""

    decoder: Description | None = None
    images: ImageFacts | None = None
    refused: str | None = None


def description_of(reference: ModelReference) -> Description:
    """What a model that generates text is made of. Raises UnsupportedError for another or without configuration."""
    known = packaged().get(str(reference))
    if known is not None:
        return known
    found = None if preset_of(reference) else _described(reference)
    if found is None or found.images is not None:
        raise UnsupportedError(f"{reference} classifies images; name a model that generates text.")
    if found.decoder is None:
        raise UnsupportedError(f"{reference} {found.refused}")
    return found.decoder


def decoder_facts(reference: ModelReference) -> ModelFacts:
    """The shapes of a model that generates text. Raises as `description_of` does."""
    return description_of(reference).facts


def image_facts(reference: ModelReference) -> ImageFacts:
    """Those of an image classifier in a folder or the hub's cache. Raises UnsupportedError as `description_of` does."""
    found = _described(reference)
    if found.decoder is not None:
        raise UnsupportedError(f"{reference} generates text; name a model that classifies images.")
    if found.images is None:
        raise UnsupportedError(f"{reference} {found.refused}")
    return found.images


def decoder_shape(reference: ModelReference) -> DecoderShape:
    """For predicting a decoder's memory. Raises UnsupportedError also for a family whose passes are not known."""
    description = description_of(reference)
    family = description.facts.family
    passes = families.family_of(family).passes
    if passes is None or not description.caches:
        raise UnsupportedError(
            f"The memory of {reference} cannot be predicted: what {family} models hold in a forward pass is not in the "
            "table of families. Measure it with `optigpu run`."
        )
    return DecoderShape(reference, description, description.caches, passes)


def kept_facts(reference: ModelReference) -> ModelFacts | None:
    """The facts of a decoder whose description is kept; None for others: nothing is described anew."""
    with suppress(UnsupportedError, OSError, ValueError):
        kept = _kept_file(reference, configuration_file(reference))
        found = Described.model_validate_json(kept.read_bytes()).decoder
        return found.facts if found else None
    return None


def _kept_file(reference: ModelReference, file: Path) -> Path:
    """Where the description by this file is kept, or would be."""
    is_gguf = gguf_file(reference) is not None
    digest = hashlib.sha256(f"torch {version('torch')} transformers {version('transformers')}\n".encode())
    for source in (() if is_gguf else (file,)) + _SOURCES:
        digest.update(source.read_bytes())
    if is_gguf:  # of gigabytes
        status = file.stat()
        digest.update(f"{file} {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode())
    return cache_dir() / "described" / f"{digest.hexdigest()}.json"


def _described(reference: ModelReference) -> Described:
    file = configuration_file(reference)
    is_gguf = gguf_file(reference) is not None
    if not is_gguf:
        read_configuration(file, reference)
    path = _kept_file(reference, file)
    folder = BoundedFolder(path.parent, ".json", MOST_BYTES)
    if path.is_file():
        return Described.model_validate_json(path.read_bytes())
    ended = run_program(PROGRAM, [str(file if is_gguf else file.parent)])
    if ended.status:
        why = (ended.err.strip().splitlines() or [f"status {ended.status}"])[-1].rstrip(".")
        raise UnsupportedError(
            f"The configuration of {reference} cannot be read: {why}. Check its "
            f"{'metadata' if is_gguf else CONFIGURATION}."
        )
    answer = Described.model_validate_json(ended.out.strip().splitlines()[-1])
    with suppress(OSError), folder.locked(_LOCK_S), folder.draft_of(path) as draft:  # else it is asked again
        draft.write_text(answer.model_dump_json(), "utf-8")
        folder.admit(draft)
    return answer


class Size(NamedTuple):
    """How many numbers a model has, and in how many matrices."""

    parameters: int
    matrices: int


def size_of(reference: ModelReference) -> Size | None:
    """By what is packaged, else by the headers of its safetensors files. None where these are not on this machine."""
    known = packaged().get(str(reference))
    if known is not None:
        return Size(known.parameters, sum(matrix.count for matrix in known.matrices))
    with suppress(UnsupportedError, OSError, ValueError, TypeError, LookupError, AttributeError):
        files = weight_files(configuration_file(reference).parent, reference)
        shapes = [shape for file in files for shape in tensor_shapes(file)]
        return Size(sum(map(prod, shapes)), sum(len(shape) > 1 for shape in shapes))
    return None


def configuration_file(reference: ModelReference) -> Path:
    """The config.json of a folder or of the hub's cache, or the GGUF file that a reference names.

    Raises UnsupportedError where it is not on this machine.
    """
    if reference.kind == "path":
        return gguf_file(reference) or model_directory(reference.name) / CONFIGURATION
    from huggingface_hub import try_to_load_from_cache  # only a hub's model needs it

    found = try_to_load_from_cache(reference.name, CONFIGURATION, revision=reference.revision or "main")
    if isinstance(found, str):
        return Path(found)
    raise UnsupportedError(
        f"The hub's cache does not hold {reference}; name one of the presets {', '.join(PRESETS)}, or load the model "
        "once."
    )
