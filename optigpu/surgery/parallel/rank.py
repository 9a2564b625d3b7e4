"""python -m optigpu.surgery.parallel.rank: one of the other processes of a divided decoder.

It ends when rank 0 says so, or when the connection to it breaks.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel

from optigpu.surgery.parallel.messages import Announcement, meet, receive, send, share


def main() -> int:
    """Reads its part, and runs one pass for each announcement."""
    parser = argparse.ArgumentParser(prog="python -m optigpu.surgery.parallel.rank", description=__doc__)
    parser.add_argument("kind", choices=("tensor", "pipeline"))
    parser.add_argument("folder", type=Path, help="with the part RANK.pt, and where the ranks meet")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ways", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Written by rank 0 a moment ago, into a folder that only this user can read.
    part = torch.load(options.folder / f"{options.rank}.pt", weights_only=False)
    meet(options.folder / "meeting", options.rank, options.ways)
    try:
        with torch.inference_mode():
            _serve(part, _exchange(options.kind, options.rank, options.ways))
    except RuntimeError as error:  # gloo's only error: most often that rank 0 has gone
        print(f"rank {options.rank} ends: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


Exchange = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], None]
"""Fills the states [rows, length, hidden] of a pass, runs it, and passes on what comes out."""


def _serve(part: PreTrainedModel, exchange: Exchange) -> None:
    cache = DynamicCache()
    hidden, dtype = part.config.hidden_size, part.dtype
    while (said := Announcement.heard()).rows:
        if said.past == 0:
            cache = DynamicCache()
        if cache.get_seq_length() != said.past:
            raise RuntimeError(
                f"rank 0 has {said.past} tokens in its cache, and this one has {cache.get_seq_length()}"
            )
        states = torch.empty(said.rows, said.length, hidden, dtype=dtype)
        current = cache

        def run(inputs: torch.Tensor, cache: DynamicCache = current) -> torch.Tensor:
            found: torch.Tensor = part(
                inputs_embeds=inputs, past_key_values=cache, use_cache=True
            ).last_hidden_state
            return found

        exchange(states, run)


def _exchange(kind: str, rank: int, ways: int) -> Exchange:
    def tensor(states: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        share(states)
        run(states)

    def pipeline(states: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        send(run(receive(states, rank - 1)), (rank + 1) % ways)

    return tensor if kind == "tensor" else pipeline


if __name__ == "__main__":
    sys.exit(main())
