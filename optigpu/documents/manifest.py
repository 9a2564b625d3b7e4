"""The manifest of a converted model: what it is, what it costs, how well it agrees with FP32, what it must answer.
`optigpu convert` writes it, `POST /v1/edge/models` takes it, and only a device whose outputs are those of a manifest is
ranked."""

import hashlib
import math
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from optigpu.documents.fields import read_json, refusing
from optigpu.vocabulary import Frozen, SpecError

SHA256 = r"^[0-9a-f]{64}$"
NAME = r"^[\w .+/-]+$"
MOST_OPERATORS = 300
MOST_GOLDEN = 64
MOST_TOOLS = 32
LARGEST_TENSOR = 16 * 2**20
"""The most bytes of an input or an output."""
LARGEST_SCALE = 1e30
"""Of a quantized input or output."""
LARGEST_OUTPUT = 2**16
"""The most bytes of an output, of which a manifest holds several."""

Count = Annotated[int, Field(ge=0, le=2**60)]
Positive = Annotated[int, Field(ge=1, le=2**40)]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2 * LARGEST_OUTPUT)]
Name = Annotated[str, Field(pattern=NAME, min_length=1, max_length=80)]
Dimension = Annotated[int, Field(ge=1, le=2**24)]


class Network(Frozen):
    """Which network it is. `family` "file": it came from a file, and `input` and `classes` are what the file says.
    `seed` is what random weights were drawn with. `alpha` is text, so that "0.35" is written as it was asked for."""

    family: Literal["mobilenet_v2", "file"]
    alpha: Annotated[str, Field(pattern=r"^\d+(\.\d+)?$", max_length=8)] | None = None
    input: tuple[Dimension, ...] = Field(max_length=5)
    classes: Dimension | None = None
    weights: Literal["random", "imagenet", "file"] = "file"
    seed: int = Field(0, ge=0, le=2**31 - 1)

    @model_validator(mode="after")
    def _of_its_family(self) -> Self:
        if (self.alpha is None) != (self.family == "file"):
            raise ValueError("alpha: mobilenet_v2 needs its width multiplier, and a file has none.")
        return self

    @property
    def label(self) -> str:
        """`mobilenet_v2 alpha 0.35 96x96x3`."""
        width = "" if self.alpha is None else f" alpha {self.alpha}"
        return f"{self.family}{width} {'x'.join(map(str, self.input))}"


class OperatorCount(Frozen):
    """How often the model has an operator, and the multiply-accumulates of all of them for one input."""

    name: Name
    count: int = Field(ge=1, le=100_000)
    macs: Count


class TensorFormat(Frozen):
    """A model's input or output: real = scale * (integer - zero_point). The batch is the first dimension, and is 1."""

    shape: tuple[Dimension, ...] = Field(min_length=1, max_length=6)
    dtype: Literal["int8"]
    scale: float = Field(gt=0, le=LARGEST_SCALE)
    zero_point: int = Field(ge=-128, le=127)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.bytes > LARGEST_TENSOR:
            raise ValueError(
                f"shape: A tensor of {self.bytes} bytes is too large; the most is {LARGEST_TENSOR}."
            )
        return self

    @property
    def bytes(self) -> int:
        """One byte for each number."""
        return math.prod(self.shape)


class Agreement(Frozen):
    """How far the INT8 model agrees with FP32 on other inputs than the calibration's. `top1` is the share of inputs
    with the same most likely class, `kld_mean` in nats. Both are null where the output is no distribution over
    classes."""

    samples: int = Field(ge=0, le=10**6)
    top1: float | None = Field(None, ge=0, le=1)
    kld_mean: float | None = Field(None, ge=0)
    reason: str | None = Field(None, max_length=300)

    @model_validator(mode="after")
    def _explained(self) -> Self:
        if (self.top1 is None or self.kld_mean is None) and self.reason is None:
            raise ValueError("top1 and kld_mean need values, or the reason why there are none.")
        return self


class Calibration(Frozen):
    """What the ranges of the INT8 numbers were taken from."""

    kind: Literal["images", "npz", "random"]
    samples: int = Field(ge=1, le=10**7)


class Golden(Frozen):
    """What the model answers to the inputs of `golden.bin`: each output's bytes in hexadecimal. `inputs_sha256` is that
    of all inputs. `left_out` counts inputs where TFLite Micro and LiteRT's reference kernels rounded a sum
    differently."""

    count: int = Field(ge=1, le=MOST_GOLDEN)
    inputs_sha256: str = Field(pattern=SHA256)
    outputs: tuple[Hex, ...] = Field(min_length=1, max_length=MOST_GOLDEN)
    left_out: int = Field(0, ge=0, le=MOST_GOLDEN)

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if self.count != len(self.outputs):
            raise ValueError(f"outputs: There are {len(self.outputs)}, and count is {self.count}.")
        return self

    def digest(self, run_id: str | None = None) -> str:
        """SHA-256 of the run's id, if there is one, and all outputs: what a device that ran the model answers."""
        digest = hashlib.sha256((run_id or "").encode("ascii"))
        for output in self.outputs:
            digest.update(bytes.fromhex(output))
        return digest.hexdigest()


class ModelManifest(Frozen):
    """A converted model. `sha256` and `model_bytes` are those of `model.tflite`, `parameter_bytes` those of all
    constant tensors, `macs` the multiply-accumulates for one input. `arena_bytes` is what TFLite Micro used of its
    tensor arena on a 64-bit host. `rankable` is false for a model that was calibrated with random inputs."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    schema_: Literal[1] = Field(1, alias="schema")
    sha256: str = Field(pattern=SHA256)
    network: Network
    model_bytes: Positive
    operators: tuple[OperatorCount, ...] = Field(min_length=1, max_length=MOST_OPERATORS)
    macs: Count
    parameter_bytes: Count
    arena_bytes: Positive
    input: TensorFormat
    output: TensorFormat
    agreement: Agreement
    calibration: Calibration
    rankable: bool
    golden: Golden
    tools: dict[Name, Annotated[str, Field(max_length=80)]] = Field(max_length=MOST_TOOLS)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.macs != sum(operator.macs for operator in self.operators):
            raise ValueError("macs: It is not the sum of the operators' macs.")
        if self.parameter_bytes > self.model_bytes:
            raise ValueError("parameter_bytes: The parameters cannot be larger than the model.")
        if self.rankable and self.calibration.kind == "random":
            raise ValueError("rankable: A model that was calibrated with random inputs is not ranked.")
        if any(len(output) != 2 * self.output.bytes for output in self.golden.outputs):
            raise ValueError(f"golden.outputs: Each must have the output's {self.output.bytes} bytes.")
        return self


def read_manifest(path: Path) -> ModelManifest:
    """The manifest of a file, or of the folder that `optigpu convert` wrote. Raises SpecError with a line for each
    wrong field."""
    file = path / "manifest.json" if os.path.isdir(path) else path
    document = read_json(file)
    if not isinstance(document, dict):
        raise SpecError(f"{file} must hold one JSON object, the manifest that `optigpu convert` writes.")
    with refusing(ModelManifest):
        return ModelManifest.model_validate(document)
