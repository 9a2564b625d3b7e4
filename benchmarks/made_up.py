"""Made-up configurations (a variant on a class of hardware each) with seeded figures, and their results.

In every size a board has 25 rows of each class of hardware, and ten boards have one model: a page that asks for as many
rows has as many, whatever the size. 2,000 configurations are ten boards of 200 rows on 8 classes of hardware, a million
are a thousand boards of 1,000 rows on 40 classes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import combinations
from typing import NamedTuple, Self
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.result import Environment, MetricSummary, Result, VariantSummary, Verdict
from optigpu.vocabulary import METRICS, DeviceKind, Document, Role

TECHNIQUES = (
    *("bf16", "fp16", "int8_weight_only", "int8_hybrid", "static_kv_cache", "torch_compile"),
    *("fused_attention", "native_decode"),
)
STACKS = tuple(tuple(combinations(sorted(TECHNIQUES), size)) for size in range(5))
"""By their sizes, each of which is as frequent."""
METRIC_NAMES = ("tokens_per_s", "ttft_s", "weight_bytes", "kld_mean", "top1_agreement")
SOFTWARE = {"optigpu": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
FEWEST_BOARDS, ROWS_OF_BOARD, ROWS_OF_HARDWARE, BOARDS_OF_MODEL = 10, 1000, 25, 10


@dataclass(frozen=True)
class Made:
    """What is made: the workload's digest and the model of each board, and the classes of hardware."""

    digests: tuple[str, ...]
    models: tuple[str, ...]
    hardware: tuple[str, ...]

    @classmethod
    def of(cls, configurations: int) -> Self:
        boards = max(FEWEST_BOARDS, configurations // ROWS_OF_BOARD)
        classes = max(1, configurations // boards // ROWS_OF_HARDWARE)
        return cls(
            digests=tuple(_digest(f"workload {number}") for number in range(boards)),
            models=tuple(f"preset:made-up-{number // BOARDS_OF_MODEL:02d}" for number in range(boards)),
            hardware=tuple(f"1x Made-up CPU {number:02d}" for number in range(classes)),
        )


class Configuration(NamedTuple):
    """One row of a board; `board` counts the boards from 0."""

    number: int
    board: int
    digest: str
    variant: str
    model: str
    hardware: str
    stack: tuple[str, ...]
    figures: Mapping[str, float]
    pareto: bool

    def result(self, result_id: str, measured_at: datetime) -> Result:
        """What a worker sends that has measured it."""
        return Result(
            id=result_id,
            created_at=measured_at,
            variant=VariantSummary(
                index=0,
                role=Role.SINGLE,
                label=" + ".join(self.stack) or "baseline",
                workload=workload(self.board),
                model=self.model,
                backend="torch",
                device=DeviceKind.CPU,
                stack=tuple({"name": name} for name in self.stack),
                workload_digest=self.digest,
                variant_digest=self.variant,
                primary_metric=METRIC_NAMES[0],
            ),
            verdict=Verdict(valid=True),
            metrics={name: _summary(name, value) for name, value in self.figures.items()},
            environment=environment(self.hardware),
            seed=0,
        )


@dataclass(frozen=True)
class Drawn:
    """Configurations as columns; the first one has the number `begin`."""

    made: Made
    begin: int
    hardware: NDArray[np.int64]
    stacks: tuple[tuple[str, ...], ...]
    figures: Mapping[str, NDArray[np.float64]]
    pareto: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.stacks)

    def part(self, begin: int, count: int) -> Self:
        """So many of them, the first one at `begin`."""
        here = slice(begin, begin + count)
        figures = {name: values[here] for name, values in self.figures.items()}
        return type(self)(
            self.made, self.begin + begin, self.hardware[here], self.stacks[here], figures, self.pareto[here]
        )

    def __iter__(self) -> Iterator[Configuration]:
        columns = self.hardware.tolist(), self.stacks, self.pareto.tolist()
        figures = zip(*(self.figures[name].tolist() for name in METRIC_NAMES), strict=True)
        rows = zip(*columns, figures, strict=True)
        for number, (hardware, stack, pareto, values) in enumerate(rows, self.begin):
            board = number % len(self.made.digests)
            yield Configuration(
                number=number,
                board=board,
                digest=self.made.digests[board],
                variant=_digest(f"{board} {stack} {number}"),
                model=self.made.models[board],
                hardware=self.made.hardware[hardware],
                stack=stack,
                figures=dict(zip(METRIC_NAMES, values, strict=True)),
                pareto=pareto,
            )


def draw(configurations: int, seed: int) -> Drawn:
    """So many configurations, the boards in turn."""
    made, random = Made.of(configurations), np.random.default_rng(seed)
    hardware = random.integers(len(made.hardware), size=configurations)
    sizes, which = random.integers(len(STACKS), size=configurations), random.random(configurations)
    speed = random.lognormal(3, 1, configurations)
    figures = {
        "tokens_per_s": speed,
        "ttft_s": 1 / speed,
        "weight_bytes": 1e9
        * random.choice((0.25, 0.5, 1.0, 2.0), configurations)
        * random.uniform(0.9, 1.1, configurations),
        "kld_mean": random.lognormal(-5, 2, configurations),
        "top1_agreement": random.uniform(0.8, 1, configurations),
    }
    stacks = tuple(
        STACKS[size][int(share * len(STACKS[size]))]
        for size, share in zip(sizes.tolist(), which.tolist(), strict=True)
    )
    boards = np.arange(configurations) % len(made.digests)
    return Drawn(made, 0, hardware, stacks, figures, _fronts(boards, hardware, figures))


def result_id(round_: int, number: int) -> str:
    """Of the result of a round, which come one after the other: ids are in the order in which results came."""
    return str(UUID(int=(round_ << 96) | (7 << 76) | (2 << 62) | number))


def measured_at(round_: int, number: int, configurations: int) -> datetime:
    """A second after the one before."""
    return BEGAN + timedelta(seconds=round_ * configurations + number)


def workload(board: int) -> Document:
    return {"kind": "generate", "prompt_tokens": 16 + board, "new_tokens": 64, "batch_size": 1}


def environment(hardware: str) -> Environment:
    return Environment(
        hardware_class=hardware,
        host_id="made-up",
        cpu_model="Made-up CPU",
        cpu_cores=8,
        memory_bytes=2**34,
        os="Linux",
        software=SOFTWARE,
    )


def interval(value: float) -> tuple[float, float]:
    return 0.98 * value, 1.02 * value


def _summary(name: str, value: float) -> MetricSummary:
    unit, better, _ = METRICS[name]
    return MetricSummary(unit=unit, better=better, value=value, ci=interval(value), n=30, replicates=3)


def _fronts(
    boards: NDArray[np.int64], hardware: NDArray[np.int64], figures: Mapping[str, NDArray[np.float64]]
) -> NDArray[np.bool_]:
    """Which configurations no other of the same board and hardware beats (optigpu.store.standings)."""
    costs = np.stack([-figures["tokens_per_s"], figures["weight_bytes"], figures["kld_mean"]], axis=1)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, place in enumerate(zip(boards.tolist(), hardware.tolist(), strict=True)):
        groups[place].append(number)
    found = np.empty(len(boards), dtype=bool)
    for members in groups.values():
        mine, others = costs[members][:, None], costs[members][None]
        beaten: NDArray[np.bool_] = np.all(others <= mine, axis=2) & np.any(others < mine, axis=2)
        found[members] = ~np.any(beaten, axis=1)
    return found


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
