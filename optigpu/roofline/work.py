"""The work of a workload: the bytes that it must move and the operations that it must do, from the model's shapes.

An operation is a floating-point multiplication or addition within a matrix product (of [m, k] and [k, n]: 2 m k n) or a
convolution; norms, activations and softmax are left out, as torch's FlopCounterMode does. Bytes are the weights in
their stored width, the key-value cache and images; activations stay in a cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import assert_never

from optigpu.documents.facts import Footprint, ImageFootprint, ModelFacts, RunFacts, TokenWork
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads import base as shapes
from optigpu.workloads.base import Workload
from optigpu.workloads.requests import WIDTHS


@dataclass(frozen=True)
class Work:
    """The work of one step, named `name`. Means over steps need not be whole numbers.

    `writes` says that a good part of the bytes are written; a step of a model writes little.
    """

    name: str
    bytes: float
    matmul_flops: float
    attention_flops: float = 0.0
    writes: bool = False

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True)
class VariantWork:
    """The work of a variant that multiplies numbers of `dtypes`: the model's, and those of its quantized layers.

    `steps_per_unit` turns the workload's primary metric, a rate or the inverse of a time, into steps per second.
    `prefill` is None where a workload has no prompt, or is nothing else.
    """

    dtypes: tuple[str, ...]
    step: Work
    steps_per_unit: float
    prefill: Work | None = None
    # Of a step of training: all operations that it executes, recomputed ones included.
    executed_flops: float | None = None


@dataclass(frozen=True)
class CacheKeeps:
    """What a key-value cache keeps of one sequence, unless it is every token in the dtype of the computation.

    `token_bytes` are those of one token over all layers; `tokens` is how many there are at the most.
    """

    token_bytes: int | None = None
    tokens: int | None = None

    def of(self, tokens: int) -> int:
        """How many of `tokens` tokens are kept."""
        return _within(self.tokens, tokens)


EVERY_TOKEN = CacheKeeps()


def work_of(workload: Workload, facts: RunFacts) -> VariantWork:
    """The work of a variant, from what one step of its workload does and what is known of its run.

    Raises UnsupportedError, with the reason, when shapes or facts are not known.
    """
    if len(workload.expand()) > 1:
        raise UnsupportedError(
            f"{workload.kind} {workload.label} is several workloads, and a roofline is of one."
        )
    shape = workload.shape_after(facts.prompt_tokens)
    match shape:
        case None:
            raise UnsupportedError(f"The bytes and operations of a {workload.kind} request are not known.")
        case shapes.OperatorShape():
            call = Work(shape.name, shape.bytes, shape.matmul_flops, shape.attention_flops, writes=True)
            return VariantWork((shape.dtype,), call, 1 / shape.units)
        case shapes.ImageShape():
            return _of_images(shape, facts)
        case shapes.TrainingShape():
            return _of_training(shape, facts)
        case shapes.PrefillShape() | shapes.DecodeShape():
            return _of_decoder(shape, facts)
        case _:
            assert_never(shape)


def _of_decoder(shape: shapes.PrefillShape | shapes.DecodeShape, facts: RunFacts) -> VariantWork:
    if facts.tokens_per_pass is not None:
        raise UnsupportedError(
            "Speculative decoding reads the weights once for several tokens, and how many differs from pass to pass."
        )
    model = facts.footprint
    if not isinstance(model, Footprint):
        raise _unknown(facts, "footprint", "what a step reads of the model")
    if facts.kv_cache is None:
        raise _unknown(facts, "kv_cache", "the key-value cache")
    # Autocast computes in its own type, and attention reads the cache in that.
    dtype, cached = _dtype(facts), facts.kv_cache != "none"
    kept = CacheKeeps(facts.kv_cache_bytes_per_token, facts.kv_cache_tokens)
    ahead = prefill(shape, model, dtype, cached, kept)
    if isinstance(shape, shapes.PrefillShape):
        return VariantWork(_dtypes(facts, model), ahead, 1 / shape.units)
    streamed = model
    if facts.autocast is not None and facts.autograd != "inference":
        # Autocast keeps the converted weights after the prompt; in inference mode torch converts them for each step.
        shrunk = _width(facts.autocast) / _width(_weights_dtype(facts))
        streamed = replace(model, streamed_bytes=int(model.streamed_bytes * shrunk))
    step = decode_step(shape, streamed, dtype, cached, kept)
    return VariantWork(_dtypes(facts, model), step, 1 / shape.units, ahead)


def _of_images(shape: shapes.ImageShape, facts: RunFacts) -> VariantWork:
    """A pass reads the weights and the images; its operations are those that torch counted for one image."""
    model = facts.footprint
    if not isinstance(model, ImageFootprint):
        raise _unknown(facts, "footprint", "what a pass reads of the model")
    dtypes = _dtypes(facts, model)
    if dtypes[0] == "float32" and facts.cudnn_tf32:
        dtypes = ("tf32", *dtypes[1:])
    batch = shape.batch_size
    moved = model.streamed_bytes + batch * model.pixels * _width(_weights_dtype(facts))
    return VariantWork(dtypes, Work("pass", moved, batch * model.flops), 1 / shape.units)


def _of_training(shape: shapes.TrainingShape, facts: RunFacts) -> VariantWork:
    """The operations that were counted, and the weights, which the forward and the backward pass read.

    Gradients, activations and optimizer states are left out: stacks keep them in many ways.
    """
    counted, weights = facts.training, facts.weights
    if counted is None:
        raise _unknown(facts, "training", "the operations of a step")
    if weights is None or weights.bytes is None:
        raise _unknown(facts, "weights", "the bytes of the weights")
    dtype = _dtype(facts)
    if dtype == "float32":
        dtype = "tf32" if facts.cudnn_tf32 else _rounded(facts, dtype)
    step = Work("training step", 2 * weights.bytes, counted.model_flops)
    return VariantWork(
        (dtype, *facts.training_dtypes), step, 1 / shape.units, executed_flops=counted.hardware_flops
    )


def _dtype(facts: RunFacts) -> str:
    return facts.autocast or _weights_dtype(facts)


def _dtypes(facts: RunFacts, model: Footprint | ImageFootprint) -> tuple[str, ...]:
    """What is multiplied in matrix products: by layers as the model's author wrote them first."""
    return (_rounded(facts, _dtype(facts)), *model.product_dtypes)


