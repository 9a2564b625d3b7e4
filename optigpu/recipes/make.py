"""Makes a smaller model: the teacher writes text, and a student with some of its weights learns from it."""

import copy
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import AutoModelForCausalLM, PreTrainedModel

from optigpu.models.families import Decoder, Mlp, family_of
from optigpu.models.loading.load import count_weights, load_model, load_tokenizer, loaded_facts
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.recipes.request import ABOUT, RecipeOutcome, RecipeRequest, check_output
from optigpu.surgery.places import weight_of
from optigpu.vocabulary import OptiGPUError, RecipeName, UnsupportedError


def kept_blocks(blocks: int, layers: int | None) -> tuple[int, ...]:
    """Which blocks a student of so many layers keeps: evenly spaced ones, the first and the last among them. Sanh et
    al., DistilBERT, 2019, arXiv:1910.01108 begin with every other block. Raises UnsupportedError if that is not fewer
    than there are."""
    wanted = max(1, blocks // 2) if layers is None else layers
    if wanted >= blocks:
        raise UnsupportedError(
            f"The model has {blocks} layers, and a student of {wanted} is no smaller; ask for fewer layers."
        )
    if wanted == 1:
        return (0,)
    return tuple(round(place * (blocks - 1) / (wanted - 1)) for place in range(wanted))


def shallower(teacher: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A model of the teacher's blocks `kept` and of all that is not in a block; a copy."""
    parts = decoder_of(teacher)
    config: Any = copy.deepcopy(teacher.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[block] for block in kept]
    prefix = f"{parts.path}.{parts.blocks}."
    number = {str(block): str(place) for place, block in enumerate(kept)}
    weights = {}
    for name, weight in teacher.state_dict().items():
        if not name.startswith(prefix):
            weights[name] = weight
            continue
        block, _, rest = name.removeprefix(prefix).partition(".")
        if block in number:
            weights[f"{prefix}{number[block]}.{rest}"] = weight
    return _made(teacher, config, weights)


def narrower(teacher: PreTrainedModel, kept: Sequence[torch.Tensor]) -> PreTrainedModel:
    """A model whose MLPs have the neurons `kept` alone, int64 [neurons] for each block, equally many; a copy."""
    family, parts = family_of(teacher.config.model_type), decoder_of(teacher)
    mlp, key = mlp_of(teacher), family.keys.inner_size
    assert key is not None
    config: Any = copy.deepcopy(teacher.config)
    setattr(config, key, len(kept[0]))
    weights = dict(teacher.state_dict())
    outputs, inputs = (1, 0) if family.conv1d else (0, 1)  # Conv1D's are [inputs, outputs]
    slices = [(f"{mlp.down}.weight", inputs)]
    for name in filter(None, (mlp.gate, mlp.up)):
        slices += [(f"{name}.weight", outputs), (f"{name}.bias", 0)]
    for place, neurons in enumerate(kept):
        prefix = ".".join(filter(None, (parts.path, parts.blocks, str(place), mlp.path)))
        for name, dimension in slices:
            weight = f"{prefix}.{name}"
            if weight in weights:
                weights[weight] = weights[weight].index_select(dimension, neurons)
    return _made(teacher, config, weights)


def blocks_of(model: PreTrainedModel) -> list[Module]:
    parts = decoder_of(model)
    return list(model.get_submodule(f"{parts.path}.{parts.blocks}").children())


def down_layers(model: PreTrainedModel) -> list[Module]:
    """The layer of each block's MLP whose inputs are its neurons."""
    mlp = mlp_of(model)
    return [block.get_submodule(".".join(filter(None, (mlp.path, mlp.down)))) for block in blocks_of(model)]


def inner_size(model: PreTrainedModel) -> int:
    layer: Any = down_layers(model)[0]
    return int(weight_of(layer).shape[1])


def decoder_of(model: PreTrainedModel) -> Decoder:
    """The names of its parts. Raises UnsupportedError for a family whose parts are not known."""
    parts = family_of(model.config.model_type).decoder
    if parts is None:
        raise UnsupportedError(f"The parts of {model.config.model_type} models are not known to the recipes.")
    return parts


def mlp_of(model: PreTrainedModel) -> Mlp:
    """The names of its MLP's parts. Raises UnsupportedError for a family whose MLP is not known."""
    family = family_of(model.config.model_type)
    if family.mlp is None or family.keys.inner_size is None:
        raise UnsupportedError(f"The MLP of {family.title} models is not known, so that it cannot be pruned.")
    return family.mlp


def _made(teacher: PreTrainedModel, config: Any, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    student: Any = AutoModelForCausalLM.from_config(config)
    student.load_state_dict(weights)
    made: PreTrainedModel = student.to(teacher.device).eval()
    return made


WARM_UP = 0.1
"""The share of steps in which the learning rate rises; then it falls to zero along a cosine."""
MOST_NORM = 1.0
"""The most that the norm of the whole gradient may be."""
AT_ONCE = 8
"""Texts that are judged at once: the logits of more would take much memory."""
MOST_KEPT_BYTES = 2**29
"""What a teacher's distributions may take that are kept for the steps which see a text again."""


def learn(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    texts: torch.Tensor,
    steps: int,
    batch_size: int,
    learning_rate: float,
    doing: Callable[[str], None],
) -> list[float]:
    """The loss of each step, in nats: how far the student diverges from the teacher, the mean over positions. Hinton et
    al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531, at temperature 1. `texts` are ids [rows,
    length]. Raises OptiGPUError if a loss is not finite."""
    student.train().requires_grad_(True)
    said = _Said(teacher, texts)
    optimizer = torch.optim.AdamW(student.parameters(), lr=learning_rate)
    losses = []
    rising = max(1.0, WARM_UP * steps)
    for step in range(steps):
        rate = (step + 1) / rising
        if step >= rising:
            rate = 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        places = torch.arange(step * batch_size, (step + 1) * batch_size) % len(texts)
        loss = _divergence(_log_probabilities(student, texts[places]), said(places))
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise OptiGPUError(f"The loss of step {step + 1} is {losses[-1]}; ask for a lower learning_rate.")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), MOST_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            doing(f"training: step {step + 1} of {steps}, loss {losses[-1]:.3f} nat")
    student.eval().requires_grad_(False)
    return losses


@torch.no_grad()
def perplexity(model: PreTrainedModel, texts: torch.Tensor) -> float:
    """Of all tokens but the first of each row."""
    likelihoods = [
        _log_probabilities(model, rows)[:, :-1].gather(2, rows[:, 1:, None]) for rows in texts.split(AT_ONCE)
    ]
    return math.exp(-float(torch.cat(likelihoods).double().mean()))


@torch.no_grad()
def mean_divergence(student: PreTrainedModel, teacher: PreTrainedModel, texts: torch.Tensor) -> float:
    """The mean Kullback-Leibler divergence of the student from the teacher over all positions of the texts."""
    total = 0.0
    for rows in texts.split(AT_ONCE):
        found, expected = _log_probabilities(student, rows), _log_probabilities(teacher, rows)
        total += float(_divergence(found, expected)) * len(rows)
    return total / len(texts)


class _Said:
    """The teacher's log probabilities of texts, by their places. Computed once and kept in float16, which changes a
    probability by less than 1% where it is above 1e-4; computed each time where they would take too much memory."""

    def __init__(self, teacher: PreTrainedModel, texts: torch.Tensor) -> None:
        self._teacher, self._texts = teacher, texts
        needed = texts.numel() * teacher.config.vocab_size * torch.float16.itemsize
        self._kept: dict[int, torch.Tensor] | None = {} if needed <= MOST_KEPT_BYTES else None

    @torch.no_grad()
    def __call__(self, places: torch.Tensor) -> torch.Tensor:
        """float32 [places, length, vocabulary]"""
        if self._kept is None:
            return _log_probabilities(self._teacher, self._texts[places])
        new = [place for place in dict.fromkeys(places.tolist()) if place not in self._kept]
        if new:
            found = _log_probabilities(self._teacher, self._texts[new]).half()
            self._kept |= dict(zip(new, found, strict=True))
        return torch.stack([self._kept[place] for place in places.tolist()]).float()


def _divergence(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return kl_div(found.flatten(0, 1), expected.flatten(0, 1), reduction="batchmean", log_target=True)


def _log_probabilities(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """[rows, length, vocabulary]"""
    return log_softmax(model(input_ids=rows, use_cache=False).logits.float(), dim=-1)


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
