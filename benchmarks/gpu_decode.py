"""`python -m benchmarks.gpu_decode`: our CUDA decoder beside gpt-fast's recipe and Hugging Face eager, on a GPU.

Batch 1, greedy, random weights of a preset's shapes. All are resident together and take turns, a text each; a
figure is the median of its turns. `limit` is what the bandwidth that a copy reaches in the same run allows for the
bytes that a step of that subject reads: its weights and, on average, its cache. Off a GPU there are no figures.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import track
from transformers import AutoConfig

from benchmarks.document import say, write
from benchmarks.gpt_fast_recipe import GptFastModel, Shapes, Weights, compiled, rotary
from optigpu.hardware import probe
from optigpu.models.loading.load import load_model
from optigpu.models.presets import PRESETS
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.packing import TABLES
from optigpu.ops.decode.cuda.decoder import CudaDecoder
from optigpu.ops.decode.cuda.packing import numbers_shape
from optigpu.ops.decode.program import Block, Matrix, Norm, Program, WeightKind
from optigpu.report import Grid, console, terminal
from optigpu.report.formats import columns
from optigpu.surgery.places import weight_of
from optigpu.vocabulary import DeviceKind, OptiGPUError

NO_GPU = "Not measured: this machine has no NVIDIA GPU."
SHAPE = (128, 128)
"""Prompt tokens and new tokens."""
MIDDLE = SHAPE[0] + SHAPE[1] // 2
"""Tokens before a step in the middle of a text, whose cache `cache_bytes` counts."""
WEIGHTS: tuple[Weights, ...] = ("int4", "int8", "bf16")
OURS: dict[str, tuple[WeightKind, ...]] = {"int4": ("w4", "w4k", "w3k"), "int8": ("w8",), "bf16": ("bf16",)}
"""Our weights beside those of gpt-fast; the first are `ours`."""
GROUP = 32
GOALS = {
    ("llama-3.1-8b", "int4"): ("gpt-fast", 1.5),
    ("llama-3.1-8b", "int8"): ("gpt-fast", 1.2),
    ("llama-3.1-8b", "bf16"): ("gpt-fast", 1.05),
    ("gpt2", "int4"): ("eager", 20.0),
}
"""The peer, and the least speed relative to it."""
WARM_UPS = 3
COPIED_BYTES = 2**32
COPIES = 20


class Subject(Protocol):
    """What decodes a text. `step_bytes`: what a step reads of weights and, in the middle of a text, of its cache."""

    name: str
    step_bytes: int

    def start(self, prompt: torch.Tensor) -> None:
        """Takes the prompt, int64 [1, count]."""

    def decode(self, steps: int) -> None:
        """So many tokens."""


@dataclass(frozen=True)
class Line:
    """A subject's figures; `ratios` are ours over its, turn by turn."""

    name: str
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    step_bytes: int
    share: float

    @property
    def rate(self) -> float:
        """The median in tokens/s."""
        return statistics.median(self.rates)

    @property
    def ratio(self) -> float:
        """The median over the turns."""
        return statistics.median(self.ratios)


class Ours:
    """CudaDecoder on a random program."""

    def __init__(self, name: str, shapes: Shapes, kind: WeightKind, capacity: int) -> None:
        self.name = name
        program = random_program(shapes, kind, capacity)
        self.step_bytes = program_bytes(program) + cache_bytes(shapes)
        self._decoder = CudaDecoder(program)
        self._capacity = capacity
        self._token: torch.Tensor | None = None

    def start(self, prompt: torch.Tensor) -> None:
        """An empty cache, and the prompt."""
        self._decoder.begin(1, self._capacity)
        self._token = self._decoder.extend(prompt).argmax(dim=1, keepdim=True)

    def decode(self, steps: int) -> None:
        """In one call."""
        assert self._token is not None
        self._decoder.decode(self._token, steps)


class GptFast:
    """gpt-fast's recipe. The prompt goes through the same step, token by token, which is not timed."""

    name = "gpt-fast"

    def __init__(self, shapes: Shapes, weights: Weights, capacity: int) -> None:
        with torch.device("cuda"):
            model = GptFastModel(shapes, weights, capacity)
        self.step_bytes = model.weight_bytes() + cache_bytes(shapes)
        self._run = compiled(model)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        self._position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def start(self, prompt: torch.Tensor) -> None:
        """From position 0."""
        self._position.zero_()
        for token in prompt.cuda().unbind(1):
            self._token = self._run(token[:, None], self._position)
            self._position += 1

    def decode(self, steps: int) -> None:
        """A replay for each token."""
        for _ in range(steps):
            self._token = self._run(self._token, self._position)
            self._position += 1


