from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.models.families import FAMILIES, family_of
from optigpu.techniques.base import ON_MODELS, Expected, KernelTechnique, Model, Notes
from optigpu.vocabulary import DeviceKind, UnsupportedError


class FusedQkv(KernelTechnique):
    """Replaces the three projections of each attention by one matrix product, whose output is cut by heads.

    What follows it is transformers' own: the model file's rotary embedding, the cache, the attention function.
    """

    tasks = ON_MODELS
    summary = "queries, keys and values of an attention by one matrix product instead of three"
    citation = "Aminabadi et al., DeepSpeed Inference, 2022, arXiv:2207.00032 (merged QKV)"
    expected = (
        Expected("arithmetic", "two products fewer for each layer; the weights keep their size"),
        Expected("aim", "a few percent of an eager step, more where keys and values are small"),
    )
    # A step that is bound by the weights' bytes gains nothing, and what the calls cost depends on the host.
    only_when_asked = True

    name: Literal["fused_qkv"] = "fused_qkv"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        return refusal(model.family) if model else None

    def modules(self, model: Model, notes: Notes) -> None:
        """Merges every attention in place, one after the other, so that only one layer's matrices are there twice.

        Raises UnsupportedError when there is no supported attention, and when the three matrices of one cannot
        become one (see `surgery.merging.require_mergeable`).
        """
        from optigpu.surgery.fused_modules import fuse_attentions

        count = fuse_attentions(model, self.name)
        if not count:
            name = model.config.model_type
            raise UnsupportedError(
                refusal(name)
                or f"fused_qkv found no attention of the family {name}; leave it out of the stack."
            )
        notes.record(fused_qkv_layers=count)


def refusal(name: str) -> str | None:
    """Why the attentions of a family cannot be merged, in one sentence, or None."""
    attention = family_of(name).attention
    if attention is None:
        known = ", ".join(
            family.title
            for family in FAMILIES.values()
            if family.attention and len(family.attention.qkv) == 3
        )
        return f"fused_qkv supports the attention of {known}, not of {name}; leave it out of the stack."
    if len(attention.qkv) == 1:
        return (
            f"fused_qkv merges three matrices, and the attention of {name} has one matrix for queries, keys and values "
            "already; leave it out of the stack."
        )
    return None
