from typing import Literal, Self

from pydantic import Field, model_validator

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Choice, Expected, Model, Notes, Parts, Phase, TrainingTechnique
from optigpu.vocabulary import DeviceKind


class CompileTraining(TrainingTechnique):
    """torch.compile around the forward pass and the loss of all other techniques; the backward pass follows from it.

    With `fullgraph` a graph break is an error. Other shapes than the first ones are compiled once more, then for all
    shapes. `backend` "aot_eager" runs the captured graphs operator by operator, which shows what capturing alone buys.
    Modes that record CUDA graphs are not offered: a replay overwrites gradients that micro-batches add up.
    """

    phase = Phase.COMPILATION
    abilities = (Ability.INDUCTOR,)
    summary = "forward pass, loss and backward pass as compiled graphs of fused kernels"
    citation = "Ansel et al., PyTorch 2, ASPLOS 2024, doi:10.1145/3620665.3640366"
    expected = (
        Expected("literature", "1.41x, the geometric mean of training more than 180 models on an A100"),
        Expected("aim", "less for large products; the first steps take seconds to minutes longer"),
    )
    choices = (Choice.STEP, Choice.OPERATORS)

    name: Literal["compile_training"] = "compile_training"
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        "default", description="How much TorchInductor tries out."
    )
    fullgraph: bool = Field(True, description="Whether a graph break is an error.")
    backend: Literal["inductor", "aot_eager"] = Field(
        "inductor", description="What runs the captured graphs."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.backend != "inductor" and self.mode != "default":
            raise ValueError(f"mode {self.mode} needs the backend inductor; leave mode out")
        return self

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if self.backend == "inductor" and device is DeviceKind.CPU and environment.compiler is None:
            return "TorchInductor needs a C++ compiler on a CPU, and none was found; install g++."
        return None

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        from optigpu.surgery.compiling import CompiledLoss, CompileOptions

        options = CompileOptions(self.backend, self.mode, self.fullgraph)
        return parts.but(loss=CompiledLoss(options, parts.loss, notes))
