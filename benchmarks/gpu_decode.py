"""`python -m benchmarks.gpu_decode`: our CUDA decoder beside gpt-fast's recipe and Hugging Face eager, on a GPU.

Batch 1, greedy, random weights of a preset's shapes. All are resident together and take turns, a text each; a
figure is the median of its turns. `limit` is what the bandwidth that a copy reaches in the same run allows for the
bytes that a step of that subject reads: its weights and, on average, its cache. Off a GPU there are no figures; with
--device cpu and TRITON_INTERPRET=1 all runs on tiny shapes, to try that it does.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rich.progress import track
from transformers import AutoConfig

from benchmarks.document import say, write
from benchmarks.gpt_fast_recipe import (
    WARM_UPS,
    GptFastModel,
    Shapes,
    Weights,
    compiled_within,
    rotary,
    with_linear,
)
from optigpu.hardware import probe
from optigpu.hardware.catalog import find
from optigpu.models.loading.load import load_model
from optigpu.models.reference import PRESETS, parse_reference
from optigpu.ops.decode.cpu.packing import TABLES
from optigpu.ops.decode.cuda.decoder import CudaDecoder
from optigpu.ops.decode.cuda.packing import numbers_shape
from optigpu.ops.decode.program import Block, Matrix, Mlp, Norm, Program, WeightKind, block_matrices
from optigpu.report.formats import Grid, columns, console, terminal
from optigpu.surgery.places import weight_of
from optigpu.vocabulary import DeviceKind, OptiGPUError

NO_GPU = "Not measured: this machine has no NVIDIA GPU."
SHAPE = (128, 128)
"""Prompt tokens and new tokens."""
MIDDLE = SHAPE[0] + SHAPE[1] // 2
"""Tokens before a step in the middle of such a text."""
WEIGHTS: tuple[Weights, ...] = ("int4", "int8", "bf16")
OURS: dict[str, tuple[WeightKind, ...]] = {"int4": ("w4", "w4k", "w3k"), "int8": ("w8",), "bf16": ("bf16",)}
"""Our weights beside those of gpt-fast; the first are `ours`."""
GROUP = 32
COPY = "a copy"
GOALS = (
    ("llama-3.1-8b", "bf16", 128, COPY, 0.8),
    ("llama-3.1-8b", "bf16", 128, "gpt-fast", 1.3),
    ("llama-3.1-8b", "int8", 128, "gpt-fast", 1.2),
    ("llama-3.1-8b", "int4", 128, COPY, 0.65),
    ("llama-3.1-8b", "int4", 128, "gpt-fast", 1.3),
    ("llama-3.1-8b", "int4", 8192, COPY, 0.55),
    ("gpt2", "int4", 128, "eager", 20.0),
)
"""A table, by its prompt's tokens too: the least speed relative to a peer, or share of a copy's bandwidth."""
COPIED_BYTES = {"cuda": 2**32, "cpu": 2**24}
COPIES = 20


class Text(NamedTuple):
    """Tokens of the prompt and new ones; how many there are at most, and in the middle of the new ones; the device."""

    prompt: int
    new: int
    capacity: int
    middle: int
    device: str


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
    """A subject's figures; `ratios` are ours over its, turn by turn. `share` is of what a copy moves."""

    name: str
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    step_bytes: int
    share: float
    share_of_sheet: float | None = None
    compile_s: float | None = None

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

    def __init__(self, name: str, shapes: Shapes, kind: WeightKind, text: Text) -> None:
        self.name = name
        program = random_program(shapes, kind, text.capacity, text.device)
        self.step_bytes = program_bytes(program) + cache_bytes(shapes, text.middle)
        self._decoder = CudaDecoder(program)
        self._capacity = text.capacity
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
    """gpt-fast's recipe, or its operators where compiling takes too long; behind a prompt of zeros."""

    name = "gpt-fast"

    def __init__(self, shapes: Shapes, weights: Weights, text: Text, compiling_s: float) -> None:
        with torch.device(text.device):
            model = self._model(shapes, weights, text.capacity)
            self._token = torch.zeros(1, 1, dtype=torch.int64)
            self._position = torch.zeros(1, dtype=torch.int64)
        with torch.device("meta"):
            read = GptFastModel(shapes, weights, text.capacity).weight_bytes()
        self.step_bytes = read + cache_bytes(shapes, text.middle)
        self._run, self.compile_s = compiled_within(compiling_s, model, self._token, self._position)
        if self.compile_s is None:
            self.name = f"{self.name}, not compiled"

    def _model(self, shapes: Shapes, weights: Weights, capacity: int) -> GptFastModel:
        return GptFastModel(shapes, weights, capacity)

    def start(self, prompt: torch.Tensor) -> None:
        """From the end of the prompt."""
        self._position.fill_(prompt.shape[1])
        self._token = prompt[:, -1:].to(self._position.device)

    def decode(self, steps: int) -> None:
        """A replay for each token."""
        for _ in range(steps):
            self._token = self._run(self._token, self._position)
            self._position += 1


