"""Makes a smaller model: the teacher writes text, and a student with some of its weights learns from it."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from optigpu.models.loading.load import count_weights, load_model, load_tokenizer, loaded_facts
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.recipes.making.students import (
    AT_ONCE,
    blocks_of,
    down_layers,
    inner_size,
    kept_blocks,
    learn,
    mean_divergence,
    narrower,
    perplexity,
    shallower,
)
from optigpu.recipes.request import ABOUT, RecipeOutcome, RecipeRequest, check_output
from optigpu.vocabulary import RecipeName, UnsupportedError

HELD_OUT = 64
"""Texts on which the models are compared, which no step trains on."""
JUDGED = 64
"""Texts from which the importance of neurons is taken."""
WRITTEN_AT_ONCE = 64

Doing = Callable[[str], None]


def make(request: RecipeRequest, doing: Doing) -> RecipeOutcome:
    """Makes the model and writes its folder, all of it or nothing. Raises SpecError for a folder that cannot be
    written, UnsupportedError for a model that cannot be made smaller so, and OptiGPUError if a loss is not finite."""
    began_s = time.monotonic()
    check_output(request.output)
    doing("loading the teacher")
    teacher = load_model(parse_reference(request.model), device="cpu", dtype="float32")
    doing(f"the teacher writes {request.texts} texts of {request.length} tokens")
    facts = loaded_facts(teacher)
    if request.length > facts.longest:
        raise UnsupportedError(
            f"Texts of {request.length} tokens do not fit the model's context of {facts.longest}; ask for a smaller "
            "length."
        )
    held_out, texts = (
        sampled(teacher, facts.vocabulary, rows, request.length, seed, at_once=WRITTEN_AT_ONCE)
        for rows, seed in ((HELD_OUT, request.seed + 1), (request.texts, request.seed))
    )
    student, changed = _smaller(request, teacher, texts[:JUDGED])
    before = perplexity(student, held_out), mean_divergence(student, teacher, held_out)
    losses = learn(student, teacher, texts, request.steps, request.batch_size, request.learning_rate, doing)
    doing("comparing it with its teacher")
    tenth = max(1, len(losses) // 10)
    outcome = RecipeOutcome(
        request=request,
        changed=changed,
        teacher_parameters=count_weights(teacher),
        parameters=count_weights(student),
        teacher_perplexity=perplexity(teacher, held_out),
        perplexity_before=before[0],
        perplexity=perplexity(student, held_out),
        kld_before=before[1],
        kld=mean_divergence(student, teacher, held_out),
        first_loss=sum(losses[:tenth]) / tenth if losses else None,
        last_loss=sum(losses[-tenth:]) / tenth if losses else None,
        seconds=time.monotonic() - began_s,
    )
    doing("writing the model")
    _write(student, outcome)
    return outcome


def _smaller(
    request: RecipeRequest, teacher: PreTrainedModel, texts: torch.Tensor
) -> tuple[PreTrainedModel, str]:
    if request.recipe is RecipeName.DISTILLATION:
        blocks = len(blocks_of(teacher))
        kept = kept_blocks(blocks, request.layers)
        return shallower(teacher, kept), f"layers {', '.join(map(str, kept))} of {blocks} are kept"
    neurons = kept_neurons(teacher, texts, request.keep)
    changed = f"{len(neurons[0])} of {inner_size(teacher)} neurons of each MLP are kept"
    return narrower(teacher, neurons), changed


def _write(student: PreTrainedModel, outcome: RecipeOutcome) -> None:
    """Into a folder beside the output, which then takes its place."""
    output = outcome.request.output.resolve()
    made = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        student.save_pretrained(made)
        with suppress(UnsupportedError):  # a model without a tokenizer has a student without one
            load_tokenizer(parse_reference(outcome.request.model)).save_pretrained(made)
        (made / ABOUT).write_text(outcome.model_dump_json(indent=2))
        made.chmod(0o755)
        if output.exists():
            shutil.rmtree(output)
        made.rename(output)
    finally:
        shutil.rmtree(made, ignore_errors=True)


MULTIPLE = 8
"""The number of neurons that stay is a multiple of it: kernels are slower for odd sizes."""


def kept_neurons(model: PreTrainedModel, texts: torch.Tensor, keep: float) -> list[torch.Tensor]:
    """The neurons of each block that stay, in their order, int64 [neurons]. A neuron's importance is by how much the
    loss would change without it, to first order: the sum of |activation times gradient|. Source: Molchanov et al.,
    Importance Estimation for Neural Network Pruning, 2019, arXiv:1906.10771."""
    neurons = inner_size(model)
    count = round(neurons * keep / MULTIPLE) * MULTIPLE
    if count < MULTIPLE:
        raise UnsupportedError(
            f"An MLP of this model has {neurons} neurons and cannot be pruned to a share of {keep:g}: at least "
            f"{MULTIPLE} must stay; raise keep to {MULTIPLE / neurons:.3g}."
        )
    if count >= neurons:
        raise UnsupportedError(
            f"An MLP of this model has {neurons} neurons, and a share of {keep:g} removes none of them; lower keep to "
            f"{1 - MULTIPLE / neurons:.3g}."
        )
    importance = [torch.zeros(neurons, dtype=torch.float64) for _ in down_layers(model)]
    with _watched(model, lambda block, change: importance[block].add_(change)):
        for rows in texts.split(AT_ONCE):
            logits = model(input_ids=rows, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")
            loss.backward()
    return [each.topk(count).indices.sort().values for each in importance]


@contextmanager
def _watched(model: PreTrainedModel, add: Callable[[int, torch.Tensor], object]) -> Iterator[None]:
    """Tells `add` the block and |activation times gradient| of its neurons, [neurons], at each backward pass."""

    def watch(block: int) -> Callable[[Module, tuple[Any, ...]], tuple[Any, ...]]:
        def before(_: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first = inputs[0]  # [rows, length, neurons], or [tokens, neurons]
            activation = first if first.requires_grad else first.detach().requires_grad_(True)

            def changed(gradient: torch.Tensor) -> None:
                change = (activation.detach() * gradient).abs().double()
                add(block, change.flatten(0, -2).sum(dim=0))

            activation.register_hook(changed)
            return (activation, *inputs[1:])

        return before

    handles = [
        layer.register_forward_pre_hook(watch(block)) for block, layer in enumerate(down_layers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
