"""What every peer's process is told, and how it answers."""

import argparse
import sys
from collections.abc import Callable, Sequence


def parse(description: str | None, weights: Sequence[str]) -> argparse.Namespace:
    """The command line of a peer that knows these kinds of weights."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model-type", default="gpt2", help="transformers' name of the architecture")
    parser.add_argument("--config", default="{}", help="what differs from its defaults, as JSON")
    parser.add_argument("--weights", default=weights[0], choices=weights)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def serve(rate: Callable[[], float], weight_bytes: int, warm_up: int) -> None:
    """Warms up, says that it is ready, and answers each line with the rate of one more request."""
    for _ in range(warm_up):
        rate()
    print("ready", weight_bytes, flush=True)
    for _ in sys.stdin:
        print(rate(), flush=True)