class TorchAo(GptFast):
    """gpt-fast's model in bfloat16, whose linear layers torchao quantizes; compiled as that is."""

    name = "torchao"

    def _model(self, shapes: Shapes, weights: Weights, capacity: int) -> GptFastModel:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        model = with_linear(GptFastModel(shapes, "bf16", capacity))
        tiles = partial(Int4WeightOnlyConfig, group_size=GROUP, int4_packing_format="tile_packed_to_4d")
        quantize_(model, tiles() if weights == "int4" else Int8WeightOnlyConfig())
        return model


class Eager:
    """transformers in bfloat16 as it comes, in a bare loop."""

    name = "eager"

    def __init__(self, preset: str, shapes: Shapes, text: Text) -> None:
        reference = parse_reference(f"preset:{preset}")
        self._model = load_model(reference, device=text.device, dtype="bfloat16")
        embedding = self._model.get_input_embeddings()
        tied = self._model.get_output_embeddings().weight is embedding.weight
        read = sum(parameter.numel() for parameter in self._model.parameters())
        read -= 0 if tied else weight_of(embedding).numel()
        self.step_bytes = 2 * read + cache_bytes(shapes, text.middle)
        self._token: Any = None
        self._cache: Any = None

    def start(self, prompt: torch.Tensor) -> None:
        """A new cache, and the prompt."""
        self._cache = None
        self._token = prompt.to(self._model.device)
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


