"""python -m optigpu.surgery.parallel.rank: one of the other processes of a divided decoder, and what all say.

It ends when rank 0 says so, or when the connection to it breaks. All calls wait until the other ranks have made theirs.
"""

import argparse
import os
import sys
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel

START_S = 120.0
"""How long the ranks wait for each other: they import torch and read their weights."""


@dataclass(frozen=True)
class Announcement:
    """The next pass: `length` tokens of each of `rows` sequences, after `past` cached ones; with `rows` 0 the ranks
    end."""

    rows: int = 0
    length: int = 0
    past: int = 0

    def tell(self) -> None:
        dist.broadcast(torch.tensor(astuple(self)), 0)

    @classmethod
    def heard(cls) -> "Announcement":
        """What rank 0 tells next."""
        numbers = torch.empty(3, dtype=torch.int64)
        dist.broadcast(numbers, 0)
        return cls(*numbers.tolist())


def meet(meeting: Path, rank: int, ways: int) -> None:
    """Joins the group. Raises RuntimeError when the others do not come."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: its name need not resolve
    limit = timedelta(seconds=START_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ways, timeout=limit
    )
    dist.barrier()


# gloo does not know every dtype: states [rows, length, hidden] go as bytes.


def share(states: torch.Tensor) -> None:
    dist.broadcast(states.view(torch.uint8), 0)


def send(states: torch.Tensor, rank: int) -> None:
    """To one rank."""
    dist.send(states.contiguous().view(torch.uint8), rank)


def receive(states: torch.Tensor, rank: int) -> torch.Tensor:
    """From one rank, in place."""
    dist.recv(states.view(torch.uint8), rank)
    return states


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m optigpu.surgery.parallel.rank", description=__doc__)
    parser.add_argument("kind", choices=("tensor", "pipeline"))
    parser.add_argument("folder", type=Path, help="with the part RANK.pt, and where the ranks meet")
    for name in ("rank", "ways", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Written by rank 0 a moment ago, into a folder that only this user can read.
    part = torch.load(options.folder / f"{options.rank}.pt", weights_only=False)
    meet(options.folder / "meeting", options.rank, options.ways)
    try:
        with torch.inference_mode():
            _serve(part, options.kind, options.rank, options.ways)
    except RuntimeError as error:  # gloo's only error: most often that rank 0 has gone
        print(f"rank {options.rank} ends: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def _serve(part: PreTrainedModel, kind: str, rank: int, ways: int) -> None:
    cache = DynamicCache()
    while (said := Announcement.heard()).rows:
        if said.past == 0:
            cache = DynamicCache()
        if cache.get_seq_length() != said.past:
            raise RuntimeError(
                f"rank 0 has {said.past} tokens in its cache, and this one has {cache.get_seq_length()}"
            )
        states = torch.empty(said.rows, said.length, part.config.hidden_size, dtype=part.dtype)
        if kind == "tensor":
            share(states)
        else:
            receive(states, rank - 1)
        found = part(inputs_embeds=states, past_key_values=cache, use_cache=True).last_hidden_state
        if kind == "pipeline":
            send(found, (rank + 1) % ways)


if __name__ == "__main__":
    sys.exit(main())
