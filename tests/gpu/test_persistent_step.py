"""A decode step as one persistent kernel on an NVIDIA GPU: its programs meet, launch after launch."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from optigpu.ops.decode.program import CacheKind, WeightKind

if TYPE_CHECKING:
    from optigpu.ops.decode.cuda.persistent_step import PersistentDecodeStep
    from optigpu.ops.decode.program import Program

pytestmark = [pytest.mark.gpu]
CAPACITY, TOKEN, LAUNCHES = 60, 7, 1000


def program_of(family: str, *kinds: WeightKind) -> "Program":
    from tests.engine.triton_persistent import program_of

    return program_of(family, kinds, "cuda")


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["w3k", "w4", "w4k", "w8", "bf16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_it_gives_what_the_recorded_graph_gives(family: str, kind: WeightKind, kv: CacheKind) -> None:
    """Tokens are the graph's, so that one that is as likely as another cannot lead both apart."""
    from optigpu.ops.decode.cuda.decode_step import CudaDecodeStep
    from optigpu.ops.decode.cuda.persistent_step import PersistentDecodeStep
    from optigpu.ops.decode.selftest import STEP_BOUND

    program = program_of(family, kind)
    graph, one = CudaDecodeStep(program, kv, 1, CAPACITY), PersistentDecodeStep(program, kv, CAPACITY)
    graph.record()
    graph.state.tokens.fill_(TOKEN)
    for position in range(CAPACITY):
        one.state.tokens.copy_(graph.state.tokens)
        graph.run()
        one.run()
        error = float((one.logits - graph.logits).abs().max() / graph.logits.abs().max())
        assert error <= STEP_BOUND, (position, error)
        assert int(one.state.tokens) == int(one.logits.argmax())
    assert one.state.position.tolist() == [CAPACITY]


def test_a_thousand_launches_give_the_same_logits_and_tokens() -> None:
    import torch

    step, expected = step_of("llama"), []
    for launch in range(LAUNCHES):
        if launch % CAPACITY == 0:
            begin(step)
        step.run()
        found = torch.cat([step.logits.flatten(), step.state.tokens.float()])
        if launch < CAPACITY:
            expected.append(found)
        else:
            assert torch.equal(found, expected[launch % CAPACITY]), launch


def test_its_recorded_graph_gives_what_its_launches_give() -> None:
    import torch

    launched, recorded = (step_of("gpt2") for _ in range(2))
    recorded.record()
    for step in (launched, recorded):
        begin(step)
        for _ in range(CAPACITY):
            step.run()
    assert torch.equal(launched.state.chosen, recorded.state.chosen)
    assert torch.equal(launched.logits, recorded.logits)


def test_more_programs_than_run_at_once_are_refused_by_us_and_by_the_driver() -> None:
    from optigpu.ops.decode.cuda.persistent_step import PersistentDecodeStep
    from optigpu.ops.decode.cuda.step_plan import Division
    from optigpu.ops.launch import LaunchTarget
    from optigpu.vocabulary import UnsupportedError

    program = program_of("llama", "w4")
    target = LaunchTarget.of(program.device)
    many = Division(target, Division.of(target).programs + 1)
    with pytest.raises(UnsupportedError, match="would wait for ever"):
        PersistentDecodeStep(program, "bf16", CAPACITY, many)
    step = step_of("llama")
    begin(step)
    step.run()
    with pytest.raises(RuntimeError):
        replace(step._call, grid=(100 * many.programs,)).run()


def step_of(family: str) -> "PersistentDecodeStep":
    from optigpu.ops.decode.cuda.persistent_step import PersistentDecodeStep

    return PersistentDecodeStep(program_of(family, "w4"), "bf16", CAPACITY)


def begin(step: "PersistentDecodeStep") -> None:
    step.reset()
    step.state.tokens.fill_(TOKEN)
