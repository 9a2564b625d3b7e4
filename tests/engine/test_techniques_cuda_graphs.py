"""cuda_graphs records once and replays: what is kept, copied and undone, with a recorder that needs no GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optigpu.surgery import made_steps
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.cuda_graphs import CudaGraphs
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import ReplicateError, Task
from tests.breadth import spread
from tests.engine.decoded import NEW_TOKENS, assert_same_logits
from tests.engine.test_techniques_compilation import passing
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread", "recorded")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_steps, "record_cuda_graph", record_by_hand)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "others"),
    spread(FAMILIES, [((),), ((Int8KvCache(),),), ((SlidingKvCache(window=6, sinks=2),),)], by_default=3),
)
def test_a_replayed_step_decodes_right_again_and_again(family: str, others: tuple[Technique, ...]) -> None:
    plain = runtime_of(f"path:{family}", StaticKvCache(), *others)
    expected = plain.generate(prompt(), NEW_TOKENS).tokens

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", CudaGraphs(), *others)
        for _ in range(3):
            assert runtime.generate(prompt(), NEW_TOKENS).tokens.equal(expected)
        assert runtime.notes.facts.get("cuda_graphs") == 1
        assert_same_logits(runtime, plain, family)

    claim() if others else assert_needs_hook(CudaGraphs(), "step", claim)


def test_recording_leaves_the_cache_as_it_was_and_runs_no_further_than_the_request() -> None:
    """A cache has no room for a token after the last: warming up at one position after the other would write there."""
    runtime, plain = runtime_of("path:gpt2", CudaGraphs()), runtime_of("path:gpt2", StaticKvCache())
    tokens = prompt(2, 9)
    assert_close(list(runtime.score(tokens, 8)), list(plain.score(tokens, 8)))


def test_a_replay_reads_copies_of_its_inputs_and_writes_where_it_wrote() -> None:
    replayed = CudaGraphs().forward(lambda inputs: inputs * 2, Notes())
    inputs = torch.ones(2, 3)
    first = replayed(inputs)
    assert first.equal(torch.full((2, 3), 2.0))
    second = replayed(torch.full((2, 3), 4.0))
    assert second.data_ptr() == first.data_ptr()
    assert second.equal(torch.full((2, 3), 8.0))
    assert inputs.equal(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("task", "model"),
    [(Task.PREFILL, "path:gpt2"), (Task.PREFILL, "path:llama"), (Task.IMAGES, "preset:tiny-vit-test")],
)
def test_a_whole_pass_is_recorded_too(task: Task, model: str) -> None:
    drawn = [prompt(), prompt().flip(0)] if task is Task.PREFILL else list(torch.rand(2, 2, 3, 32, 32))
    plain = passing(task, model)
    expected = [plain.forward(inputs).logits for inputs in drawn]

    def claim() -> None:
        runtime = passing(task, model, CudaGraphs())
        found = [runtime.forward(inputs).logits.clone() for inputs in drawn]
        assert_close(found, expected)
        assert runtime.notes.facts.get("cuda_graphs") == 1

    assert_needs_hook(CudaGraphs(), "forward", claim)


def test_a_recorded_step_refuses_another_batch_and_another_cache() -> None:
    runtime = runtime_of("path:gpt2", CudaGraphs())
    runtime.generate(prompt(2), NEW_TOKENS)
    for batch, new_tokens in ((1, NEW_TOKENS), (2, 2 * NEW_TOKENS)):
        with pytest.raises(ReplicateError, match="What cuda_graphs made takes only the batch size"):
            runtime.generate(prompt(batch), new_tokens)


def record_by_hand(run: Callable[[], Any], undo: Callable[[], None]) -> tuple[Callable[[], None], Any]:
    """As a CUDA graph is recorded: after warming up, without an effect, and by nothing that waits for the device."""
    for _ in range(3):
        run()
        undo()
    with pytest.MonkeyPatch.context() as patch, nothing_that_waits():
        patch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
        outputs = run()
    undo()

    def replay() -> None:
        for held, made in zip(tree_leaves(outputs), tree_leaves(run()), strict=True):
            held.copy_(made)

    return replay, outputs


def nothing_that_waits() -> Any:
    """Fails where an operator asks the device for a value, or brings one from the host: neither can be recorded."""
    waiting = {"_local_scalar_dense", "is_nonzero", "nonzero", "lift_fresh", "equal"}

    class NothingThatWaits(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Of nothing, nothing is copied.
            waits = func.overloadpacket.__name__ in waiting and args[0].numel()
            assert not waits, f"{func} cannot be recorded"
            return func(*args, **(kwargs or {}))

    return NothingThatWaits()


def assert_close(found: list[Any], expected: list[Any]) -> None:
    """The same operators in the same order: nothing is rounded otherwise."""
    assert len(found) == len(expected)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
