"""Techniques of training in one stack: nearly the losses of the plain model, and the same again after a restart."""

from itertools import combinations

import pytest

from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import IN_TRAINING, Technique, conflict_between
from optigpu.techniques.training.activation_offload import ActivationOffload
from optigpu.techniques.training.chunked_cross_entropy import ChunkedCrossEntropy
from optigpu.techniques.training.fp8_training import Fp8Training
from optigpu.techniques.training.fused_optimizer import FusedOptimizer
from optigpu.techniques.training.gradient_accumulation import GradientAccumulation
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.techniques.training.int8_finetune import Int8Finetune
from optigpu.techniques.training.lora import Lora
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.techniques.training.optimizer_8bit import Optimizer8bit
from optigpu.techniques.training.optimizer_in_backward import OptimizerInBackward
from optigpu.techniques.training.qlora import Qlora
from optigpu.techniques.training.sequence_packing import SequencePacking
from tests.engine.training import LLAMA, losses_of, trained

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ALWAYS: tuple[Technique, ...] = (
    MixedPrecision(),
    GradientCheckpointing(mode="selective"),
    ChunkedCrossEntropy(tokens=8),
    ActivationOffload(target="disk", smallest_bytes=256),
    SequencePacking(),
)
EIGHT_BITS = Optimizer8bit(smallest=256)
STACKS: list[tuple[Technique, ...]] = [
    (Fp8Training(), GradientAccumulation(), EIGHT_BITS),
    (Fp8Training(), Lora(), OptimizerInBackward(), EIGHT_BITS),
    (Fp8Training(), Lora(), GradientAccumulation(), FusedOptimizer()),
    (Int8Finetune(), OptimizerInBackward(), EIGHT_BITS),
    (Int8Finetune(), GradientAccumulation(), FusedOptimizer()),
    (Qlora(), OptimizerInBackward(), FusedOptimizer()),
    (Qlora(base="int4"), GradientAccumulation(), EIGHT_BITS),
]


@pytest.mark.long
@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: " + ".join(each.name for each in stack))
def test_a_stack_learns_and_begins_again(stack: tuple[Technique, ...]) -> None:
    plain = losses_of(trained(LLAMA), steps=1)[0]
    runtime = trained(LLAMA, *ALWAYS, *stack, shortest_tokens=6, sequence_tokens=16)
    losses = losses_of(runtime)
    assert losses[0] == pytest.approx(plain, rel=0.01)
    assert losses[2] < losses[0]
    runtime.restart()
    assert losses_of(runtime).tolist() == losses.tolist()


def test_any_two_that_do_not_exclude_each_other_are_in_one_of_these_stacks() -> None:
    names = {name for name, kind in TECHNIQUES.items() if kind.tasks == IN_TRAINING} - {"compile_training"}
    met = {
        frozenset(pair)
        for stack in STACKS
        for pair in combinations([each.name for each in ALWAYS + stack], 2)
    }
    possible = {
        frozenset(pair)
        for pair in combinations(names, 2)
        if conflict_between(*(TECHNIQUES[name] for name in pair)) is None
    }
    assert possible - met == set()
