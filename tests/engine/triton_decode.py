"""Scenes for the decoder's Triton operators, and what each must show; run in separate processes.

A kernel is interpreted or compiled from the moment that its module is imported, so test_ops_decode_triton.py starts
`python -c "from tests.engine.triton_decode import NAME; NAME()"` with the environment that they need.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from optigpu.ops.decode.calls import split_heads, turned
from optigpu.ops.decode.cpu.packing import pack
from optigpu.ops.decode.cuda.decoder import CudaDecoder, prefill
from optigpu.ops.decode.cuda.packing import (
    pack_for_cuda,
    places_of_finer,
    rows_from_cuda,
    unpack_from_cuda,
)
from optigpu.ops.decode.cuda.state import LayerCache, State
from optigpu.ops.decode.cuda.triton_attention import PartialSoftmax, attend_call, join_call
from optigpu.ops.decode.cuda.triton_embedding import embed_call
from optigpu.ops.decode.cuda.triton_linear import best_of, linear_call
from optigpu.ops.decode.cuda.triton_steps import choose_call
from optigpu.ops.decode.program import (
    FEW_BITS,
    WEIGHT_KINDS,
    Activation,
    CacheKind,
    FinerRows,
    Matrix,
    Norm,
    Program,
    Sampling,
    WeightKind,
)
from optigpu.ops.decode.selftest import capped, normed_heads
from optigpu.ops.launch import LaunchTarget
from optigpu.vocabulary import ReplicateError, UnsupportedError
from tests.engine.decode_reference import ReferenceDecoder, eight_bits, norm_of, untied
from tests.engine.random_programs import (
    LIKE_GEMMA,
    LIKE_MIXTRAL,
    LIKE_NEOX,
    LIKE_OLMO,
    LIKE_OSS,
    Packing,
    Shape,
    random_program,
)

DIVIDED = LaunchTarget(warps=3, dp4a=False)
"""As on a GPU, several tiles for each of several programs."""
ROUNDING = 1e-6
"""Of float32 sums, in terms of the sum of what is added without its signs."""
VOCABULARY, SEQUENCES = 150, 2
CACHES: tuple[CacheKind, ...] = ("bf16", "int8")
TINY = {
    "llama": Shape(True, 128, 4, 2, 32, 160, VOCABULARY, window=3, activation="silu", biases=False),
    "gpt2": Shape(False, 96, 2, 2, 32, 128, VOCABULARY, positions=10.0),
    "all": LIKE_GEMMA._replace(
        width=64,
        kv_heads=2,
        head_size=16,
        inner=64,
        window=2,
        activation="relu2",
        head_norms="whole",
        rotary_size=8,
        neighbours=True,
        by_groups=True,
        parallel=True,
        sinks=True,
        experts=4,
        shared=True,
    ),
    "gemma": LIKE_GEMMA._replace(width=64, window=2, inner=96),
    "neox": LIKE_NEOX._replace(width=64),
    "olmo": LIKE_OLMO._replace(width=64),
    "mixtral": LIKE_MIXTRAL._replace(width=64, inner=64),
    "oss": LIKE_OSS._replace(width=64, inner=64),
}
OTHERS = tuple(TINY)[2:]
"""What further families have."""
SEEDS = range(12)


class Draw:
    """Seeded random tensors."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, size: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * size

    def norm(self, kind: str, width: int) -> Norm:
        bias = self(width) if kind == "layer" else None
        return Norm("layer" if kind == "layer" else "rms", 1 + self(width, size=0.1), bias, 1e-5)


def random_shape(seed: int) -> Shape:
    """Small, with a choice of everything that a description has."""
    flags = ("rotary", "neighbours", "by_groups", "parallel", "alternates", "sinks", "shared", "biases")
    choices: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(flags, (False, True)),
        "width": (64, 96),
        "kv_heads": (1, 2, 4),
        "head_size": (16, 24),
        "window": (None, 2),
        "activation": ("silu", "relu2", "gelu_tanh"),
        "norms": ("before", "after", "both"),
        "head_norms": (None, "head", "whole"),
        "rotary_size": (None, 8),
        "scales": ((1.0, 1.0), (3.0, 0.5)),
        "caps": ((None, None), (3.0, 2.0)),
        "experts": (0, 3),
        "clamp": (None, (1.7, 2.0)),
    }
    choose = random.Random(seed).choice
    made: dict[str, Any] = {name: choose(values) for name, values in choices.items()}
    return Shape(heads=4, inner=64, vocabulary=VOCABULARY, **made)


