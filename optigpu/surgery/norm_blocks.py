"""Which models have blocks whose residual additions and norms can be joined, and why the others have not.

Read when a job is posted as well: imports no torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.models.families import FAMILIES, Decoder, NormKind, family_of
from optigpu.techniques.base import ON_TEXT, KernelTechnique, Model, Notes
from optigpu.vocabulary import DeviceKind, Task, UnsupportedError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TECHNIQUES: dict[NormKind, str] = {"LayerNorm": "fused_layernorm", "RMSNorm": "fused_rmsnorm"}
"""The technique that fuses each kind of norm."""


class FusedNorms(KernelTechnique):
    """Rewrites the decoder's blocks so that each sum that is normed is made by the norm's own kernel."""

    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.OWN_KERNELS,)
    conflicts: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "cpu_offload": "a block reads the weights of the next block's norm, which are not on the GPU yet",
            "grad_enabled": "the fused norms have no gradient",
        }
    )
    only_when_asked: ClassVar[bool] = True
    kind: ClassVar[NormKind]

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if device is DeviceKind.CPU and environment.compiler is None:
            return f"{self.name} needs a C++ compiler on a CPU, and none was found; install g++."
        return _family_reason(self.kind, model.family) if model else None

    def modules(self, model: Model, notes: Notes) -> None:
        """Exchanges the classes of blocks and norms in place.

        Raises UnsupportedError, with the model left as it was, for blocks that are not known or without such norms, and
        where there is no kernel but torch's own.
        """
        from optigpu.surgery.fused_blocks import fuse_norms

        notes.record(**fuse_norms(model, self.kind))


def checked_blocks(
    model: "PreTrainedModel", kind: NormKind
) -> tuple[Decoder, "list[torch.nn.Module]", "torch.nn.Module | None"]:
    """The family's parts, blocks and final norm. Raises UnsupportedError for unknown, changed or differently normed
    blocks."""
    name, technique = model.config.model_type, TECHNIQUES[kind]
    reason = _family_reason(kind, name)
    if not getattr(model.config, "do_layer_norm_before", True):
        reason = reason or (
            f"{technique} needs norms before attention and MLP; this OPT model has them after (do_layer_norm_before is "
            "false). Leave it out of the stack."
        )
    if getattr(model.config, "add_cross_attention", False):
        reason = (
            reason or f"{technique} does not support blocks with cross-attention; leave it out of the stack."
        )
    if reason:
        raise UnsupportedError(reason)
    decoder = family_of(name).decoder
    assert decoder is not None  # or there was a reason
    try:
        parts = model.get_submodule(decoder.path)
        blocks = list(getattr(parts, decoder.blocks))
        final: torch.nn.Module | None = getattr(parts, decoder.final)
    except AttributeError as error:
        raise UnsupportedError(
            f"{technique} needs a causal language model of the family {name}, and this is a {type(model).__name__}; "
            "leave it out of the stack."
        ) from error
    changed = {type(block).__name__ for block in blocks} - {decoder.block}
    if changed:
        raise UnsupportedError(
            f"{technique} needs blocks of the class {decoder.block}; this model's are {', '.join(sorted(changed))}. "
            "Leave out the technique that changed them."
        )
    return decoder, blocks, final


def _family_reason(kind: NormKind, name: str) -> str | None:
    technique, decoder = TECHNIQUES[kind], family_of(name).decoder
    if decoder is None:
        known = ", ".join(
            family.name for family in FAMILIES.values() if family.decoder and family.decoder.norm_kind == kind
        )
        return f"{technique} supports the families {known}, not {name}; leave it out of the stack."
    if decoder.norm_kind != kind:
        return f"{technique}: {name} models have no {kind}; use {TECHNIQUES[decoder.norm_kind]} instead."
    return None
