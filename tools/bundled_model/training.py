"""The training: plain PyTorch, the same weights every time for the same text, steps and seed on one machine."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optigpu.hardware.cpu import has_onednn_bfloat16
from tools.bundled_model.architectures import CONTEXT, Architecture
from tools.bundled_model.text import Tokens

TOKENS_PER_STEP = 4096
SHORT_WINDOW = 256
LONG_WINDOW = CONTEXT
WARM_UP_STEPS = 150
EVALUATE_EVERY_STEPS = 250
SAVE_EVERY_STEPS = 100


@dataclass(frozen=True)
class Recipe:
    """What the weights follow from, beside the text.

    Dropout ends early: it helps the first epochs of a model that underfits, and costs the later ones (Liu et al.,
    Dropout Reduces Underfitting, 2023, arXiv:2303.01500).
    """

    steps: int
    seed: int = 0
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout_steps: int = 1600

    @property
    def short_steps(self) -> int:
        """Steps with the short window; the last quarter has the long one."""
        return self.steps * 3 // 4

    def window(self, step: int) -> int:
        """Length in tokens of the windows of a step."""
        return SHORT_WINDOW if step < self.short_steps else LONG_WINDOW

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, most of a cosine, and linearly to nothing in the last third."""
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        progress = max(step - WARM_UP_STEPS, 0) / max(self.steps * 4 // 3 - WARM_UP_STEPS, 1)
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1)))
        return self.learning_rate * warm_up * cosine * min(1.0, (self.steps - step) / (self.steps / 3))


def train(
    architecture: Architecture, tokens: Tokens, held_out: Tokens, recipe: Recipe, work: Path, *, resume: bool
) -> dict[str, Any]:
    """Trains to the recipe's last step and returns the best state: `model`, `step`, `held_out_loss`, `seconds`.

    `work` gets last.pt (to resume from), best.pt (lowest held-out loss in nats per token among the evaluations with
    the long window) and log.txt. Raises ValueError when the text is shorter than one step's windows.
    """
    import torch

    if len(tokens) < TOKENS_PER_STEP + LONG_WINDOW + 1:
        raise ValueError(f"The text has {len(tokens)} tokens, less than one step needs; give more text.")
    torch.manual_seed(recipe.seed)
    model = architecture.build(architecture.dropout)
    optimizer = _optimizer(model, recipe)
    start, seconds, best = _resume(work, model, optimizer) if resume else (0, 0.0, math.inf)
    for step in range(start, recipe.steps):
        began = time.monotonic()
        if step == max(start, recipe.dropout_steps):
            _end_dropout(model)
        loss = _step(model, optimizer, tokens, recipe, step)
        seconds += time.monotonic() - began
        done, window = step + 1, recipe.window(step)
        if done % EVALUATE_EVERY_STEPS == 0 or done == recipe.steps:
            found = mean_loss(model, held_out, window)
            _log(work, f"step {done} loss {loss:.3f} held-out {found:.4f} window {window} {seconds:.0f} s")
            if window == LONG_WINDOW and found < best:
                best = found
                torch.save(
                    {"model": model.state_dict(), "step": done, "held_out_loss": best}, work / "best.pt"
                )
        if done % SAVE_EVERY_STEPS == 0 or done == recipe.steps:
            _save(work / "last.pt", model, optimizer, {"step": done, "seconds": seconds, "best": best})
    best_state: dict[str, Any] = torch.load(work / "best.pt", weights_only=True)
    return best_state | {"seconds": seconds}


def _resume(work: Path, model: Any, optimizer: Any) -> tuple[int, float, float]:
    """Steps done, seconds spent and the best held-out loss, with the rest of the checkpoint put back; or the start."""
    import torch

    if not (work / "last.pt").exists():
        return 0, 0.0, math.inf
    state = torch.load(work / "last.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seconds"], state["best"]


def _optimizer(model: Any, recipe: Recipe) -> Any:
    """AdamW; norms and biases do not decay."""
    import torch

    matrices = [each for each in model.parameters() if each.dim() >= 2]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def _end_dropout(model: Any) -> None:
    from torch.nn import Dropout

    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0


def _step(model: Any, optimizer: Any, tokens: Tokens, recipe: Recipe, step: int) -> float:
    """One step in bf16 with fp32 weights, or in fp32 where the CPU is slow in bf16.

    All that is random follows from the seed and the step, so a run resumes.
    """
    import torch

    torch.manual_seed(recipe.seed * 1_000_003 + step)
    windows, positions = (torch.from_numpy(each) for each in _batch(tokens, recipe, step))
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_onednn_bfloat16()):
        logits = model(windows[:, :-1], position_ids=positions, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _batch(tokens: Tokens, recipe: Recipe, step: int) -> tuple[Tokens, Tokens]:
    """Windows [batch, length + 1] and positions [batch, length]: an epoch cuts the text at a new place and shuffles.

    A short window starts at any position that leaves room for it, so that all of them are trained from the start.
    """
    length = recipe.window(step)
    batch = TOKENS_PER_STEP // length
    phase_step = step if length == SHORT_WINDOW else step - recipe.short_steps
    count = (len(tokens) - 1) // length - 1
    epoch, index = divmod(phase_step, count // batch)
    random = np.random.default_rng([recipe.seed, length, epoch])
    shift = random.integers(length)
    chosen = random.permutation(count)[index * batch : (index + 1) * batch]
    starts = shift + chosen[:, None] * length
    first = np.random.default_rng([recipe.seed, step]).integers(LONG_WINDOW - length + 1, size=(batch, 1))
    return tokens[starts + np.arange(length + 1)], first + np.arange(length)


def mean_loss(model: Any, tokens: Tokens, window: int) -> float:
    """Nats per token over all of `tokens` but the first, in windows side by side: a window's first token is the last
    of the one before, so that each token is predicted once.
    """
    import torch

    model.eval()
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(tokens) - 1, window):
            row = torch.from_numpy(tokens[start : start + window + 1])[None]
            logits = model(row[:, :-1], use_cache=False).logits
            total += float(torch.nn.functional.cross_entropy(logits[0].float(), row[0, 1:], reduction="sum"))
    return total / (len(tokens) - 1)


def _save(path: Path, model: Any, optimizer: Any, counters: dict[str, Any]) -> None:
    """Written beside and renamed: a run that is killed while it saves can still resume."""
    import torch

    beside = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **counters}, beside)
    beside.replace(path)


def _log(work: Path, line: str) -> None:
    with (work / "log.txt").open("a") as log:
        log.write(line + "\n")
