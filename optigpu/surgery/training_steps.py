"""Parts of a training step: a loss in chunks of tokens, documents packed into rows, blocks that are computed again."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Module
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from optigpu.backends.training import NO_TARGET, MicroBatch, Texts, TrainingBatch
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError

_PROBED_TOKENS = 4
_ROUNDINGS = 16
"""How many times its dtype's precision a logit may be off, as a share of the largest one."""


class ChunkedLoss:
    """The sum of the losses of all targets: the body once, then the head and the loss for one chunk after the other."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        """Raises UnsupportedError as the technique says."""
        self._body, self._head = _body_and_head(model)
        self._tokens = tokens

    def __call__(self, micro: MicroBatch) -> torch.Tensor:
        hidden = self._body(**micro.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        kind, head = hidden.device.type, self._head
        weight: torch.Tensor = head.weight
        bias: torch.Tensor | None = head.bias
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _summed_loss(hidden, weight, bias, micro.labels.flatten(), self._tokens)


class _SummedLoss(torch.autograd.Function):
    """The sum of cross_entropy(hidden @ weight.T + bias, labels) over targets, in float32.

    hidden: [tokens, width]; weight: [vocabulary, width]; bias: [vocabulary] or None; labels: int64 [tokens]. Only these
    are kept for the backward pass, which computes each chunk's logits again and adds the chunk's part to one gradient
    of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.chunk = chunk
        loss = hidden.new_zeros((), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(len(labels), chunk):
                logits = linear(hidden[part], weight, bias).float()
                loss += cross_entropy(logits, labels[part], ignore_index=NO_TARGET, reduction="sum")
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for part in _chunks(len(labels), ctx.chunk):
            # Autograd records here, though nothing asks for it: by that counters know a recomputation.
            with torch.enable_grad():
                logits = linear(hidden[part], weight.detach(), bias).detach()
            to_logits = _gradient_to_logits(logits.float(), labels[part], gradient).to(hidden.dtype)
            torch.mm(to_logits, weight, out=to_hidden[part])
            if to_weight is not None:
                torch.addmm(to_weight, to_logits.T, hidden[part], out=to_weight)
            if to_bias is not None:
                to_bias += to_logits.sum(dim=0)
        return to_hidden, to_weight, to_bias, None, None


_summed_loss = cast(Callable[..., torch.Tensor], _SummedLoss.apply)


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(begin, begin + chunk) for begin in range(0, tokens, chunk))


