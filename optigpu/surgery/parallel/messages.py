"""What the ranks of a divided decoder send each other. All calls wait until the others have made theirs."""

import os
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

START_S = 120.0
"""How long the ranks wait for each other: they import torch and read their weights."""


@dataclass(frozen=True)
class Announcement:
    """The next pass: over `length` tokens of each of `rows` sequences, after `past` tokens that are in the cache.

    With `rows` 0 there is none, and the other ranks end.
    """

    rows: int = 0
    length: int = 0
    past: int = 0

    def tell(self) -> None:
        """From rank 0 to all others."""
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
    address = f"file://{meeting}"
    limit = timedelta(seconds=START_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ways, timeout=limit)
    dist.barrier()


def share(states: torch.Tensor) -> None:
    """From rank 0 to all others, in place. states: [rows, length, hidden]."""
    dist.broadcast(_bytes(states), 0)


def send(states: torch.Tensor, rank: int) -> None:
    """To one rank. states: [rows, length, hidden]."""
    dist.send(_bytes(states.contiguous()), rank)


def receive(states: torch.Tensor, rank: int) -> torch.Tensor:
    """From one rank, in place. states: [rows, length, hidden]."""
    dist.recv(_bytes(states), rank)
    return states


def add_up(partial: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, added in float32, in the dtype that came in. partial: any shape, the same everywhere."""
    total = partial.float()
    dist.all_reduce(total)
    return total.to(partial.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # gloo does not know every dtype
    return tensor.view(torch.uint8)
