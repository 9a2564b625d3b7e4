"""Documents packed into rows, with what keeps them apart."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from optigpu.backends.training import NO_TARGET, MicroBatch, Texts, TrainingBatch
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError

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
