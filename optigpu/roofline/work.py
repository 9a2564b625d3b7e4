"""How much work a workload is: bytes that it must move and operations that it must do, from the model's shapes alone.

An operation is a floating-point multiplication or addition within a matrix product (a product of [m, k] and [k, n]
counts 2 m k n) or a convolution; norms, activations and softmax are left out, as torch's FlopCounterMode leaves them
out. Bytes are the weights in their stored width, the key-value cache and images; activations are left out, since they
stay in a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from optigpu.documents.shapes import Footprint, ImageFootprint
from optigpu.models.facts import ModelFacts
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.attention import Attention
from optigpu.workloads.base import Workload
from optigpu.workloads.batch_sweep import BatchSweep
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.kv_cache import KvCache
from optigpu.workloads.matmul import Matmul
from optigpu.workloads.normalization import Normalization
from optigpu.workloads.prefill import Prefill
from optigpu.workloads.requests.operators import WIDTHS


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

    `steps_per_unit` turns the workload's primary metric, a rate or the inverse of a time, into steps per second.
    `prefill` is None where a workload has no prompt, or does not tell its time.
    """

    dtype: str
    step: Work
    steps_per_unit: float
    prefill: Work | None = None


@dataclass(frozen=True)
class Kept:
    """What a key-value cache keeps of one sequence, where that is not every token in the dtype that is computed with.

    `token_bytes` are those of one token over all layers; `tokens` is how many there are at the most.
    """

    token_bytes: int | None = None
    tokens: int | None = None

    def of(self, tokens: int) -> int:
        """How many of so many tokens are kept."""
        return tokens if self.tokens is None else min(tokens, self.tokens)


ALL = Kept()
_FOOTPRINT, _IMAGE_FOOTPRINT = TypeAdapter(Footprint), TypeAdapter(ImageFootprint)


def work_of(workload: Workload, details: Mapping[str, Any]) -> VariantWork:
    """The work of a variant. `details` are those of its result: `footprint`, `dtype`, `autocast`, `autograd` and what
    begins with `kv_cache` are read.

    Raises UnsupportedError for a workload or a model whose shapes are not known.
    """
    match workload:
        case Matmul():
            product = square_product(workload)
            return VariantWork(workload.dtypes[0], product, 1e12 / product.flops)
        case Attention():
            return VariantWork(workload.dtype, _attention(workload), 1e12 / workload.flops)
        case Normalization():
            return VariantWork(workload.dtype, Work("norm", workload.bytes, 0.0), 1e9 / workload.bytes)
        case Classify():
            return _classification(workload, details)
        case Generate() | BatchSweep() | KvCache() | Prefill():
            return _of_decoder(workload, details)
        case _:
            raise UnsupportedError(
                f"the bytes and operations of {workload.kind} are not known to the roofline"
            )


def _footprint(details: Mapping[str, Any]) -> Any:
    if "footprint" not in details:
        raise UnsupportedError("the process that measured did not record what a step reads of its model")
    return details["footprint"]


def _of_decoder(
    workload: Generate | BatchSweep | KvCache | Prefill, details: Mapping[str, Any]
) -> VariantWork:
    if "tokens_per_pass" in details:
        raise UnsupportedError(
            "speculative decoding reads the weights once for several tokens, now more and now fewer"
        )
    model = _FOOTPRINT.validate_python(_footprint(details))
    # Autocast computes in its own type, and attention reads the cache in that.
    dtype, cached = _dtype(details), details["kv_cache"] != "none"
    kept = Kept(details.get("kv_cache_bytes_per_token"), details.get("kv_cache_tokens"))
    like = _as_generate(workload)
    ahead = prefill(like, model, dtype, cached, kept)
    if isinstance(workload, Prefill):
        return VariantWork(dtype, ahead, 1 / (workload.batch_size * workload.prompt_tokens))
    step = decode_step(like, _as_streamed(model, details), dtype, cached, kept)
    if isinstance(workload, KvCache):
        return VariantWork(dtype, step, 1.0)
    return VariantWork(dtype, step, 1 / like.batch_size, ahead)


