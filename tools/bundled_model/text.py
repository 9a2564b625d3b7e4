"""The text that the model learns and is judged by, and the tokenizer that is made from the former."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
HELD_OUT = 0.05
"""The share of each file, at its end, that neither the tokenizer nor the training sees."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """One file in its two parts; `sha256` is that of the file's bytes."""

    name: str
    sha256: str
    train: str
    held_out: str


def read_documents(data: Path) -> list[Document]:
    """The books and WikiText-2's valid part below `data`, each cut at a line's end.

    The text is left as it is, WikiText's ` @-@ ` and `<unk>` too, so that the model knows the files as a meter reads
    them. Raises FileNotFoundError when one of the two is missing.
    """
    books = sorted(data.glob("books/*.txt"))
    if not books:
        raise FileNotFoundError(
            f"There is no text under {data / 'books'}; give the folder of the data as --data."
        )
    return [_document(path, data) for path in [*books, data / "wikitext-2" / "valid.txt"]]


def _document(path: Path, data: Path) -> Document:
    raw = path.read_bytes()
    text = raw.decode("utf-8")
    cut = text.find("\n", int(len(text) * (1 - HELD_OUT))) + 1
    return Document(
        name=str(path.relative_to(data)),
        sha256=hashlib.sha256(raw).hexdigest(),
        train=text[:cut],
        held_out=text[cut:],
    )


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """A byte-level BPE as GPT-2's, from the training parts alone: every text can be written in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([document.train for document in documents], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    """All texts as one row of tokens [n], an end-of-text token before each and after the last."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokens = [end]
    for text in texts:
        tokens += [*tokenizer.encode(text).ids, end]
    return np.array(tokens, dtype=np.int64)
