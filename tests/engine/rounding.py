"""How far rounding may move a model's logits: computed from a float64 copy of the model, not guessed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of each dtype."""
DRAWS = 8
SAFETY = 4
"""Only what leaves a module is disturbed, and each module rounds several times inside."""


def in_float64(model: Any) -> Any:
    """A copy in float64; where the library itself computes in float32 (rotary angles, RMS norms), it still does."""
    return copy.deepcopy(model).double()


def logits_of(model: Any, tokens: Any) -> Any:
    """The plain model's logits after `tokens`, [batch, vocabulary], without a cache."""
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits[:, -1]


def rounding_bound(reference: Any, tokens: Any, dtype: str) -> float:
    """SAFETY times the largest change of a logit when every module's output is off by up to the dtype's rounding.

    `reference` is a float64 model. This is Monte Carlo arithmetic (Parker, 1997) at the grain of modules.
    """
    return rounding_bound_of(reference, lambda: logits_of(reference, tokens), dtype)


def rounding_bound_of(reference: Any, run: Callable[[], Any], dtype: str) -> float:
    """The same for what `run` makes of the model."""
    exact = run()
    torch.manual_seed(0)
    with _disturbed(reference, UNIT[dtype]):
        worst = max(float((run() - exact).abs().max()) for _ in range(DRAWS))
    return SAFETY * worst


def assert_greedy_as_far_as_it_can_be_told(reference: Any, prompt: Any, tokens: Any, bound: float) -> None:
    """Every token is the reference's most likely one, unless two are closer than the bound lets one tell."""
    sequence = torch.cat([prompt, tokens], dim=1)
    for index in range(prompt.shape[1], sequence.shape[1]):
        logits = logits_of(reference, sequence[:, :index])
        chosen = logits.gather(1, sequence[:, index : index + 1])[:, 0]
        behind = logits.max(dim=1).values - chosen
        assert float(behind.max()) <= 2 * bound, f"token {index} is {float(behind.max())} behind the best"


@contextmanager
def _disturbed(model: Any, unit: float) -> Iterator[None]:
    def disturb(module: Any, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        return output * (1 + unit * (2 * torch.rand_like(output) - 1))

    handles = [
        module.register_forward_hook(disturb) for module in model.modules() if not list(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
