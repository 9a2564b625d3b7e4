"""The work of a workload: the bytes that it must move and the operations that it must do, from the model's shapes.

An operation is a floating-point multiplication or addition within a matrix product (of [m, k] and [k, n]: 2 m k n) or a
convolution; norms, activations and softmax are left out, as torch's FlopCounterMode does. Bytes are the weights in
their stored width, the key-value cache and images; activations stay in a cache.
"""

from dataclasses import dataclass, replace
from statistics import fmean
from typing import assert_never

from optigpu.documents.facts import Footprint, ImageFootprint, ModelFacts, RunFacts
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads import base as shapes
from optigpu.workloads.base import Workload
from optigpu.workloads.requests.operators import WIDTHS


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
        return tokens if self.tokens is None else min(tokens, self.tokens)


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


def matmul_flops(facts: ModelFacts, tokens: float, predictions: float) -> float:
    """Operations of the linear layers for `tokens` tokens, and of the head for `predictions` of them.

    Raises UnsupportedError for a family whose blocks are not known.
    """
    if facts.inner_size is None:
        raise UnsupportedError(f"The roofline does not know the shapes of {facts.family} models.")
    width, projected = facts.hidden_size, facts.embedding_size
    attention = 2 * width * facts.head_size * (facts.heads + facts.kv_heads)
    mlp = (3 if facts.gated_mlp else 2) * width * facts.inner_size
    into = 0 if projected == width else width * projected
    head = projected * facts.vocabulary + into
    return 2 * tokens * (facts.layers * (attention + mlp) + into) + 2 * predictions * head


def attention_flops(facts: ModelFacts, pairs: float) -> float:
    """Operations of scores and weighted sums for `pairs` of a query and a key, over all heads and layers."""
    return 4 * pairs * facts.layers * facts.heads * facts.head_size


def training_step_flops(facts: ModelFacts, batch: int, length: int) -> float:
    """Model operations of one training step: the forward pass and twice as many backward, for inputs and for weights.

    Source: Chowdhery et al., PaLM, 2022, appendix B. What is recomputed for the sake of memory does not count.
    """
    tokens, pairs = batch * length, batch * _causal_pairs(length)
    return 3 * (matmul_flops(facts, tokens, tokens) + attention_flops(facts, pairs))


def prefill(
    shape: shapes.PrefillShape | shapes.DecodeShape,
    model: Footprint,
    dtype: str,
    cached: bool,
    kept: CacheKeeps = EVERY_TOKEN,
) -> Work:
    """The prompt's pass: every token goes through the blocks, the last of each sequence through the head."""
    length = shape.prompt_tokens
    cache = _cache(model, dtype, kept.of(length), cached, kept)
    return _forward("prefill", shape.batch_size, model, length, _causal_pairs(length), cache)


def decode_step(
    shape: shapes.DecodeShape, model: Footprint, dtype: str, cached: bool, kept: CacheKeeps = EVERY_TOKEN
) -> Work:
    """One step of decoding, the mean over the steps of a request.

    Step i of new_tokens - 1 attends to prompt_tokens + i tokens, or to those of them that are kept. Without a cache it
    computes them all again.
    """
    steps = range(shape.prompt_tokens + 1, shape.prompt_tokens + shape.new_tokens)
    lengths = [kept.of(length) for length in steps] if cached else list(steps)
    length = fmean(lengths)
    tokens, pairs = (1.0, length) if cached else (length, fmean(map(_causal_pairs, lengths)))
    cache = _cache(model, dtype, length, cached, kept)
    return _forward("decode step", shape.batch_size, model, tokens, pairs, cache)


def _forward(
    name: str, batch: int, model: Footprint, tokens: float, pairs: float, cache_bytes: float
) -> Work:
    """A pass over a batch, with one prediction for each sequence; what follows `model` is for one sequence."""
    return Work(
        name=name,
        bytes=model.streamed_bytes + batch * (tokens * model.row_bytes + cache_bytes),
        matmul_flops=matmul_flops(model.facts, batch * tokens, batch),
        attention_flops=attention_flops(model.facts, batch * pairs),
    )


def _cache(model: Footprint, dtype: str, tokens: float, cached: bool, kept: CacheKeeps) -> float:
    if not cached:
        return 0.0
    facts = model.facts
    return tokens * (kept.token_bytes or 2 * facts.layers * facts.kv_heads * facts.head_size * _width(dtype))


def _causal_pairs(length: int) -> float:
    """Pairs of a query and a key where each token attends to itself and all before it."""
    return length * (length + 1) / 2