def _rounded(facts: RunFacts, dtype: str) -> str:
    """What float32 is rounded to in matrix products; another dtype as it is."""
    rounded = {"high": "tf32", "medium": "bfloat16"}.get(facts.float32_matmul_precision or "")
    return rounded if dtype == "float32" and rounded else dtype


def _weights_dtype(facts: RunFacts) -> str:
    if facts.dtype is None:
        raise _unknown(facts, "dtype", "the dtype of the weights")
    return facts.dtype


def _width(dtype: str) -> int:
    widths = {**WIDTHS, "int8": 1}  # a whole model of int8, as LiteRT runs it
    if dtype not in widths:
        raise UnsupportedError(f"The roofline does not know how many bytes an element of {dtype} has.")
    return widths[dtype]


def _unknown(facts: RunFacts, field: str, what: str) -> UnsupportedError:
    return UnsupportedError(f"The roofline needs {what}: {facts.why_null(field)}")


Reached = Callable[[int | None], float]
"""A number of tokens, or of pairs of a query and a key, in layers that reach back so many tokens; None: all of them."""


def prefill(
    shape: shapes.PrefillShape | shapes.DecodeShape,
    model: Footprint,
    dtype: str,
    cached: bool,
    kept: CacheKeeps = EVERY_TOKEN,
) -> Work:
    """The prompt's pass: every token goes through the blocks, the last of each sequence through the head."""
    length = shape.prompt_tokens
    work = _known(model.facts, length)
    cache = _cache(work, dtype, lambda window: _within(window, kept.of(length)), kept) if cached else 0.0
    return _forward(
        "prefill", shape, model, work, length, lambda window: _causal_pairs(length, window), cache
    )


def decode_step(
    shape: shapes.DecodeShape, model: Footprint, dtype: str, cached: bool, kept: CacheKeeps = EVERY_TOKEN
) -> Work:
    """One step of decoding, the mean over the steps of a request.

    Step i of new_tokens - 1 attends to prompt_tokens + i tokens, or to those of them that are kept. Without a cache it
    computes them all again.
    """
    steps = range(shape.prompt_tokens + 1, shape.prompt_tokens + shape.new_tokens)
    work = _known(model.facts, steps[-1])

    def reached(window: int | None) -> float:
        return fmean(_within(window, kept.of(length)) for length in steps)

    def pairs(window: int | None) -> float:
        return fmean(_causal_pairs(length, window) for length in steps)

    if not cached:
        return _forward("decode step", shape, model, work, fmean(steps), pairs, 0.0)
    return _forward("decode step", shape, model, work, 1.0, reached, _cache(work, dtype, reached, kept))


def _known(facts: ModelFacts, length: int) -> TokenWork:
    """Raises UnsupportedError where the operations are not known, for any text or for one of so many tokens."""
    work = facts.work
    if work is None:
        raise UnsupportedError(facts.uncounted or f"The operations of {facts.family} models are not known.")
    if work.longest is not None and length > work.longest:
        raise UnsupportedError(
            f"The operations of {facts.family} models are known for texts of at most {work.longest} tokens: in longer "
            "ones layers choose what they attend to."
        )
    return work


def _forward(
    name: str,
    shape: shapes.PrefillShape | shapes.DecodeShape,
    model: Footprint,
    work: TokenWork,
    tokens: float,
    pairs: Reached,
    cache_bytes: float,
) -> Work:
    """A pass over a batch, with one prediction for each sequence; what follows `work` is for one sequence."""
    batch = shape.batch_size
    return Work(
        name=name,
        bytes=model.streamed_bytes + batch * (tokens * model.row_bytes + cache_bytes),
        matmul_flops=batch * (tokens * work.flops + work.head_flops),
        attention_flops=batch * sum(layers.flops * pairs(layers.window) for layers in work.attention),
    )


def _cache(work: TokenWork, dtype: str, reached: Reached, kept: CacheKeeps) -> float:
    if kept.token_bytes is not None:
        return kept.token_bytes * reached(None)
    return _width(dtype) * sum(layers.kept * reached(layers.window) for layers in work.attention)


def _within(window: int | None, tokens: int) -> int:
    return tokens if window is None else min(window, tokens)


def _causal_pairs(length: int, window: int | None) -> float:
    """Pairs of a query and a key where each token attends to itself and all before it within the window."""
    near = _within(window, length)
    return near * (near + 1) / 2 + (length - near) * near
