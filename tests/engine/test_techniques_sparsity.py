"""magnitude_pruning zeroes the smallest weights and no others; smaller_model loads another model in the job's place."""

from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.hardware import probe
from optigpu.models.loading.footprint import weight_bytes
from optigpu.surgery.sparse_layers import prune
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.techniques.sparsity.magnitude_pruning import MagnitudePruning
from optigpu.techniques.sparsity.smaller_model import SmallerModel
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import spread
from tests.engine.tiny_models import (
    FAMILIES,
    VOCABULARY,
    asked,
    assert_needs_hook,
    prompt,
    runtime_of,
    tiny_model,
)

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


def sequential(*layers: Any) -> Any:
    """A model of these layers alone."""
    return torch.nn.Sequential(*layers)


def test_what_cannot_be_pruned_is_refused_and_left() -> None:
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


def random_weight(shape: tuple[int, ...], dtype: str) -> Any:
    """Numbers of which none is zero."""
    source = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=source) + 0.1).to(getattr(torch, dtype)) * torch.where(
        torch.rand(shape, generator=source) < 0.5, -1, 1
    )


# ---- smaller_model.


OTHER = SmallerModel(model="path:llama")


def test_the_other_model_is_measured() -> None:
    plain, alone = runtime_of("path:gpt2"), runtime_of("path:llama")

    def claim() -> None:
        smaller = runtime_of("path:gpt2", OTHER)
        assert smaller.logits(prompt()).equal(alone.logits(prompt()))
        assert not smaller.logits(prompt()).equal(plain.logits(prompt()))
        assert smaller.facts == alone.facts

    assert_needs_hook(OTHER, "load", claim)


def test_the_weights_hash_is_the_job_s_model_s_and_the_other_s_is_noted(models_dir: Path) -> None:
    """So that the result stands on the board of the model that the job names."""
    smaller = runtime_of("path:gpt2", OTHER)
    assert (
        asked(smaller, models_dir).weights().hash == asked(runtime_of("path:gpt2"), models_dir).weights().hash
    )
    llama = asked(runtime_of("path:llama"), models_dir).weights().hash
    assert smaller.notes.facts["loaded_instead"] == {"model": "path:llama", "hash": llama}


def test_without_a_model_or_with_another_vocabulary_it_says_what_to_write() -> None:
    here = probe()
    assert "smaller_model:model=path:DIR" in str(SmallerModel().check(here, DeviceKind.CPU, None))
    assert OTHER.check(here, DeviceKind.CPU, None) is None
    why = SmallerModel(model="preset:gpt2").check(here, DeviceKind.CPU, runtime_of("path:gpt2").facts)
    assert f"50257 tokens and the model {VOCABULARY}" in str(why)
