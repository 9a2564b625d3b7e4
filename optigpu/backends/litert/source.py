"""The file that a reference names, checked before LiteRT reads it: LiteRT trusts every offset in it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from optigpu.documents.facts import FROM_FILE, NetworkFacts
from optigpu.documents.manifest import ModelManifest, read_manifest
from optigpu.documents.shapes import ImageFacts
from optigpu.edge.macs import operator_counts
from optigpu.edge.tflite import Model, read_tflite
from optigpu.models.held import TFLITE, model_file
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import SpecError, UnsupportedError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Source:
    """A file, what it holds, and which network it is; `macs` are the multiply-accumulates for one image."""

    path: Path
    sha256: str
    model: Model
    network: NetworkFacts
    macs: int

    @property
    def parameters(self) -> int:
        """The constants that operators read, each once."""
        return sum(tensor.elements for tensor in self.model.tensors if tensor.constant_bytes)

    @property
    def facts(self) -> ImageFacts:
        """The shapes of its input; a file is for one size."""
        side, _, channels = self.network.input
        classes = self.network.classes or self.model.outputs[0].shape[-1]
        return ImageFacts(self.network.family, channels, side, classes, True, self.network.alpha)


def source_of(reference: str | None) -> Source:
    """The file of a reference such as path:edge/model.tflite.

    Raises UnsupportedError for another kind of model, a damaged file, one that classifies no square images, and one
    that is not what the manifest beside it describes.
    """
    parsed = parse_reference(str(reference))
    if parsed.kind != "path" or not parsed.name.endswith(TFLITE):
        raise UnsupportedError(
            f"litert cannot run {parsed}: it runs .tflite files, such as `optigpu convert` writes; name one as "
            f"path:FOLDER/model{TFLITE}."
        )
    path = model_file(parsed.name)
    try:
        model = read_tflite(path)
        macs = sum(each.macs for each in operator_counts(model))
        _require_classifier(model, path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest = _manifest(path, sha256)
    except SpecError as error:
        raise UnsupportedError(str(error).replace(str(path), str(parsed))) from None
    return Source(path, sha256, model, _network(model, manifest), macs)


def _require_classifier(model: Model, path: Path) -> None:
    """Raises UnsupportedError unless it takes one tensor of square images and gives one score for each class."""
    shapes = [tensor.shape for tensor in (*model.inputs, *model.outputs)]
    dims = [len(shape) for shape in shapes]
    if (len(model.inputs), len(model.outputs)) != (1, 1) or dims != [4, 2] or shapes[0][1] != shapes[0][2]:
        raise UnsupportedError(
            f"{path.name} has inputs {[tensor.shape for tensor in model.inputs]} and outputs "
            f"{[tensor.shape for tensor in model.outputs]}; classify needs one input of square images "
            "(1, side, side, channels) and one output (1, classes)."
        )


def _manifest(path: Path, sha256: str) -> ModelManifest | None:
    """The manifest beside the file; None if there is none."""
    beside = path.with_name(MANIFEST)
    if not beside.is_file():
        return None
    manifest = read_manifest(beside)
    if manifest.sha256 != sha256:
        raise UnsupportedError(
            f"{path.name} is not the model of the {MANIFEST} beside it, whose sha256 is {manifest.sha256[:12]}... and "
            f"not {sha256[:12]}...; convert it again, or remove the manifest."
        )
    return manifest


def _network(model: Model, manifest: ModelManifest | None) -> NetworkFacts:
    if manifest is not None:
        return NetworkFacts.of_manifest(manifest.model_dump(mode="json"))
    return NetworkFacts(family=FROM_FILE, input=model.inputs[0].shape[1:], classes=model.outputs[0].shape[-1])
