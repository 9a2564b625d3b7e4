"""What the operator can run, as far as a model's facts and its configuration say. Imports no torch."""

from dataclasses import dataclass

from optigpu.documents.shapes import ModelFacts
from optigpu.models.families import FAMILIES, AttentionParts, Decoder, Mlp, ModelFamily, family_of
from optigpu.ops.decode.program import MOST_HEAD_SIZE

NORM_UNIT = 16
"""The hidden size must be a multiple of this: the operator normalizes this many numbers at once."""
HEAD_UNIT = 4
LEAVE_OUT = "leave it out of the stack"


@dataclass(frozen=True)
class Runnable:
    """A family that the operator can run: all of its parts are known.

    `qkv`, `output`, `gate`, `up` and `down` are paths from a block.
    """

    family: ModelFamily
    decoder: Decoder
    attention: AttentionParts
    mlp: Mlp

    @property
    def qkv(self) -> tuple[str, ...]:
        return tuple(_path(self.attention.path, name) for name in self.attention.qkv)

    @property
    def output(self) -> str:
        return _path(self.attention.path, self.attention.output)

    @property
    def gate(self) -> str | None:
        return _path(self.mlp.path, self.mlp.gate) if self.mlp.gate else None

    @property
    def up(self) -> str:
        return _path(self.mlp.path, self.mlp.up)

    @property
    def down(self) -> str:
        return _path(self.mlp.path, self.mlp.down)

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The linear layers of a block in the order in which they run; those of a stage share their inputs."""
        gate = (self.gate,) if self.gate else ()
        return (self.qkv, (self.output,), (*gate, self.up), (self.down,))

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear layers of a block."""
        return tuple(path for stage in self.stages for path in stage)


def runnable(name: str) -> Runnable | None:
    """The family of that model_type; None where the operator cannot run it."""
    family = family_of(name)
    if family.decoder is None or family.attention is None or family.mlp is None:
        return None
    return Runnable(family, family.decoder, family.attention, family.mlp)


def runnable_names() -> str:
    """The families that the operator runs, for a sentence."""
    return ", ".join(name for name in FAMILIES if runnable(name))


def known_refusal(model: ModelFacts, group: int) -> str | None:
    """Why no program can be filled from a model, as far as its facts say, as a sentence's words without an end; or
    None.

    `group` is what the inputs of every matrix must be a multiple of.
    """
    if runnable(model.family) is None:
        return f"supports the families {runnable_names()}, not {model.family}; {LEAVE_OUT}"
    if model.embedding_size != model.hidden_size:
        return f"does not support an embedding that is projected to another width; {LEAVE_OUT}"
    reason = other_size(model.hidden_size, model.head_size)
    if reason:
        return f"{reason}; {LEAVE_OUT}"
    inputs = {model.hidden_size, model.heads * model.head_size, model.inner_size or model.hidden_size}
    wrong = [number for number in sorted(inputs) if number % group]
    if wrong:
        return (
            f"needs layers whose inputs are a multiple of {group}; this model has layers with {wrong[0]}. Choose "
            "another group or leave it out of the stack"
        )
    return None


def other_size(hidden_size: int, head_size: int) -> str | None:
    """Why the operator cannot run a model of these sizes, or None."""
    if hidden_size % NORM_UNIT:
        return f"needs a hidden size that is a multiple of {NORM_UNIT}; this model has {hidden_size}"
    if head_size % HEAD_UNIT or head_size > MOST_HEAD_SIZE:
        return (
            f"needs a head size that is a multiple of {HEAD_UNIT} and at most {MOST_HEAD_SIZE}; this model has "
            f"{head_size}"
        )
    return None


def _path(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
