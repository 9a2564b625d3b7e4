"""magnitude_pruning zeroes the smallest weights and no others, and the model computes with what is left."""

from typing import Any, ClassVar, Literal

import pytest
from pydantic import ValidationError

from optigpu.models.loading.footprint import weight_bytes
from optigpu.surgery.places import linear_places
from optigpu.techniques.base import Notes, Phase, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.techniques.sparsity.magnitude_pruning import MagnitudePruning
from optigpu.techniques.sparsity.magnitude_pruning.layers import prune
from optigpu.vocabulary import Layer, UnsupportedError
from tests.breadth import spread
from tests.engine.rounding import in_float64, logits_of, rounding_bound
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
HALVES = [MagnitudePruning(), MagnitudePruning(structure="2:4")]
SHAPES = [(1, 4), (7, 12), (64, 96), (33, 20)]


@pytest.mark.parametrize(("technique", "family"), spread(HALVES, FAMILIES))
def test_half_of_each_linear_layer_is_zero_and_nothing_else_has_changed(
    family: str, technique: Technique
) -> None:
    before = tiny_model(family)

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", technique)
        pruned = 0
        for (name, weight), was in zip(runtime.model.named_parameters(), before.parameters(), strict=True):
            if "embed" in name or "wte" in name or "wpe" in name or weight.dim() == 1:
                assert weight.equal(was), name
            else:
                pruned += 1
                assert int((weight == 0).sum()) == weight.numel() // 2, name
                assert weight[weight != 0].equal(was[weight != 0]), name
        assert pruned == runtime.notes.facts["pruned_layers"]
        assert runtime.notes.facts["zeros_share"] == 0.5
        assert weight_bytes(runtime.model) == weight_bytes(before)

    assert_needs_hook(technique, "modules", claim)


@pytest.mark.parametrize(("technique", "family"), spread(HALVES, FAMILIES))
def test_outputs_are_those_of_a_model_that_was_pruned_by_hand(family: str, technique: Technique) -> None:
    runtime = runtime_of(f"path:{family}", technique)
    tokens = prompt()
    reference = tiny_model(family)
    before = logits_of(reference, tokens)
    by_hand(reference, technique)
    bound = rounding_bound(in_float64(reference), tokens, "float32")
    found = runtime.logits(tokens)
    assert float((found - logits_of(in_float64(reference), tokens)).abs().max()) <= bound
    assert float((found - before).abs().max()) > bound


@pytest.mark.parametrize(
    ("dtype", "shape", "sparsity"),
    spread(
        ["float32", "bfloat16", "float16"], [(shape,) for shape in SHAPES], [0.1, 0.5, 0.93], by_default=3
    ),
)
def test_exactly_the_share_goes_and_it_is_the_smallest(
    sparsity: float, shape: tuple[int, int], dtype: str
) -> None:
    """bfloat16 has many equal numbers, of which no more may go than are asked for."""
    weight = random_weight(shape, dtype)
    was = weight.clone()
    prune(weight, sparsity, "unstructured")
    gone = weight == 0
    assert int(gone.sum()) == round(sparsity * was.numel())
    if bool(gone.any()) and not bool(gone.all()):
        assert float(was[gone].abs().max()) <= float(was[~gone].abs().min())
    assert weight[~gone].equal(was[~gone])


@pytest.mark.parametrize(
    ("dtype", "shape", "transposed"),
    spread(["float32", "bfloat16"], [(shape,) for shape in SHAPES], [False, True]),
)
def test_two_of_every_four_inputs_stay(shape: tuple[int, int], dtype: str, transposed: bool) -> None:
    """A Conv1D keeps its weight the other way round and gives a view."""
    held = random_weight(shape[::-1], dtype) if transposed else random_weight(shape, dtype)
    weight = held.T if transposed else held
    was = weight.clone()
    prune(weight, 0.5, "2:4")
    for now, then in zip(weight.reshape(-1, 4).tolist(), was.reshape(-1, 4).tolist(), strict=True):
        kept = [index for index in range(4) if now[index] != 0]
        assert len(kept) == 2
        assert all(now[index] == then[index] for index in kept)
        gone = [abs(then[index]) for index in range(4) if index not in kept]
        assert max(gone) <= min(abs(then[index]) for index in kept)


