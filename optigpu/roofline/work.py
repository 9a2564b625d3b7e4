"""How much work a workload is: bytes that it must move and operations that it must do, from the model's shapes alone.

An operation is a floating-point multiplication or addition within a matrix product (a product of [m, k] and [k, n]
counts 2 m k n); norms, activations and softmax are left out, as torch's FlopCounterMode leaves them out. Bytes are the
weights in their stored width and the key-value cache; activations are left out, since they stay in a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from optigpu.models.facts import ModelFacts
from optigpu.models.footprint import Footprint
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import Workload
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul

WIDTHS = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element of a matrix or of the key-value cache, by the dtype that is computed with."""


@dataclass(frozen=True)
class Work:
    """Work that is done in one go, `name` says which. Means over steps need not be whole numbers."""

    name: str
    bytes: float
    matmul_flops: float
    attention_flops: float = 0.0

    @property
    def flops(self) -> float:
        """All operations."""
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True)
class VariantWork:
    """What a variant does, computing in `dtype`.

    `steps_per_unit` turns the workload's primary metric, a rate, into steps per second. `prefill` is None where a
    workload has no prompt.
    """

    dtype: str
    step: Work
    steps_per_unit: float
    prefill: Work | None = None


_FOOTPRINT = TypeAdapter(Footprint)


def work_of(workload: Workload, details: Mapping[str, Any]) -> VariantWork:
    """The work of a variant. `details` are those of its result: `dtype`, `kv_cache` and `footprint` are read.

    Raises UnsupportedError for a workload or a model whose shapes are not known.
    """
    match workload:
        case Matmul():
            product = square_product(workload)
            return VariantWork(workload.dtypes[0], product, 1e12 / product.flops)
        case Generate() if "footprint" in details:
            model = _FOOTPRINT.validate_python(details["footprint"])
            dtype, cached = str(details["dtype"]), details["kv_cache"] != "none"
            step = decode_step(workload, model, dtype, cached)
            return VariantWork(dtype, step, 1 / workload.batch_size, prefill(workload, model, dtype, cached))
        case Generate():
            raise UnsupportedError("the process that measured did not record what a step reads of its model")
        case _:
            raise UnsupportedError(
                f"the bytes and operations of {workload.kind} are not known to the roofline"
            )


def matmul_flops(facts: ModelFacts, tokens: float, predictions: float) -> float:
    """Operations of the linear layers for `tokens` tokens, and of the head for `predictions` of them.

    Raises UnsupportedError for a family whose blocks are not known.
    """
    if facts.inner_size is None:
        raise UnsupportedError(f"the shapes of {facts.family} models are not known to the roofline")
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


def prefill(workload: Generate, model: Footprint, dtype: str, cached: bool) -> Work:
    """The prompt's pass: every token goes through the blocks, the last of each sequence through the head."""
    length = workload.prompt_tokens
    return _forward(
        "prefill",
        workload.batch_size,
        model,
        length,
        _causal_pairs(length),
        _cache(model, dtype, length, cached),
    )


def decode_step(workload: Generate, model: Footprint, dtype: str, cached: bool) -> Work:
    """One step of decoding, the mean over the steps of a request.

    Step i of new_tokens - 1 attends to prompt_tokens + i tokens: it reads them from the key-value cache but for its own
    token, which it writes. Without a cache it computes them all again.
    """
    lengths = range(workload.prompt_tokens + 1, workload.prompt_tokens + workload.new_tokens)
    length = fmean(lengths)
    tokens, pairs = (1.0, length) if cached else (length, fmean(map(_causal_pairs, lengths)))
    return _forward(
        "decode step", workload.batch_size, model, tokens, pairs, _cache(model, dtype, length, cached)
    )


def square_product(workload: Matmul) -> Work:
    """One product of square matrices: both operands are read and the product is written once."""
    (side,), (dtype,) = workload.sizes, workload.dtypes
    return Work("product", 3 * side**2 * WIDTHS[dtype], 2 * side**3)


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


def _cache(model: Footprint, dtype: str, tokens: float, cached: bool) -> float:
    """Bytes of keys and values of `tokens` tokens of one sequence."""
    facts = model.facts
    return 2 * tokens * facts.layers * facts.kv_heads * facts.head_size * WIDTHS[dtype] if cached else 0.0


def _causal_pairs(length: int) -> float:
    """Pairs of a query and a key where each token attends to itself and all before it."""
    return length * (length + 1) / 2
