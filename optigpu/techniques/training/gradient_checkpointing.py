from typing import Literal

from pydantic import Field

from optigpu.techniques.base import Choice, Expected, Model, Notes, Parts, TrainingTechnique, Trial
from optigpu.vocabulary import UnsupportedError

_WITH_CACHE = "a block that is computed again would write to the key-value cache twice"


class GradientCheckpointing(TrainingTechnique):
    """Of each block the input is kept, and the backward pass computes the block again.

    With `mode` "selective" most results of matrix products and attention are kept as well, and what is cheap to compute
    is computed again: norms, activation functions, sums, and the smallest products.
    """

    summary = "activations of blocks are computed again in the backward pass instead of kept"
    citation = (
        "Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv:1604.06174; Korthikanti et al., "
        "Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198"
    )
    expected = (
        Expected("arithmetic", "full: one more forward pass of the blocks, so a third more operations"),
        Expected("arithmetic", "full: activations of one block, and the input of each"),
        Expected(
            "measured here",
            "selective: 77% of the bytes that full saves for 15% of the time that it adds, on four blocks of GPT-2's "
            "width on two cores",
            "training.md",
        ),
    )
    conflicts = dict.fromkeys(
        ("kv_cache", "static_kv_cache", "int8_kv_cache", "sliding_kv_cache"), _WITH_CACHE
    )
    trials = (Trial(), Trial({"mode": "selective"}))
    only_when_asked = True  # It saves memory, not time

    name: Literal["gradient_checkpointing"] = "gradient_checkpointing"
    mode: Literal["full", "selective"] = Field(
        "full", description="Whether all activations of a block are computed again, or the cheap ones alone."
    )

    def chosen(self) -> tuple[Choice, ...]:
        """A selective one looks at each operator that runs."""
        return (Choice.OPERATORS,) if self.mode == "selective" else ()

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        """Runs the model's blocks under torch.utils.checkpoint. Raises UnsupportedError if transformers marks none."""
        from optigpu.surgery.training_steps import recompute_blocks

        blocks = recompute_blocks(model, keep_the_dear=self.mode == "selective")
        if blocks == 0:
            raise UnsupportedError(
                f"gradient_checkpointing found no block of a transformer in this {model.config.model_type}; leave it "
                "out."
            )
        notes.record(gradient_checkpointing={"mode": self.mode, "blocks": blocks})
        return parts
