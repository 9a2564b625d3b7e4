"""`python -m benchmarks.float_error`: how far float32 alone can move a model's predictions, in nats.

The model runs in float64. The output of each matrix product gets the error of one sum in float32 from the first
term to the last, the worst order that is in use: u sqrt(K) sqrt(sum of (w x)^2), normal, with u = 2^-24 and K terms.
`FLOAT_ERROR` must be far above the divergence that this makes, and far below that of the least defects, of which a few
are beside it.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from optigpu.models.loading.load import load_model
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.quality.divergence import FLOAT_ERROR, divergence
from optigpu.report import console

UNIT = 2.0**-24
MODELS = ("bundled:tiny", "bundled:small", "preset:tiny-llama-test")
SCALES = (1, 10, 100)
"""Multiples of the error."""
Changed = Callable[[Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's output that stands for its own: (layer, inputs, output)."""


def main() -> None:
    """Prints a table with a row for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float_error", description=__doc__)
    parser.add_argument("--model", action="append", help=f"by default {', '.join(MODELS)}")
    parser.add_argument("--rows", type=int, default=8, help="sequences that the model writes")
    parser.add_argument("--length", type=int, default=64, help="tokens of each")
    options = parser.parse_args()
    for name in options.model or MODELS:
        found = measured(name, options.rows, options.length)
        console().print(f"{name}: " + ", ".join(f"{what} {value:.2g}" for what, value in found.items()))
    console().print(f"A stack that rounds nothing may diverge by {FLOAT_ERROR:g} nat.")


def measured(name: str, rows: int, length: int) -> dict[str, float]:
    """The mean divergence from the model in float64, in nats, by what was changed."""
    model: Any = load_model(parse_reference(name), device="cpu", dtype="float32", attention="eager")
    tokens = sampled(model, model.config.get_text_config(decoder=True).vocab_size, rows, length, seed=0)
    exact = logits(model.double(), tokens)
    found: dict[str, float] = {}
    changes: dict[str, Changed] = {f"{scale} x sums": _sums(scale) for scale in SCALES}
    changes |= {"float16 outputs": _rounded(torch.float16), "bfloat16 outputs": _rounded(torch.bfloat16)}
    for what, change in changes.items():
        with changed(model, change):
            found[what] = apart(exact, logits(model, tokens))
    found["float32"] = apart(exact, logits(model.float(), tokens))
    return found


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, length, vocabulary]"""
    with torch.no_grad():
        made: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return made


def apart(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The mean divergence of two arrays of logits, in nats."""
    return float(np.mean(divergence(expected.double().numpy(), found.double().numpy())))


@contextmanager
def changed(model: Module, change: Changed) -> Iterator[None]:
    """The output of each matrix product of the model goes through `change`."""
    torch.manual_seed(0)
    products = [module for module in model.modules() if type(module).__name__ in ("Linear", "Conv1D")]
    hooks = [
        module.register_forward_hook(lambda layer, inputs, output: change(layer, inputs[0], output))
        for module in products
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _sums(scale: float) -> Changed:
    def with_error(layer: Module, inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        weight = layer.get_parameter("weight")
        matrix = weight if type(layer).__name__ == "Conv1D" else weight.T
        spread = (inputs**2 @ matrix**2).sqrt() * (UNIT * matrix.shape[0] ** 0.5 * scale)
        moved: torch.Tensor = output + spread * torch.randn_like(spread)
        return moved

    return with_error


def _rounded(dtype: torch.dtype) -> Changed:
    def rounded(_layer: Module, _inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output.to(dtype).to(output.dtype)

    return rounded


if __name__ == "__main__":
    main()
