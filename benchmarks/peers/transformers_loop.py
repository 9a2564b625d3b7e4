"""`python -m benchmarks.peers.transformers_loop`: transformers on weights that a library has prepared.

Decoding is transformers' own `generate`; the pass over a prompt is a bare forward pass.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bare_loop import Moments
from benchmarks.peers.arguments import parse, serve
from benchmarks.peers.preparations import MODES, PREPARE, prepared
from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference

TURNS, TRIED_TOKENS = 4, 8
"""How often and how long each mode of a peer is tried before the faster one is taken."""


class TransformersLoop:
    """A prepared model on a CPU."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(options.threads)
        modes = MODES.get(options.weights, ("",))
        models = {mode: _prepared(options, mode) for mode in modes}
        tried = self._tried(models) if len(models) > 1 else {}
        mode = max(tried, key=tried.__getitem__) if tried else modes[0]
        self._model = models[mode]
        self.vocabulary = self._model.config.vocab_size
        self.weight_bytes = _weight_bytes(self._model)
        self.details = {
            "flags": f"ATen {torch.backends.cpu.get_cpu_capability()}{mode and f', computes in {mode}'}",
            "threads": torch.get_num_threads(),
            "version": f"torch {torch.__version__}",
            **({"modes": {name: round(rate, 1) for name, rate in tried.items()}} if tried else {}),
        }

    def decode_rate(self, prompt: Sequence[int], new_tokens: int) -> float:
        """tokens/s after the first token, when a streamer has them."""
        import torch

        stream = Moments()
        tokens = torch.tensor([prompt])
        self._model.generate(tokens, max_new_tokens=new_tokens, do_sample=False, streamer=stream)
        first, last = stream.moments[1], stream.moments[-1]
        return (new_tokens - 1) / (last - first)

    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Tokens of the prompt by the seconds until the first token is chosen, of a bare pass into a new cache."""
        started = time.perf_counter()
        self._forward(prompt, None)[0].argmax()
        return len(prompt) / (time.perf_counter() - started)

    def score(self, tokens: Sequence[int], prefill: int) -> Iterator[NDArray[np.float32]]:
        """Logits after each of `tokens` from index `prefill` on, token by token after a prompt of `prefill`."""
        _, cache = self._forward(tokens[:prefill], None)
        for token in tokens[prefill:]:
            logits, cache = self._forward([token], cache)
            yield logits.float().numpy()

    def _tried(self, models: Mapping[str, Any]) -> dict[str, float]:
        """tokens/s of each mode in its best of a few turns; the first turn warms up."""
        rates: dict[str, float] = dict.fromkeys(models, 0.0)
        for turn in range(TURNS):
            for mode, model in models.items():
                self._model = model
                found = self.decode_rate([0] * TRIED_TOKENS, TRIED_TOKENS)
                rates[mode] = max(rates[mode], found) if turn else 0.0
        return rates

    def _forward(self, tokens: Sequence[int], cache: Any) -> tuple[Any, Any]:
        """Logits [vocabulary] after the last token, and the cache that then is."""
        import torch

        with torch.no_grad():
            found = self._model(
                input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        return found.logits[0, -1], found.past_key_values


def _prepared(options: argparse.Namespace, mode: str) -> Any:
    plain = load_model(parse_reference(options.model), device="cpu", dtype="float32", seed=options.seed)
    return prepared(options.weights, plain, mode)


def _weight_bytes(model: Any) -> int:
    """Bytes of all distinct storages that pickling the model would write; packed weights are in its state."""
    import torch

    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            inner = getattr(value, "__tensor_flatten__", None)
            if inner is not None:
                for name in inner()[0]:
                    visit(getattr(value, name))
            elif value.is_quantized or value.layout is torch.strided:
                storage = value.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (tuple, list)):
            for item in value:
                visit(item)

    for value in model.state_dict().values():
        visit(value)
    return sum(seen.values())


if __name__ == "__main__":
    serve(TransformersLoop, parse(__doc__, tuple(PREPARE)))
