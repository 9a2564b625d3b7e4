"""HellaSwag: choosing the right one of four endings. Zellers et al., HellaSwag, ACL 2019, arXiv:1905.07830.

Scored as lm-evaluation-harness's acc_norm: the ending whose log-likelihood for each of its characters is the largest.
"""

import bz2
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optigpu.quality.passages import Passage
from optigpu.vocabulary import OptiGPUError

Encode = Callable[[str], list[int]]

ENDINGS = 4
_LINES = 2 + ENDINGS


@dataclass(frozen=True)
class Item:
    """A context, four endings, and the index of the right one: the lines of the file."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_items(content: bytes) -> list[Item]:
    """The items of the published file. Raises OptiGPUError if it is corrupt."""
    try:
        lines = bz2.decompress(content).decode().splitlines()
    except (OSError, ValueError, EOFError) as error:
        raise OptiGPUError(
            f"The hellaswag file is corrupt ({error}); replace it with a good copy."
        ) from error
    if not lines or len(lines) % _LINES:
        raise OptiGPUError(
            f"The hellaswag file has {len(lines)} lines, not a multiple of {_LINES}; replace it with a good copy."
        )
    items = []
    for start in range(0, len(lines), _LINES):
        context, label, *endings = lines[start : start + _LINES]
        if label not in map(str, range(ENDINGS)) or not all(map(str.strip, [context, *endings])):
            raise OptiGPUError(
                f"The hellaswag file has no valid item at line {start + 1}; replace it with a good copy."
            )
        items.append(Item(_clean(context), tuple(map(_clean, endings)), int(label)))
    return items


def _clean(text: str) -> str:
    """Removes the remains of web pages, as lm-evaluation-harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def item_passages(items: Sequence[Item], encode: Encode, window: int) -> tuple[list[Passage], int]:
    """One for each ending of each item, and how many contexts were cut. Raises OptiGPUError for too long an ending."""
    passages, cut = [], 0
    for item in items:
        context = encode(item.context)
        for ending in item.endings:
            # Together, because a tokenizer may merge text across the boundary.
            tokens = encode(f"{item.context} {ending}")
            predicted = len(tokens) - len(context)
            if not 0 < predicted < window:
                raise OptiGPUError(
                    f"An ending of {predicted} tokens does not fit a window of {window}; ask for longer prompts or "
                    "outputs, which make the window larger."
                )
            kept = np.array(tokens[-window:], np.int64)
            cut += len(tokens) > window
            passages.append(Passage(kept, len(kept) - predicted))
    return passages, cut


def chosen_right(items: Sequence[Item], likelihoods: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each item is answered correctly, from the endings' log-likelihoods [4 * items]."""
    lengths = np.array([[len(ending) for ending in item.endings] for item in items])
    chosen = (likelihoods.reshape(len(items), ENDINGS) / lengths).argmax(axis=1)
    return np.asarray(chosen == np.array([item.label for item in items]))