class Eager:
    """transformers in bfloat16 as it comes, in a bare loop."""

    name = "eager"

    def __init__(self, preset: str, shapes: Shapes) -> None:
        reference = parse_reference(f"preset:{preset}")
        self._model = load_model(reference, device="cuda", dtype="bfloat16")
        embedding = self._model.get_input_embeddings()
        tied = self._model.get_output_embeddings().weight is embedding.weight
        read = sum(parameter.numel() for parameter in self._model.parameters())
        self.step_bytes = 2 * (read - (0 if tied else weight_of(embedding).numel())) + cache_bytes(shapes)
        self._token: Any = None
        self._cache: Any = None

    def start(self, prompt: torch.Tensor) -> None:
        """A new cache, and the prompt."""
        self._cache = None
        self._token = prompt.cuda()
        self.decode(1)

    def decode(self, steps: int) -> None:
        """A forward pass for each token."""
        with torch.no_grad():
            for _ in range(steps):
                found = self._model(input_ids=self._token, past_key_values=self._cache, use_cache=True)
                self._cache = found.past_key_values
                self._token = found.logits[:, -1:].argmax(dim=2)


def shapes_of(preset: str) -> Shapes:
    """The shapes of a preset that is like GPT-2 or like Llama."""
    known = PRESETS[preset]
    config = AutoConfig.for_model(known.model_type, **known.config)
    width, heads, gated = config.hidden_size, config.num_attention_heads, known.model_type != "gpt2"
    return Shapes(
        gated=gated,
        width=width,
        heads=heads,
        kv_heads=config.num_key_value_heads if gated else heads,
        head_size=getattr(config, "head_dim", None) or width // heads,
        inner=config.intermediate_size if gated else 4 * width,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
    )


def ours_of(weights: Weights) -> dict[str, WeightKind]:
    """Our subjects beside those of gpt-fast, by name."""
    first, *others = OURS[weights]
    return {"ours": first, **{f"ours, {kind}": kind for kind in others}}


def random_program(shapes: Shapes, kind: WeightKind, context: int) -> Program:
    """On the GPU, block by block, packed from the start: random bits, and scales that keep their products' size."""
    heads = shapes.heads + 2 * shapes.kv_heads
    with torch.device("cuda"):
        blocks = tuple(
            Block(
                first=_norm(shapes),
                qkv=(random_matrix(kind, heads * shapes.head_size, shapes.width),),
                output=random_matrix(kind, shapes.width, shapes.heads * shapes.head_size),
                second=_norm(shapes),
                gate=random_matrix(kind, shapes.inner, shapes.width) if shapes.gated else None,
                up=random_matrix(kind, shapes.inner, shapes.width),
                down=random_matrix(kind, shapes.width, shapes.inner),
                scale=shapes.head_size**-0.5,
                window=None,
            )
            for _ in range(shapes.layers)
        )
        head = random_matrix(kind, shapes.vocabulary, shapes.width)
        return Program(
            width=shapes.width,
            heads=shapes.heads,
            kv_heads=shapes.kv_heads,
            head_size=shapes.head_size,
            inner=shapes.inner,
            vocabulary=shapes.vocabulary,
            context=context,
            activation="silu" if shapes.gated else "gelu_tanh",
            embedding=head,
            positions=None if shapes.gated else random_matrix("w8", context, shapes.width),
            rotary=(lambda length: rotary(length, shapes.head_size)) if shapes.gated else None,
            blocks=blocks,
            final=_norm(shapes),
            head=head,
        )