@pytest.mark.parametrize("technique", HALVES, ids=["unstructured", "2:4"])
def test_what_is_pruned_can_be_quantized_afterwards_and_stays_zero(technique: Technique) -> None:
    """A zero is exact in every integer format."""
    import torch

    runtime = runtime_of("path:llama", technique, Int8WeightOnly())
    plain = tiny_model("llama")
    by_hand(plain, technique)
    weights = runtime.model.model.layers[0].mlp.down_proj(torch.eye(96)).T
    assert float(weights[plain.model.layers[0].mlp.down_proj.weight == 0].abs().max()) == 0
    assert runtime.generate(prompt(), 4).tokens.shape == (2, 4)


def test_it_comes_before_what_merges_and_what_compiles() -> None:
    order = sorted([TorchCompile(), Int8WeightOnly(), MagnitudePruning()], key=lambda one: one.phase)
    assert order[0] == MagnitudePruning()


class Last(Technique):
    """Looks at what is left to `finish`."""

    layer: ClassVar[Layer] = Layer.SPARSITY
    phase: ClassVar[Phase] = Phase.PRUNING
    name: Literal["last"] = "last"

    def finish(self, model: Any, notes: Notes) -> None:
        notes.record(left=len(linear_places(model)))


def test_what_is_left_is_finished_after_everything_else_has_changed_the_model() -> None:
    """However early its phase: only layers that are linear still can go to sparse kernels."""
    assert runtime_of("path:llama", Last()).notes.facts["left"] == 15
    assert runtime_of("path:llama", Last(), Int8WeightOnly()).notes.facts["left"] == 0


def test_inputs_that_no_four_divide_are_refused_before_anything_is_changed() -> None:
    import torch

    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(6, 8))
    was = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"inputs are a multiple of 4; 1 has 6"):
        MagnitudePruning(structure="2:4").modules(model, Notes())
    assert all(now.equal(then) for now, then in zip(model.parameters(), was, strict=True))


def sequential(*layers: Any) -> Any:
    """A model of these layers alone."""
    import torch

    return torch.nn.Sequential(*layers)


def test_what_cannot_be_pruned_is_refused_and_left() -> None:
    import torch

    technique = MagnitudePruning()
    with pytest.raises(UnsupportedError, match="no linear layer"):
        technique.modules(sequential(torch.nn.LayerNorm(4)), Notes())
    table, head = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
    head.weight = table.weight
    with pytest.raises(UnsupportedError, match="shares its weights with the embedding"):
        technique.modules(sequential(table, head), Notes())
    assert not bool((table.weight == 0).any())
    sound, broken = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    broken.weight.data[0, 0] = float("nan")
    with pytest.raises(UnsupportedError, match="NaN or infinite"):
        technique.modules(sequential(sound, broken), Notes())
    assert not bool((sound.weight == 0).any())
    with pytest.raises(UnsupportedError, match="quantized already"):
        technique.modules(runtime_of("path:gpt2", Int8WeightOnly()).model, Notes())


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"structure": "2:4", "sparsity": 0.7}, "two of four"),
        ({"sparsity": 0.0}, "greater than 0"),
        ({"sparsity": 1.0}, "less than 1"),
        ({"structure": "1:3"}, "2:4"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        MagnitudePruning(**parameters)


def random_weight(shape: tuple[int, ...], dtype: str) -> Any:
    """Numbers of which none is zero."""
    import torch

    source = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=source) + 0.1).to(getattr(torch, dtype)) * torch.where(
        torch.rand(shape, generator=source) < 0.5, -1, 1
    )


def by_hand(model: Any, technique: Technique) -> None:
    """Prunes a model's linear layers by sorting, written apart from the code that is tested."""
    import torch
    from transformers.pytorch_utils import Conv1D

    table = model.get_input_embeddings().weight
    for module in model.modules():
        if not isinstance(module, (torch.nn.Linear, Conv1D)) or module.weight is table:
            continue
        weight = module.weight.detach()
        weight = weight.T if isinstance(module, Conv1D) else weight
        groups = weight.reshape(-1, 4) if technique == HALVES[1] else weight.reshape(1, -1)
        order = groups.abs().sort(dim=1, stable=True).indices[:, : groups.shape[1] // 2]
        weight.copy_(groups.scatter(1, order, 0).reshape(weight.shape))
