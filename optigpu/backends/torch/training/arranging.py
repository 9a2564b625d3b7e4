"""Arranges the samples of a step on the device, and computes their losses."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import PreTrainedModel

from optigpu.backends.training import (
    NO_TARGET,
    Arrange,
    LabelledImages,
    LossOf,
    MicroBatch,
    Texts,
    TrainingBatch,
)


def arranging_on(device: torch.device, dtype: torch.dtype) -> Arrange:
    """One micro-batch of all samples: documents in padded rows, images in `dtype`."""

    def arrange(batch: TrainingBatch) -> list[MicroBatch]:
        if isinstance(batch, LabelledImages):
            images = torch.from_numpy(batch.images).to(device, dtype)
            return [
                MicroBatch(
                    {"pixel_values": images}, torch.from_numpy(batch.labels).to(device), len(batch.labels)
                )
            ]
        ids, labels = padded_rows(batch)
        targets = int((labels != NO_TARGET).sum())
        inputs = {"input_ids": torch.from_numpy(ids).to(device)}
        return [MicroBatch(inputs, torch.from_numpy(labels).to(device), targets)]

    return arrange


def padded_rows(texts: Texts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids and labels, both [documents, length]: a row for each document, padded on the right.

    The label of a place is the next token. Attention looks back alone, so that no token sees the padding behind it, and
    no mask is needed.
    """
    shape = (len(texts.documents), texts.length)
    ids, labels = np.zeros(shape, np.int64), np.full(shape, NO_TARGET, np.int64)
    for row, document in enumerate(texts.documents):
        ids[row, : len(document)] = document
        labels[row, : len(document) - 1] = document[1:]
    return ids, labels


def loss_of(model: PreTrainedModel) -> LossOf:
    """The model's forward pass and the summed cross entropy of its logits, in float32."""

    def loss(rows: MicroBatch) -> torch.Tensor:
        # A cache of keys and values would only be thrown away.
        cached = {"use_cache": False} if "input_ids" in rows.inputs else {}
        logits = model(**rows.inputs, **cached).logits
        return functional.cross_entropy(
            logits.float().flatten(0, -2), rows.labels.flatten(), ignore_index=NO_TARGET, reduction="sum"
        )

    return loss