def shape_of(family: str) -> Shape:
    """Blocks of a family, or those of `random_shape` where that is a number."""
    return random_shape(int(family)) if family.isdigit() else TINY[family]


def tiny_program(
    packing: Packing, family: str, kinds: tuple[WeightKind, ...], device: str = "cpu", blocks: int = 2
) -> Program:
    return random_program(shape_of(family)._replace(blocks=blocks), *kinds, packing=packing, device=device)


def assert_step_as_reference(
    family: str, kinds: tuple[WeightKind, ...], kv: CacheKind, device: str = "cpu", blocks: int = 2
) -> None:
    """The logits of whole steps, of two sequences; the largest error is at most 1e-3 of the largest logit."""
    count = {"gpt2": 2, "llama": 4}.get(family, 3)  # past the window
    tokens, expected = untied(tiny_program(pack, family, kinds, blocks=blocks), kv, SEQUENCES, count)
    decoder = CudaDecoder(tiny_program(pack_for_cuda, family, kinds, device, blocks), kv)
    decoder.begin(SEQUENCES, count)
    for token, logits in zip(tokens.unbind(1), expected, strict=True):
        found = decoder.extend(token[:, None]).cpu()
        error = float((found - logits).abs().max() / logits.abs().max())
        assert error <= 1e-3, (family, kinds, kv, decoder.length, error)


def steps() -> None:
    """Weights of each kind in blocks of both families, with both caches; then several kinds in one program."""
    of_both: tuple[tuple[WeightKind, CacheKind, CacheKind], ...] = (
        *((kind, "bf16", "int8") for kind in FEW_BITS),
        *(("w8", "int8", "bf16"), ("bf16", "int8", "bf16")),
    )
    for kind, of_llama, of_gpt2 in of_both:
        assert_step_as_reference("llama", (kind,), of_llama, blocks=1)
        assert_step_as_reference("gpt2", ("w3k", "w4k") if kind == "w3k" else (kind,), of_gpt2, blocks=1)
    assert_step_as_reference("llama", ("w8", "w4", "w4", "bf16", "w4"), "bf16")


def everything() -> None:
    """A step and a prompt of blocks with all that a description may have, but for a clamp."""
    assert_step_as_reference("all", ("w8", "w4", "bf16"), "int8")
    assert_prefills("all", "w4", "bf16")


