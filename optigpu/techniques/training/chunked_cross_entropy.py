from typing import Literal

from pydantic import Field

from optigpu.techniques.base import Expected, Model, Notes, Parts, TrainingTechnique


class ChunkedCrossEntropy(TrainingTechnique):
    """Multiplies the hidden states with the head for `tokens` tokens at a time, and again in the backward pass.

    A chunk's logits are freed before the next one's are computed, and all chunks add to one gradient of the head.
    Losses and gradients are those of one product, up to rounding. The price is one more product with the head for
    each token.
    """

    summary = "the head and the loss for a chunk of tokens at a time"
    citation = "Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, arXiv:2411.09009"
    expected = (
        Expected(
            "arithmetic",
            "the bytes of logits and of their gradient shrink from all tokens of a step to a chunk's; one product with "
            "the head more, of three",
        ),
        Expected(
            "literature",
            "60% less memory together with fused kernels, for models with large vocabularies",
            "Hsu et al., Liger Kernel, 2024, arXiv:2410.10989",
        ),
    )

    name: Literal["chunked_cross_entropy"] = "chunked_cross_entropy"
    tokens: int = Field(1024, ge=1, le=1 << 20, description="Tokens of a chunk.")

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        """Replaces the forward pass and the loss.

        Raises UnsupportedError for a model whose logits are not its head's product with its last hidden states.
        """
        from optigpu.surgery.training_steps import ChunkedLoss

        notes.record(loss_chunk_tokens=self.tokens)
        return parts.but(loss=ChunkedLoss(model, self.tokens))
