"""Makes a smaller model: the teacher writes text, and a student with some of its weights learns from it."""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

from optigpu.models.loading.load import count_weights, load_model, load_tokenizer, loaded_facts
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.recipes.making.learning import learn, mean_divergence, perplexity
from optigpu.recipes.making.neurons import kept_neurons
from optigpu.recipes.making.students import blocks_of, inner_size, kept_blocks, narrower, shallower
from optigpu.recipes.request import ABOUT, RecipeOutcome, RecipeRequest, check_output
from optigpu.vocabulary import RecipeName, UnsupportedError

HELD_OUT = 64
"""Texts on which the models are compared, which no step trains on."""
JUDGED = 64
"""Texts from which the importance of neurons is taken."""
WRITTEN_AT_ONCE = 64

Doing = Callable[[str], None]


def make(request: RecipeRequest, doing: Doing) -> RecipeOutcome:
    """Makes the model and writes its folder, all of it or nothing.

    Raises SpecError for a folder that cannot be written, UnsupportedError for a model that cannot be made smaller so,
    and OptiGPUError if a loss is not finite.
    """
    began_s = time.monotonic()
    check_output(request.output)
    doing("loading the teacher")
    teacher = load_model(parse_reference(request.model), device="cpu", dtype="float32")
    doing(f"the teacher writes {request.texts} texts of {request.length} tokens")
    held_out = _written(teacher, HELD_OUT, request.length, request.seed + 1)
    texts = _written(teacher, request.texts, request.length, request.seed)
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


def _written(teacher: PreTrainedModel, rows: int, length: int, seed: int) -> torch.Tensor:
    facts = loaded_facts(teacher)
    if length > facts.longest:
        raise UnsupportedError(
            f"Texts of {length} tokens do not fit the model's context of {facts.longest}; ask for a smaller length."
        )
    return sampled(teacher, facts.vocabulary, rows, length, seed, at_once=WRITTEN_AT_ONCE)


def _smaller(
    request: RecipeRequest, teacher: PreTrainedModel, texts: torch.Tensor
) -> tuple[PreTrainedModel, str]:
    """The untrained student, and what makes it smaller."""
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