def other_steps() -> None:
    """Steps of further families, and of random ones."""
    mixes: tuple[tuple[WeightKind, ...], ...] = (
        ("w4",),
        ("w8", "w4", "bf16"),
        ("w6", "w5"),
        ("w4k", "w8"),
        ("w3k",),
    )
    for index, family in enumerate((*OTHERS, *map(str, SEEDS))):
        assert_step_as_reference(family, mixes[index % 5], CACHES[index // 5 % 2])


def linear_layers() -> None:
    """Every remainder, against float64; the activations are rounded by the same float32 arithmetic."""
    shapes = [  # rows, inputs, outputs, group: one of everything, remainders, whole tiles, several passes over rows
        (1, 32, 1, 32),
        (3, 96, 37, 32),
        (5, 128, 66, 128),
        (2, 192, 70, 64),
        (1, 256, 64, 64),
    ]
    for (rows, inputs, outputs, group), kind in itertools.product(shapes, WEIGHT_KINDS):
        draw = Draw(inputs + outputs)
        matrix = pack_for_cuda(draw(outputs, inputs), draw(outputs), kind, group)
        x = draw(rows, inputs)
        x[-1, : group // 2] *= 1e3  # outliers stay in their group
        x[0, -group:] = 0
        y = torch.full((rows, outputs), torch.nan)
        linear_call(x, matrix, y, DIVIDED).run()
        assert_near(y, *exact_linear(x, matrix))
    draw = Draw(133)
    uneven = pack_for_cuda(draw(33, 100), None, "bf16", 0)
    y = torch.full((2, 33), torch.nan)
    linear_call(x := draw(2, 100), uneven, y, DIVIDED).run()
    assert_near(y, *exact_linear(x, uneven))


def every_weight() -> None:
    for kind, group in itertools.product(WEIGHT_KINDS, (32, 64)):
        assert_every_weight(kind, group, torch.device("cpu"))


def assert_every_weight(kind: WeightKind, group: int, device: torch.device) -> None:
    """Products are bit by bit the unpacked weights, times an activation whose number is 127 and whose step is 1."""
    inputs, outputs = 96 if group == 32 else 2 * group, 37
    weight = Draw(group)(outputs, inputs).to(device)
    weight[3] = 0
    matrix = pack_for_cuda(weight, None, kind, group)
    y = torch.full((inputs, outputs), torch.nan, device=device)
    target = DIVIDED if device.type == "cpu" else LaunchTarget.of(device)
    linear_call(127 * torch.eye(inputs, device=device), matrix, y, target).run()
    assert torch.equal(y, (127 * unpack_from_cuda(matrix).double()).float().T), (kind, group)


def linear_endings() -> None:
    """Norms before, and activation, gate, residual and product after."""
    draw = Draw(0)
    x, residual = draw(3, 96) + 10, draw(3, 50)
    up, gate = (pack_for_cuda(draw(50, 96, size=0.1), draw(50), "bf16", 0) for _ in range(2))
    for kind in ("rms", "layer"):
        norm = draw.norm(kind, 96)
        h = norm_of(x, norm)
        linear_call(x, up, y := torch.empty(3, 50), DIVIDED, norm=norm).run()
        assert_near(y, *exact_linear(h, up))
    exact, size = exact_linear(x, up)
    beside, beside_size = exact_linear(x, gate)
    linear_call(x, up, y := residual.clone(), DIVIDED, into="add").run()
    assert_near(y, residual + exact, size)
    linear_call(x, up, y := residual.clone(), DIVIDED, into="times").run()
    assert_near(y, residual * exact, residual.abs() * size)
    functions = torch.nn.functional
    activations: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": functions.silu,
        "gelu": functions.gelu,
        "relu": functions.relu,
        "gelu_tanh": partial(functions.gelu, approximate="tanh"),
    }
    for name, function in activations.items():
        linear_call(x, up, y := torch.empty(3, 50), DIVIDED, activation=name).run()
        assert_near(y, function(exact), 2 * size)
        linear_call(x, up, y, DIVIDED, gate=gate, activation=name).run()
        assert_near(y, function(beside) * exact, 2 * beside_size * exact.abs() + beside.abs() * size)
    eights = pack_for_cuda(draw(50, 96), None, "w8", 32), pack_for_cuda(draw(50, 96), draw(50), "w8", 32)
    linear_call(x, eights[0], y, DIVIDED, gate=eights[1], activation="relu").run()
    (exact, size), (beside, beside_size) = (exact_linear(x, matrix) for matrix in eights)
    assert_near(y, beside.relu() * exact, beside_size * exact.abs() + beside.abs() * size)


def most_likely() -> None:
    """The head's best token, the first of equal ones, over programs and tiles; and logits that are not finite."""
    draw = Draw(3)
    head = pack_for_cuda(draw(90, 64), None, "bf16", 0)
    best = best_of(head, 3, DIVIDED)
    assert best.value.shape[1] > 1
    state = State(
        torch.tensor([1, 2, 3]), torch.tensor([4, 4, 4]).int(), torch.zeros(3).int(), torch.zeros(3, 8).long()
    )
    x, logits = draw(3, 64), torch.empty(3, 90)
    linear_call(x, head, logits, DIVIDED, best=best).run()
    choose_call(best, state).run()
    assert torch.equal(state.tokens, logits.argmax(dim=1))
    assert torch.equal(state.chosen[:, 4], state.tokens)
    assert state.position.tolist() == [5, 5, 5]
    assert state.not_finite.tolist() == [0, 0, 0]
    linear_call(torch.zeros(3, 64), head, logits, DIVIDED, best=best).run()
    choose_call(best, state).run()
    assert state.tokens.tolist() == [0, 0, 0]
    for row, value in enumerate((torch.nan, torch.inf)):
        x[row, 7] = value
    linear_call(x, head, logits, DIVIDED, best=best).run()
    choose_call(best, state).run()
    assert state.not_finite.tolist() == [1, 1, 0]
    for kind in WEIGHT_KINDS[:-1]:
        matrix = pack_for_cuda(draw(90, 64), None, kind, 32)
        linear_call(x, matrix, logits, DIVIDED).run()
        assert not logits[0].isfinite().any()
        assert not logits[1].isfinite().any()
        assert logits[2].isfinite().all()


def beginnings() -> None:
    """Embeddings of every kind and group, with and without positions, in a step and for a prompt."""
    draw, width = Draw(4), 1152
    state = State(
        torch.tensor([3, 19]), torch.tensor([8, 8]).int(), torch.zeros(2).int(), torch.zeros(2, 9).long()
    )
    for kind, group in itertools.product(WEIGHT_KINDS, (32, 64, 128)):
        embedding = pack_for_cuda(draw(20, width), None, kind, group)
        finer = FinerRows(torch.tensor([2, 3]), pack_for_cuda(draw(2, width), None, kind, group))
        for table in (embedding, replace(embedding, finer=finer)):
            whole, places = unpack_from_cuda(table), places_of_finer(table)
            rows = whole[state.tokens]
            assert torch.equal(rows_from_cuda(table, state.tokens[:, None]), rows[:, None])
            assert torch.equal(rows_from_cuda(table, torch.tensor([5, 19])), whole[[5, 19]])  # none is finer
            embed_call(state, table, places, None, x := torch.empty(2, width)).run()
            assert torch.equal(x, rows)
            for positions_kind in WEIGHT_KINDS:
                positions = pack_for_cuda(draw(9, width), None, positions_kind, 64)
                embed_call(state, table, places, positions, x).run()
                assert torch.equal(x, rows + unpack_from_cuda(positions)[8])


def attentions() -> None:
    """Norms and turns of heads, shared heads, windows, caps and sinks, one token to several blocks of several parts."""
    plain, turned = Shape(False, blocks=1), Shape(True, blocks=1)
    grouped = turned._replace(heads=6, kv_heads=2, head_size=16, window=20, by_groups=True, neighbours=True)
    capped = turned._replace(heads=3, kv_heads=1, head_size=24, window=150, rotary_size=8, caps=(3.0, None))
    scenes = [
        (plain._replace(heads=1, kv_heads=1, head_size=64), (0, 127, 128, 299)),
        (turned._replace(heads=4, kv_heads=1, head_size=128, head_norms="head"), (0, 40)),
        (grouped._replace(head_norms="whole"), (5, 19, 20, 290)),
        (plain._replace(heads=1, kv_heads=1, head_size=80, window=1, head_norms="head"), (0, 33)),
        (plain._replace(heads=3, kv_heads=3, head_size=24, head_norms="whole"), (3,)),
        (capped._replace(sinks=True), (149, 299)),
    ]
    for shape, positions in scenes:
        draw, program = (
            Draw(shape.heads * shape.head_size),
            random_program(shape, "bf16", packing=pack_for_cuda),
        )
        found = draw(SEQUENCES, (shape.heads + 2 * shape.kv_heads) * shape.head_size)
        layers = {kv: empty_layer(shape.kv_heads, 300, shape.head_size, kv) for kv in CACHES}
        for layer in layers.values():
            fill(layer, draw)
        for index, position in enumerate(positions):
            for warps, kv in zip((1, 32), turned_by(index, CACHES), strict=True):
                assert_attends(found, program, layers[kv], warps, position)


def turned_by(index: int, choices: tuple[CacheKind, ...]) -> tuple[CacheKind, ...]:
    """The other way round for every second index, so that all pairs of two lists come up."""
    return choices if index % 2 == 0 else choices[::-1]


def assert_attends(
    found: torch.Tensor, program: Program, layer: LayerCache, warps: int, position: int
) -> None:
    (block,), size = program.blocks, program.head_size
    angles = [rotary(300) for rotary in program.rotaries]
    parts = PartialSoftmax.of(program.heads, layer, LaunchTarget(warps, dp4a=False))
    assert (parts.tops.shape[1] > 1) == (warps > 1)
    at, y = torch.full((SEQUENCES,), position).int(), torch.full((SEQUENCES, program.heads * size), torch.nan)
    attend_call(found, program, block, angles[0] if angles else None, layer, parts, at).run()
    join_call(parts, block.sinks, y).run()
    query, key, value = split_heads(found.unflatten(1, (-1, size)), program)
    query, key = normed_heads(query, block.query_norm), normed_heads(key, block.key_norm)
    for cosines, sines in angles:
        turning = partial(turned, cosines[position], sines[position], neighbours=program.neighbours)
        query, key = turning(query), turning(key)
    for now, new in zip(cached(layer, position + 1), (key, value), strict=True):
        step = 2**-7 * new.abs() if layer.key_steps is None else eight_bits(new)[1]
        assert bool(((now[:, :, position] - new).abs() <= 0.501 * step + 1e-6).all())
    exact = exact_attention(query, layer, position, program)
    assert float((y.view_as(exact) - exact).abs().max()) <= 1e-5, (program, position, warps)


def prefills() -> None:
    for index, family in enumerate((*TINY, *map(str, SEEDS))):
        assert_prefills(family, WEIGHT_KINDS[1:][index % 6], CACHES[index % 2])


def assert_prefills(family: str, kind: WeightKind, kv: CacheKind) -> None:
    """What the cache has after many tokens at once is the model's, but for the rounding of bfloat16 operands in each
    block, to which an int8 cache adds its own."""
    blocks = 3 if shape_of(family).experts else 2  # the last one's cache shows what comes before it
    reference = ReferenceDecoder(tiny_program(pack, family, (kind,), blocks=blocks), kv, exact=True)
    program = tiny_program(pack_for_cuda, family, (kind,), blocks=blocks)
    tokens = torch.randint(program.vocabulary, (SEQUENCES, 11), generator=torch.Generator().manual_seed(0))
    reference.begin(SEQUENCES, 11)
    reference.extend(tokens)
    decoder = CudaDecoder(program, kv)
    decoder.begin(SEQUENCES, 11)
    step = decoder._step
    assert step is not None
    if family == "llama":
        decoder.extend(tokens)  # the last one by the kernels
        assert decoder.length == 11
    else:
        prefill(program, step, tokens[:, :2], 0)
        prefill(program, step, tokens[:, 2:], 2)
    for index, (layer, exact) in enumerate(zip(step.layers, reference._cache, strict=True)):
        for found, numbers in zip(cached(layer, 11), exact.transpose(2, 3), strict=True):
            q, step_of = eight_bits(numbers.float())
            rounding = float((q * step_of - numbers).norm() / numbers.norm()) if kv == "int8" else 0.0
            error = float((found - numbers).norm() / numbers.norm())
            assert error**2 <= (5e-3 * (index + 1)) ** 2 + rounding**2, (family, kind, kv, index, error)


def decoding() -> None:
    """Greedy and seeded tokens, a cache that is used again, and what is refused."""
    program = tiny_program(pack_for_cuda, "gpt2", ("bf16",), blocks=1)
    decoder = CudaDecoder(program)
    for call in (lambda: decoder.logits, lambda: decoder.extend(torch.zeros(1, 1).long())):
        assert_raises(ValueError, call)
    decoder.begin(SEQUENCES, 6)
    assert decoder.cache_bytes == 2 * SEQUENCES * 2 * 6 * 32 * 2
    prompt = torch.tensor([[5, 7], [9, 11]])
    first = decoder.extend(prompt).argmax(dim=1, keepdim=True)
    greedy, last = decoder.decode(first, 3), decoder.logits
    assert decoder.length == 5
    decoder.begin(SEQUENCES, 6)
    decoder.extend(prompt)
    forced = [decoder.extend(token[:, None]) for token in torch.cat([first, greedy], dim=1)[:, :3].unbind(1)]
    assert torch.equal(forced[-1], last)
    assert torch.equal(torch.stack(forced, dim=1).argmax(dim=2), greedy)
    decoder.begin(SEQUENCES, 6)
    decoder.extend(prompt)
    parts = torch.zeros(SEQUENCES, 3).long()
    assert list(decoder.decode_into(parts, first, 2)) == [2, 1]
    assert torch.equal(parts, greedy)
    drawn = []
    for sampling in (Sampling(1.5, 7), Sampling(1.5, 7), Sampling(1.5, 8), Sampling(1e-4, 9)):
        decoder.begin(SEQUENCES, 6)
        decoder.extend(prompt)
        drawn.append(decoder.decode(first, 3, sampling))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[3], greedy)
    refuses(decoder, program)


def refuses(decoder: CudaDecoder, program: Program) -> None:
    """`decoder` has a token's room left."""
    wrong = [torch.zeros(1, 1).long(), torch.zeros(SEQUENCES, 1), torch.zeros(SEQUENCES).long()]
    for id_ in (-1, VOCABULARY):
        with pytest.raises(
            ValueError, match=f"Token id {id_} is out of range: this model's ids are 0 to 149"
        ):
            decoder.extend(torch.full((SEQUENCES, 1), id_))
    for tokens in (*wrong, torch.zeros(SEQUENCES, 0).long()):
        assert_raises(ValueError, partial(decoder.extend, tokens))
    token = torch.zeros(SEQUENCES, 1).long()
    assert_raises(ValueError, lambda: decoder.decode(token, 0))
    assert_raises(ValueError, lambda: decoder.decode(token.expand(SEQUENCES, 2), 1))
    assert_raises(ValueError, lambda: decoder.decode(token, 1, Sampling(-1.0)))
    assert_raises(ReplicateError, lambda: decoder.decode(token, 2))
    assert decoder.length == 5
    decoder.extend(token)
    assert_raises(ReplicateError, lambda: decoder.extend(token))
    assert_raises(ValueError, lambda: decoder.begin(0, 5))
    assert_raises(UnsupportedError, lambda: decoder.begin(10**7, 10**7))
    fp8: Any = "fp8"
    assert_raises(ValueError, lambda: CudaDecoder(program, fp8))
    huge = replace(program.head, outputs=2**30 + 1)
    with pytest.raises(ValueError, match="at most 1073741824 outputs; one has 1073741825"):
        CudaDecoder(replace(program, head=huge))
    nowhere = torch.full_like(program.embedding.numbers, torch.nan)
    broken = CudaDecoder(replace(program, embedding=replace(program.embedding, numbers=nowhere)))
    broken.begin(SEQUENCES, 3)
    assert_raises(ReplicateError, lambda: broken.decode(token, 1))
    assert broken.length == 0


def assert_raises(kind: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=r"\.$"):
        call()


def exact_linear(x: torch.Tensor, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [rows, outputs], and the sum of what is added without its signs."""
    weight = unpack_from_cuda(matrix).double()
    values = x.double()
    if matrix.kind != "bf16":
        numbers, step = eight_bits(x.unflatten(1, (-1, matrix.group)))
        values = (numbers.double() * step.double()).flatten(1)
    bias = torch.zeros(matrix.outputs) if matrix.bias is None else matrix.bias
    return values @ weight.T + bias.double(), values.abs() @ weight.abs().T + bias.double().abs()


def assert_near(y: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
    assert bool(((y - exact).abs() <= ROUNDING * size).all()), float(((y - exact).abs() / size).max())


def empty_layer(kv_heads: int, capacity: int, size: int, kv: CacheKind) -> LayerCache:
    return LayerCache.empty(kv, SEQUENCES, kv_heads, capacity, size, torch.device("cpu"))


def fill(layer: LayerCache, draw: Draw) -> None:
    for numbers, steps in ((layer.keys, layer.key_steps), (layer.values, layer.value_steps)):
        numbers.copy_(
            draw(*numbers.shape, size=1 if steps is None else 50).clamp(-127, 127).round(decimals=2)
        )
        if steps is not None:
            steps.copy_(draw(*steps.shape).abs() / 50)


def cached(layer: LayerCache, stop: int) -> list[torch.Tensor]:
    """Keys and values, float64 [sequences, kv_heads, stop, size]."""
    pairs = ((layer.keys, layer.key_steps), (layer.values, layer.value_steps))
    return [
        (numbers.double() if steps is None else numbers.double() * steps.double()[..., None])[:, :, :stop]
        for numbers, steps in pairs
    ]


def exact_attention(query: torch.Tensor, layer: LayerCache, position: int, program: Program) -> torch.Tensor:
    """float64, from what the cache has."""
    (block,) = program.blocks
    sharing = program.heads // program.kv_heads
    first = 0 if block.window is None else max(0, position + 1 - block.window)
    keys, values = (
        part[:, :, first:].repeat_interleave(sharing, dim=1) for part in cached(layer, position + 1)
    )
    scores = capped(torch.einsum("rhd,rhtd->rht", query.double(), keys) * block.scale, program.score_cap)
    sinks = torch.full((program.heads,), -torch.inf) if block.sinks is None else block.sinks
    scores = torch.cat([scores, sinks.double().expand(SEQUENCES, -1).unsqueeze(2)], dim=2)
    return torch.einsum("rht,rhtd->rhd", scores.softmax(dim=2)[..., :-1], values)
