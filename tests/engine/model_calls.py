"""What a model is given and what it keeps while it decodes, as the tests of the memory techniques look at it."""

from collections.abc import Callable
from typing import Any, Literal

from optigpu.backends.torch.applied import DecodingModel
from optigpu.documents.facts import RunFacts
from optigpu.models.loading.footprint import footprint_of
from optigpu.techniques.base import Notes, Phase, Step, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import Layer
from optigpu.workloads.generate import Generate
from tests.engine.decoded import NEW_TOKENS, sequence_of
from tests.engine.rounding import in_float64, rounding_bound
from tests.engine.tiny_models import prompt, runtime_of

WORKLOAD = Generate(prompt_tokens=8, new_tokens=NEW_TOKENS, batch_size=2)
"""What `seen` runs, to a roofline."""


class OwnStep(Technique):
    """Makes the backend decode in its lean loop, and changes nothing."""

    layer = Layer.COMPILATION
    phase = Phase.COMPILATION
    name: Literal["own_step"] = "own_step"

    def step(self, step: Step, notes: Notes) -> Step:
        return step


LOOPS = [(), (OwnStep(),), (OwnStep(), StaticKvCache())]


class Call:
    """What the model was given once and what it gave."""

    def __init__(self, tokens: int, cache: Any, logits: Any) -> None:
        self.tokens, self.cache, self.logits = tokens, cache, logits


def seen(runtime: DecodingModel, run: Callable[[], Any] | None = None) -> list[Call]:
    """The model's calls while it generates, or while `run` does what it does."""
    calls = []

    def see(module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        calls.append(Call(named["input_ids"].shape[1], named.get("past_key_values"), output.logits))

    handle = runtime.model.register_forward_hook(see, with_kwargs=True)
    (run or (lambda: runtime.generate(prompt(), NEW_TOKENS)))()
    handle.remove()
    return calls


def tensors_of(cache: Any) -> list[Any]:
    """All that the layers of a cache hold: keys, values, and scales where there are any."""
    return [
        tensor
        for layer in cache.layers
        for tensor in (getattr(layer, "parts", None) or (layer.keys, layer.values))
    ]


def facts_of(runtime: DecodingModel) -> RunFacts:
    """What a result's facts hold that a roofline reads."""
    footprint = footprint_of(runtime.model, runtime.facts)
    return RunFacts.gathered(runtime.notes.facts | {"footprint": footprint})


def assert_compiled_does_the_same(family: str, stack: tuple[Technique, ...], dtype: str) -> None:
    """A compiled step gives the tokens of the plain one, again and again, and logits within the rounding of `dtype`."""
    plain = runtime_of(f"path:{family}", *stack, StaticKvCache())
    compiled = runtime_of(f"path:{family}", *stack, TorchCompile())
    tokens = plain.generate(prompt(), NEW_TOKENS).tokens
    for _ in range(2):
        assert compiled.generate(prompt(), NEW_TOKENS).tokens.equal(tokens)
    assert compiled.notes.facts["compiled_graphs"] == 1
    sequence = sequence_of(tokens)
    bound = rounding_bound(in_float64(plain.model), sequence, dtype)
    assert float((compiled.logits(sequence) - plain.logits(sequence)).abs().max()) <= 2 * bound
