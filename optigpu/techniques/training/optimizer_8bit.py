from functools import partial
from typing import Any, Literal

from pydantic import Field

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Choice, Expected, Model, Notes, Parts, TrainingTechnique
from optigpu.vocabulary import DeviceKind, UnsupportedError


class Optimizer8bit(TrainingTechnique):
    """bitsandbytes' AdamW: both moments in 8 bits, in blocks of 256 that share a scale, with the workload's settings.

    Tensors of fewer than `smallest` weights keep states of 32 bits. `paged` lets the driver move states to the host's
    memory when the GPU's is short. On a CPU the library computes in plain PyTorch: it is for memory there.
    """

    abilities = (Ability.OPTIMIZER_8BIT,)
    summary = "AdamW with both moments in 8 bits"
    citation = "Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021, arXiv:2110.02861"
    expected = (
        Expected("arithmetic", "2 bytes of states for each weight instead of 8"),
        Expected(
            "measured here",
            "GPT-2, 4 documents of 128 tokens: a peak of 2021.0 MB instead of 2334.1",
            "training.md",
        ),
        Expected("literature", "the losses of states of 32 bits, without other hyperparameters"),
        Expected("aim", "slower on a CPU, where one update is several operations of PyTorch"),
    )
    extras = ("bitsandbytes",)
    choices = (Choice.OPTIMIZER,)
    error_bound = 0.01
    only_when_asked = True  # It is for memory, and on a CPU it costs time

    name: Literal["optimizer_8bit"] = "optimizer_8bit"
    paged: bool = Field(
        False, description="Whether the driver may move states to the host's memory; on CUDA."
    )
    smallest: int = Field(
        4096, ge=1, description="The least number of weights of a tensor with 8-bit states."
    )

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if self.paged and device is not DeviceKind.CUDA:
            return "optimizer_8bit: paged states need CUDA; set paged to false."
        return super().check(environment, device, model)

    def fits(self, workload: Any) -> str | None:
        """SGD without momentum has no states."""
        if workload.optimizer == "adamw":
            return None
        return f"optimizer_8bit is an AdamW, and the workload asks for {workload.optimizer}; set optimizer to adamw."

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        """Makes an optimizer whose settings are those of torch's AdamW.

        Raises UnsupportedError for a model without a tensor that is large enough.
        """
        from bitsandbytes.optim import AdamW8bit

        large = [
            weight
            for weight in model.parameters()
            if weight.requires_grad and weight.numel() >= self.smallest
        ]
        if not large:
            raise UnsupportedError(
                f"optimizer_8bit keeps states of 32 bits for tensors of fewer than {self.smallest} weights, and this "
                "model trains no larger one; set smallest lower, or leave it out of the stack."
            )

        notes.record(tensors_with_8bit_states=len(large))
        rate = parts.rule.learning_rate
        made = partial(AdamW8bit, lr=rate, min_8bit_size=self.smallest, is_paged=self.paged)
        return parts.but(optimizer=made)