def random_matrix(kind: WeightKind, outputs: int, inputs: int) -> Matrix:
    """Weights whose deviation is inputs**-0.5; numbers are all as likely."""
    if kind == "bf16":
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16).mul_(inputs**-0.5)
        return Matrix("bf16", outputs, inputs, 0, weight, None, None)
    numbers = torch.randint(-(2**31), 2**31, numbers_shape(kind, outputs, inputs), dtype=torch.int32)
    half = 8 if kind == "w4" else 128
    values = TABLES.get(kind, range(-half, half))
    deviation = statistics.mean(value**2 for value in values) ** 0.5
    scale = torch.full((outputs, inputs // GROUP), 100, dtype=torch.int8)
    unit = torch.full((outputs,), inputs**-0.5 / deviation / 100, dtype=torch.bfloat16)
    return Matrix(kind, outputs, inputs, GROUP, numbers, scale, None, unit)


def _norm(shapes: Shapes) -> Norm:
    if shapes.gated:
        return Norm("rms", torch.ones(shapes.width), None, 1e-5)
    return Norm("layer", torch.ones(shapes.width), torch.zeros(shapes.width), 1e-5)


def program_bytes(program: Program) -> int:
    """Of the matrices, which a step reads whole; norms and one row of the embedding do not count."""
    found = [program.head]
    for block in program.blocks:
        found += [*block.qkv, block.output, block.up, block.down, *([block.gate] if block.gate else [])]
    return sum(
        tensor.numel() * tensor.element_size()
        for matrix in found
        for tensor in (matrix.numbers, matrix.scale, matrix.unit)
        if tensor is not None
    )


def cache_bytes(shapes: Shapes) -> int:
    """Keys and values in bfloat16 that a step in the middle of a text reads."""
    return 2 * 2 * shapes.layers * shapes.kv_heads * shapes.head_size * MIDDLE


def copy_bandwidth() -> float:
    """Bytes/s that a large copy on the device reads and writes, the median of COPIES."""
    source = torch.randint(256, (COPIED_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = [seconds_of(lambda: target.copy_(source)) for _ in range(WARM_UPS + COPIES)]
    return 2 * COPIED_BYTES / statistics.median(seconds[WARM_UPS:])


def seconds_of(run: Callable[[], object]) -> float:
    """Until the device has done what it launches."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(
    preset: str, weights: Weights, turns: int, bandwidth: float, without: Collection[str] = ()
) -> list[Line]:
    """Ours first, and all others but those `without`. Who begins rotates from turn to turn."""
    shapes, (prompt_tokens, new_tokens) = shapes_of(preset), SHAPE
    prompt = torch.randint(shapes.vocabulary, (1, prompt_tokens), generator=torch.Generator().manual_seed(0))
    with _ready(preset, shapes, weights, sum(SHAPE) + 1, without) as subjects:
        rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        order = list(subjects)
        for turn in track(range(WARM_UPS + turns), f"{preset} {weights}", console=console(stderr=True)):
            for subject in order:
                subject.start(prompt)
                rate = new_tokens / seconds_of(partial(subject.decode, new_tokens))
                if turn >= WARM_UPS:
                    rates[subject.name].append(rate)
            order = [*order[1:], order[0]]
        return [
            Line(
                subject.name,
                tuple(rates[subject.name]),
                tuple(a / b for a, b in zip(rates["ours"], rates[subject.name], strict=True)),
                subject.step_bytes,
                statistics.median(rates[subject.name]) * subject.step_bytes / bandwidth,
            )
            for subject in subjects
        ]


@contextmanager
def _ready(
    preset: str, shapes: Shapes, weights: Weights, capacity: int, without: Collection[str]
) -> Iterator[list[Subject]]:
    """The subjects, and their memory given back afterwards."""
    makers: dict[str, Callable[[], Subject]] = {
        **{name: partial(Ours, name, shapes, kind, capacity) for name, kind in ours_of(weights).items()},
        GptFast.name: partial(GptFast, shapes, weights, capacity),
        Eager.name: partial(Eager, preset, shapes),
    }
    subjects = [make() for name, make in makers.items() if name not in without]
    try:
        yield subjects
    finally:
        subjects.clear()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def shown(title: str, lines: list[Line], bandwidth: float) -> Grid:
    """The figures as a table for a person."""
    rows = (
        (
            line.name,
            f"{line.rate:.1f}",
            f"{line.ratio:.2f}x",
            f"{min(line.ratios):.2f}..{max(line.ratios):.2f}",
            f"{line.step_bytes / 1e6:.0f} MB",
            f"{bandwidth / line.step_bytes:.0f} tokens/s",
            f"{line.share:.0%}",
        )
        for line in lines
    )
    headings = ("tokens/s:", "ours against it:", "lowest..highest:", "bytes a token:", "limit:", "share:")
    return Grid(title, columns("what", *headings), tuple(rows))


def goals(tables: dict[tuple[str, str], list[Line]]) -> list[tuple[str, bool]]:
    """The goals of the measured tables, and whether they were reached."""
    found = []
    for (preset, weights), (name, least) in GOALS.items():
        for line in tables.get((preset, weights), ()):
            if line.name == name:
                text = f"preset:{preset}, {weights}: {line.ratio:.2f}x of {name} (at least {least}x)"
                found.append((text, line.ratio >= least))
    return found


def main() -> int:
    """Measures and prints; ends with status 1 when a goal is missed, and 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_decode", description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["gpt2", "llama-3.1-8b"])
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    others = [name for weights in WEIGHTS for name in ours_of(weights) if name != "ours"]
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=[*others, GptFast.name, Eager.name],
        help="what is left out, to save time",
    )
    parser.add_argument("--turns", type=int, default=9, help="texts of each subject")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    try:
        return _run(options)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2


def _run(options: argparse.Namespace) -> int:
    if not probe().has(DeviceKind.CUDA):
        raise OptiGPUError(NO_GPU)
    bandwidth = copy_bandwidth()
    console().print(f"a copy moves {bandwidth / 1e9:.0f} GB/s, read and written", markup=False)
    tables: dict[tuple[str, str], list[Line]] = {}
    for preset in options.presets:
        for weights in options.weights:
            lines = tables[preset, weights] = measure(
                preset, weights, options.turns, bandwidth, options.without
            )
            title = f"preset:{preset}, {weights}, batch 1, {SHAPE[0]} + {SHAPE[1]} tokens"
            console().print(terminal(shown(title, lines, bandwidth)))
            if options.output:  # after each table, since who rents a GPU may have to stop
                write(options.output, "gpu_decode", {"bandwidth": bandwidth, **figures(tables)})
    return say(goals(tables))


def figures(tables: dict[tuple[str, str], list[Line]]) -> dict[str, Any]:
    """As JSON."""
    found = {
        f"{preset} {weights}": [asdict(line) for line in lines] for (preset, weights), lines in tables.items()
    }
    return {
        "shape": SHAPE,
        "tables": found,
        "goals": [{"goal": text, "reached": met} for text, met in goals(tables)],
    }


if __name__ == "__main__":
    sys.exit(main())