def _gradient_to_logits(logits: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """softmax(logits) less 1 at the label, times the loss's gradient; 0 where nothing is predicted."""
    is_target = (labels != NO_TARGET)[:, None]
    probabilities = logits.softmax(dim=-1)
    probabilities.scatter_add_(1, labels.clamp(min=0)[:, None], -is_target.to(logits.dtype))
    return probabilities.mul_(is_target * gradient)


def _body_and_head(model: PreTrainedModel) -> tuple[torch.nn.Module, torch.nn.Linear]:
    """The model without its head, and the head; a few tokens show that the two make the model's logits."""
    body, head = model.base_model, model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or body is model:
        raise UnsupportedError(
            "chunked_cross_entropy needs a language model with a head; leave it out of the stack."
        )
    ids = torch.arange(_PROBED_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        parts = head(body(input_ids=ids, use_cache=False).last_hidden_state)
    allowed = _ROUNDINGS * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    if whole.shape != parts.shape or float((whole - parts).abs().max()) > allowed:
        raise UnsupportedError(
            "chunked_cross_entropy: this model changes its head's product before it gives its logits; leave it out of "
            "the stack."
        )
    return body, head


_PROBED_LENGTHS = (3, 4, 2)
_TOLERANCE = 0.1
"""How far logits may be off, as a share of the largest one: another document changes them by more, and products in 8
bits, whose scales depend on the whole row, by less."""

_TAKES_NO_MASK = (
    "sequence_packing cannot keep the attention of this model within a document; leave it out of the stack."
)


def first_fit_decreasing(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which documents share a row: each, the longest first, goes to the first row that has room for it."""
    rows: list[list[int]] = []
    left: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        length = lengths[document]
        row = next((row for row, space in enumerate(left) if space >= length), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(document)
        left[row] -= length
    return rows


class PackedArrangement:
    """Arranges documents in shared rows, all of them in one micro-batch."""

    def __init__(self, model: PreTrainedModel, notes: Notes) -> None:
        """Raises UnsupportedError as the technique says."""
        if model.main_input_name != "input_ids":
            raise UnsupportedError("sequence_packing is for models of text; leave it out of the stack.")
        self._model, self._notes = model, notes
        self._require_apart()

    def __call__(self, batch: TrainingBatch) -> Sequence[MicroBatch]:
        """Raises UnsupportedError for images, and where a document is longer than a row or than the model's window."""
        if not isinstance(batch, Texts):
            raise UnsupportedError("sequence_packing is for texts; leave it out of the stack.")
        window = getattr(self._model.config.get_text_config(), "sliding_window", None)
        if window is not None and window < batch.length:
            raise UnsupportedError(
                f"sequence_packing: this model attends to {window} tokens at most, and rows have {batch.length}; "
                f"set sequence_tokens to {window} or less."
            )
        lengths = [len(document) for document in batch.documents]
        if max(lengths) > batch.length:
            raise UnsupportedError(
                f"A document has {max(lengths)} tokens and a row has {batch.length}; set sequence_tokens higher."
            )
        rows = first_fit_decreasing(lengths, batch.length)
        self._notes.record(packed_rows=len(rows), packed_documents=len(lengths))
        return [self._packed(batch, rows)]

    def _packed(self, batch: Texts, rows: Sequence[Sequence[int]]) -> MicroBatch:
        """The padding after a row's documents is a document of its own without targets."""
        shape = (len(rows), batch.length)
        ids, positions, owners = (np.zeros(shape, np.int64) for _ in range(3))
        labels = np.full(shape, NO_TARGET, np.int64)
        for row, documents in enumerate(rows):
            begin = 0
            for owner, document in enumerate((batch.documents[index] for index in documents), start=1):
                end = begin + len(document)
                ids[row, begin:end] = document
                positions[row, begin:end] = np.arange(len(document))
                labels[row, begin : end - 1] = document[1:]
                owners[row, begin:end] = owner
                begin = end
            positions[row, begin:] = np.arange(batch.length - begin)
        inputs = {
            "input_ids": self._tensor(ids),
            "position_ids": self._tensor(positions),
            "attention_mask": self._mask(self._tensor(owners)),
        }
        return MicroBatch(inputs, self._tensor(labels), int((labels != NO_TARGET).sum()))

    def _mask(self, owners: torch.Tensor) -> torch.Tensor:
        """[rows, 1, length, length]: whether a token (third) sees another (last), or what is added to its score."""
        length = owners.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=owners.device).tril()
        seen = ((owners[:, :, None] == owners[:, None, :]) & causal)[:, None]
        if self._model.config._attn_implementation == "sdpa":
            return seen
        dtype = self._model.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
            ~seen, torch.finfo(dtype).min
        )

    def _require_apart(self) -> None:
        """Packs three short documents in a row, and compares their logits with those of each document alone."""
        source = np.random.default_rng(0)
        words = self._model.config.get_text_config().vocab_size
        documents = [source.integers(words, size=length) for length in _PROBED_LENGTHS]
        rows = first_fit_decreasing(_PROBED_LENGTHS, sum(_PROBED_LENGTHS))
        packed = self._packed(Texts(tuple(documents), sum(_PROBED_LENGTHS)), rows)
        alone = torch.cat([self._logits_of(self._tensor(documents[document])[None]) for document in rows[0]])
        try:
            together = self._logits_of(**packed.inputs)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedError(_TAKES_NO_MASK) from error
        if float((together - alone).abs().max()) > _TOLERANCE * float(alone.abs().max()):
            raise UnsupportedError(_TAKES_NO_MASK)

    def _logits_of(self, input_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Those of a single row, [length, vocabulary]."""
        with torch.no_grad():
            logits: torch.Tensor = self._model(input_ids=input_ids, **inputs, use_cache=False).logits
        return logits[0].float()

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Matrix products, and which argument is the first of the two matrices."""
_DEARER = {
    _aten._scaled_mm,
    _aten.convolution,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}
"""What is always kept."""
AGAIN = 1 / 9
"""The most of the operations of a block's products that selective checkpointing computes again."""

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def recompute_blocks(model: Module, *, keep_the_dear: bool) -> int:
    """Has each of transformers' blocks compute its activations again in the backward pass; how many there are.

    Dropout is off, so that no random numbers have to be drawn again.
    """
    plain = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    blocks: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for block in blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = (
            partial(plain, context_fn=KeptProducts().contexts) if keep_the_dear else plain
        )
    return len(blocks)


class KeptProducts:
    """Which results of a block's matrix products and attention are kept, chosen after its first pass.

    A byte of any product's result takes about as many operations. So the smallest products are computed again, up to
    AGAIN of all; and the last one of a block is not kept, since what comes after it is a sum, which needs no operand in
    the backward pass: torch stops to compute a block again when it has everything.
    """

    def __init__(self) -> None:
        self._operations: list[float] = []
        self._again: frozenset[int] | None = None

    def contexts(self) -> Contexts:
        """Those of one pass and of its recomputation. The first pass keeps all, and counts."""
        if self._again is None and self._operations:
            self._again = chosen_again(self._operations)
        seen: Counter[bool] = Counter()
        again = self._again

        def policy(context: Any, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
            packet = getattr(operator, "overloadpacket", None)
            if packet not in _PRODUCTS and packet not in _DEARER:
                return CheckpointPolicy.PREFER_RECOMPUTE
            index = seen[context.is_recompute]
            seen[context.is_recompute] += 1
            if again is None and not context.is_recompute:
                first = _PRODUCTS.get(packet)  # None: always kept
                count = None if first is None else arguments[first].numel() * arguments[first + 1].shape[-1]
                self._operations.append(math.inf if count is None else float(count))
            is_again = again is not None and index in again
            return CheckpointPolicy.PREFER_RECOMPUTE if is_again else CheckpointPolicy.MUST_SAVE

        contexts: Contexts = create_selective_checkpoint_contexts(policy)
        return contexts


def chosen_again(operations: list[float]) -> frozenset[int]:
    """The indices of the results that are not kept; `operations` are those of a block in its order, infinite: keep."""
    needed = range(len(operations) - 1)
    left = AGAIN * sum(operations[index] for index in needed if math.isfinite(operations[index]))
    chosen = {len(operations) - 1}
    for index in sorted(needed, key=lambda index: operations[index]):
        if operations[index] <= left:
            left -= operations[index]
            chosen.add(index)
    return frozenset(chosen)
