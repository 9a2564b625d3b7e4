"""`python -m benchmarks.bare_loop`: what somebody writes by hand to time a model, with nothing of OptiGPU in it.

Prints the median of tokens/s after the first token, for greedy decoding by transformers' `generate`. `fidelity`
compares it with what the engine says of the same variant.
"""

import argparse
import json
import statistics
import time
from typing import Any


class Moments:
    """A streamer that notes when each token comes; the first call brings the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _: Any) -> None:
        """A token, or the prompt."""
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def main() -> None:
    """Loads, warms up, measures, prints one number."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-type", default="gpt2", help="transformers' name of the architecture")
    parser.add_argument("--config", default="{}", help="what differs from its defaults, as JSON")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    config = AutoConfig.for_model(options.model_type, **json.loads(options.config))
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.randint(config.vocab_size, (1, options.prompt_tokens))
    model.generation_config.eos_token_id = None
    rates = []
    for _ in range(options.warm_up + options.requests):
        stream = Moments()
        model.generate(prompt, max_new_tokens=options.new_tokens, do_sample=False, streamer=stream)
        first, last = stream.moments[1], stream.moments[-1]
        rates.append((options.new_tokens - 1) / (last - first))
    print(statistics.median(rates[options.warm_up :]))


if __name__ == "__main__":
    main()