def _as_streamed(model: Footprint, details: Mapping[str, Any]) -> Footprint:
    """What a step reads once the prompt has been: autocast keeps the weights as it converted them.

    Not in inference mode, where torch converts them for each step.
    """
    if details.get("autograd") == "inference":
        return model
    shrunk = WIDTHS[_dtype(details)] / WIDTHS[str(details["dtype"])]
    return replace(model, streamed_bytes=int(model.streamed_bytes * shrunk))


def _as_generate(workload: Generate | BatchSweep | KvCache | Prefill) -> Generate:
    """The generation that has the same steps."""
    match workload:
        case BatchSweep(batch_sizes=(batch,)):
            return Generate(
                prompt_tokens=workload.prompt_tokens, new_tokens=workload.new_tokens, batch_size=batch
            )
        case KvCache(positions=(position,)):
            return Generate(
                prompt_tokens=position, new_tokens=workload.new_tokens, batch_size=workload.batch_size
            )
        case Prefill():
            return Generate(
                prompt_tokens=workload.prompt_tokens, new_tokens=2, batch_size=workload.batch_size
            )
        case Generate():
            return workload
        case _:
            raise UnsupportedError(f"{workload.label} is several workloads; a roofline is of one")


def _classification(workload: Classify, details: Mapping[str, Any]) -> VariantWork:
    """A pass reads the weights and the images; its operations are those that torch counted for one image."""
    model, dtype = _IMAGE_FOOTPRINT.validate_python(_footprint(details)), _dtype(details)
    if dtype == "float32" and details.get("cudnn_tf32"):
        dtype = "tf32"
    batch = workload.batch_size
    moved = model.streamed_bytes + batch * model.pixels * WIDTHS[str(details["dtype"])]
    return VariantWork(dtype, Work("pass", moved, batch * model.flops), 1 / batch)


def _dtype(details: Mapping[str, Any]) -> str:
    return str(details.get("autocast") or details["dtype"])


def _attention(workload: Attention) -> Work:
    """Queries, keys and values are read and the result is written once; the scores need not be in memory at all."""
    (length,) = workload.lengths
    heads = 2 * workload.heads + 2 * (workload.kv_heads or workload.heads)
    rows = workload.batch_size * heads * length
    return Work("attention", rows * workload.head_size * WIDTHS[workload.dtype], 0.0, workload.flops)


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


def prefill(workload: Generate, model: Footprint, dtype: str, cached: bool, kept: Kept = ALL) -> Work:
    """The prompt's pass: every token goes through the blocks, the last of each sequence through the head."""
    length = workload.prompt_tokens
    return _forward(
        "prefill",
        workload.batch_size,
        model,
        length,
        _causal_pairs(length),
        _cache(model, dtype, kept.of(length), cached, kept),
    )


def decode_step(workload: Generate, model: Footprint, dtype: str, cached: bool, kept: Kept = ALL) -> Work:
    """One step of decoding, the mean over the steps of a request.

    Step i of new_tokens - 1 attends to prompt_tokens + i tokens: it reads them from the key-value cache but for its own
    token, which it writes, or to those of them that are kept. Without a cache it computes them all again.
    """
    steps = range(workload.prompt_tokens + 1, workload.prompt_tokens + workload.new_tokens)
    lengths = [kept.of(length) for length in steps] if cached else list(steps)
    length = fmean(lengths)
    tokens, pairs = (1.0, length) if cached else (length, fmean(map(_causal_pairs, lengths)))
    return _forward(
        "decode step", workload.batch_size, model, tokens, pairs, _cache(model, dtype, length, cached, kept)
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


def _cache(model: Footprint, dtype: str, tokens: float, cached: bool, kept: Kept) -> float:
    """Bytes of keys and values of `tokens` tokens of one sequence."""
    if not cached:
        return 0.0
    facts = model.facts
    return tokens * (kept.token_bytes or 2 * facts.layers * facts.kv_heads * facts.head_size * WIDTHS[dtype])


def _causal_pairs(length: int) -> float:
    """Pairs of a query and a key where each token attends to itself and all before it."""
    return length * (length + 1) / 2
