"""A smaller model learns its teacher's distribution of the next token, on text that the teacher wrote."""

import math
from collections.abc import Callable

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from optigpu.vocabulary import OptiGPUError

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
    """The loss of each step, in nats: how far the student diverges from the teacher, the mean over positions.

    Hinton et al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531, at temperature 1. `texts` are
    ids [rows, length]. Raises OptiGPUError if a loss is not finite.
    """
    student.train().requires_grad_(True)
    said = _Said(teacher, texts)
    optimizer = torch.optim.AdamW(student.parameters(), lr=learning_rate)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, steps)
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


def divergence(student: PreTrainedModel, teacher: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """The mean Kullback-Leibler divergence of the student from the teacher over all positions of `rows`."""
    with torch.no_grad():
        expected = _log_probabilities(teacher, rows)
    return _divergence(_log_probabilities(student, rows), expected)


@torch.no_grad()
def perplexity(model: PreTrainedModel, texts: torch.Tensor) -> float:
    """Of all tokens but the first of each row."""
    likelihoods = [
        _log_probabilities(model, rows)[:, :-1].gather(2, rows[:, 1:, None]) for rows in texts.split(AT_ONCE)
    ]
    return math.exp(-float(torch.cat(likelihoods).double().mean()))


@torch.no_grad()
def mean_divergence(student: PreTrainedModel, teacher: PreTrainedModel, texts: torch.Tensor) -> float:
    """As `divergence`, of texts of which not all are judged at once."""
    parts = [float(divergence(student, teacher, rows)) * len(rows) for rows in texts.split(AT_ONCE)]
    return sum(parts) / len(texts)


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


def _schedule(step: int, steps: int) -> float:
    """The share of the learning rate."""
    rising = max(1.0, WARM_UP * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1.0)))