def random_program(shapes: Shapes, kind: WeightKind, context: int, device: str = "cuda") -> Program:
    """On the device, block by block, packed from the start: random bits, and scales that keep their products' size."""
    heads = shapes.heads + 2 * shapes.kv_heads
    with torch.device(device):
        blocks = tuple(
            Block(
                first=_norm(shapes),
                qkv=(random_matrix(kind, heads * shapes.head_size, shapes.width),),
                output=random_matrix(kind, shapes.width, shapes.heads * shapes.head_size),
                second=_norm(shapes),
                mlp=Mlp(
                    gate=random_matrix(kind, shapes.inner, shapes.width) if shapes.gated else None,
                    up=random_matrix(kind, shapes.inner, shapes.width),
                    down=random_matrix(kind, shapes.width, shapes.inner),
                ),
                scale=shapes.head_size**-0.5,
                window=None,
                rotary=0 if shapes.gated else None,
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
            rotaries=((lambda length: rotary(length, shapes.head_size)),) if shapes.gated else (),
            blocks=blocks,
            final=_norm(shapes),
            head=head,
            rotary_size=shapes.head_size if shapes.gated else 0,
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
    found = [program.head, *(matrix for block in program.blocks for matrix in block_matrices(block))]
    return sum(
        tensor.numel() * tensor.element_size()
        for matrix in found
        for tensor in (matrix.numbers, matrix.scale, matrix.unit)
        if tensor is not None
    )


def cache_bytes(shapes: Shapes, tokens: int = MIDDLE) -> int:
    """Keys and values in bfloat16 that a step after so many tokens reads."""
    return 2 * 2 * shapes.layers * shapes.kv_heads * shapes.head_size * tokens


def copy_bandwidth(device: str = "cuda") -> float:
    """Bytes/s that a large copy on the device reads and writes, the median of COPIES."""
    source = torch.randint(256, (COPIED_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [seconds_of(lambda: target.copy_(source)) for _ in range(WARM_UPS + COPIES)]
    return 2 * source.nbytes / statistics.median(seconds[WARM_UPS:])


def seconds_of(run: Callable[[], object]) -> float:
    """Until the device has done what it launches."""
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    started = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - started


def measure(
    preset: str, weights: Weights, text: Text, bandwidth: float, options: argparse.Namespace
) -> list[Line]:
    """Ours first, and all others but those that are left out. Who begins rotates from turn to turn."""
    shapes = shapes_of(preset)
    card = next((find(gpu.name) for gpu in probe().gpus(DeviceKind.CUDA)), None)
    sheet = card.memory_bandwidth_bytes_per_s if card else None
    prompt = torch.randint(shapes.vocabulary, (1, text.prompt), generator=torch.Generator().manual_seed(0))
    with _ready(preset, shapes, weights, text, options) as subjects:
        rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        order = list(subjects)
        warm_ups = 0 if text.device == "cpu" else WARM_UPS  # a rehearsal's figures say nothing
        turns = range(warm_ups + options.turns)
        for turn in track(turns, f"{preset} {weights}", console=console(stderr=True)):
            for subject in order:
                subject.start(prompt)
                rate = text.new / seconds_of(partial(subject.decode, text.new))
                if turn >= warm_ups:
                    rates[subject.name].append(rate)
            order = [*order[1:], order[0]]
        lines: list[Line] = []
        for subject in subjects:
            mine = rates[subject.name]
            read = statistics.median(mine) * subject.step_bytes
            ratios = tuple(a / b for a, b in zip(rates["ours"], mine, strict=True))
            derived = (read / bandwidth, read / sheet if sheet else None, getattr(subject, "compile_s", None))
            lines.append(Line(subject.name, tuple(mine), ratios, subject.step_bytes, *derived))
        return lines


@contextmanager
def _ready(
    preset: str, shapes: Shapes, weights: Weights, text: Text, options: argparse.Namespace
) -> Iterator[list[Subject]]:
    """The subjects, and their memory given back afterwards."""
    makers: dict[str, Callable[[], Subject]] = {
        **{name: partial(Ours, name, shapes, kind, text) for name, kind in ours_of(weights).items()},
        GptFast.name: partial(GptFast, shapes, weights, text, options.compiling_s),
        Eager.name: partial(Eager, preset, shapes, text),
    }
    if find_spec("torchao") and weights != "bf16":
        makers[TorchAo.name] = partial(TorchAo, shapes, weights, text, options.compiling_s)
    subjects = [make() for name, make in makers.items() if name not in options.without]
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
            "" if line.share_of_sheet is None else f"{line.share_of_sheet:.0%}",
            "" if line.compile_s is None else f"{line.compile_s:.0f} s",
        )
        for line in lines
    )
    figures = ("tokens/s:", "ours against it:", "lowest..highest:", "bytes a token:", "limit:")
    headings = (*figures, "share:", "of the data sheet:", "compiled in:")
    return Grid(title, columns("what", *headings), tuple(rows))


def goals(tables: dict[tuple[str, str, int], list[Line]]) -> list[tuple[str, bool]]:
    """The goals of the measured tables, and whether they were reached."""
    found = []
    for preset, weights, depth, peer, least in GOALS:
        lines = {line.name: line for line in tables.get((preset, weights, depth), ())}
        if peer in lines or (lines and peer == COPY):
            reached = lines["ours"].share if peer == COPY else lines[peer].ratio
            text = f"preset:{preset}, {weights} after {depth} tokens: {reached:.2f}x of {peer}"
            found.append((f"{text} (at least {least}x)", reached >= least))
    return found


def main() -> int:
    """Measures and prints; ends with status 1 when a goal is missed, and 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_decode", description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["gpt2", "llama-3.1-8b"])
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    others = [name for weights in WEIGHTS for name in ours_of(weights) if name != "ours"]
    others += [GptFast.name, TorchAo.name, Eager.name]
    parser.add_argument("--without", nargs="+", default=[], choices=others, help="what is left out")
    parser.add_argument("--turns", type=int, default=9, help="texts of each subject")
    parser.add_argument("--depths", type=int, nargs="+", default=[SHAPE[0]], help="tokens of the prompt")
    parser.add_argument("--compiling-s", type=float, default=600, help="how long gpt-fast may be compiled")
    parser.add_argument("--device", default="cuda", choices=COPIED_BYTES, help="cpu: to try that it runs")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    try:
        return _run(options)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.device == "cuda" and not probe().has(DeviceKind.CUDA):
        raise OptiGPUError(NO_GPU)
    bandwidth = copy_bandwidth(options.device)
    console().print(f"a copy moves {bandwidth / 1e9:.0f} GB/s, read and written", markup=False)
    tables: dict[tuple[str, str, int], list[Line]] = {}
    for preset, weights, depth in product(options.presets, options.weights, options.depths):
        new = SHAPE[1] if options.device == "cuda" else 2
        text = Text(depth, new, depth + new + 1, depth + new // 2, options.device)
        lines = tables[preset, weights, depth] = measure(preset, weights, text, bandwidth, options)
        title = f"preset:{preset}, {weights}, batch 1, {text.prompt} + {text.new} tokens"
        console().print(terminal(shown(title, lines, bandwidth)))
        if options.output:  # after each table, since who rents a GPU may have to stop
            write(options.output, "gpu_decode", {"bandwidth": bandwidth, **figures(tables)})
    return say(goals(tables))


def figures(tables: dict[tuple[str, str, int], list[Line]]) -> dict[str, Any]:
    """As JSON."""
    found = {" ".join(map(str, table)): [asdict(line) for line in lines] for table, lines in tables.items()}
    return {"tables": found, "goals": [{"goal": text, "reached": met} for text, met in goals(tables)]}


if __name__ == "__main__":
    sys.exit(main())
