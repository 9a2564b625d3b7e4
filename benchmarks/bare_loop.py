"""`python -m benchmarks.bare_loop`: a hand-written loop that times a model without OptiGPU.

After its warm-up it prints "ready", and then for each line that it reads the tokens/s of one more request, after the
first token, by greedy decoding with transformers' `generate`. `fidelity` compares them with the engine's.
"""

import argparse
import json
import sys
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
        """Does nothing: each token was handed on at once."""


def main() -> None:
    """Loads, warms up, and measures as often as it is asked to."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-type", default="gpt2", help="transformers' name of the architecture")
    parser.add_argument("--config", default="{}", help="what differs from its defaults, as JSON")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
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

    def rate() -> float:
        stream = Moments()
        model.generate(prompt, max_new_tokens=options.new_tokens, do_sample=False, streamer=stream)
        first, last = stream.moments[1], stream.moments[-1]
        return float((options.new_tokens - 1) / (last - first))

    for _ in range(options.warm_up):
        rate()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(rate(), flush=True)


if __name__ == "__main__":
    main()
