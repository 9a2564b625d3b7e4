"""A tokenizer of transformers in a GGUF file, as llama.cpp reads it: byte-level BPE, or pieces with scores.

llama.cpp knows by name how a text is split before its bytes are merged; `SPLITS` has the names of the splits that
people's models use. A tokenizer that cannot be said leaves the file without a vocabulary, and the file says why.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase

from optigpu.backends.llama_cpp.gguf_facts import LEFT_OUT
from optigpu.vocabulary import Document

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's split, which the pre-tokenizer ByteLevel has of itself."""
_DIGITS = "each digit"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SPLITS: Mapping[tuple[str, ...], str] = {
    (_WORDS,): "gpt-2",
    (_DIGITS, _WORDS): "smollm",
    (rf"{_LETTERS}|\p{{N}}{{1,3}}{_AFTER_WORDS}",): "llama-bpe",
    (rf"{_LETTERS}|\p{{N}}{_AFTER_WORDS}",): "qwen2",
}
"""llama.cpp's names by the splits that follow each other."""
_BYTE, _SPACE = "<0x%02X>", "▁"
_LAST = -1e6
"""The score of a piece that no merge makes."""


@dataclass(frozen=True)
class Vocabulary:
    """What a file holds: `model` and `pre` are llama.cpp's names, `kinds` gguf's TokenType of each token."""

    model: str
    pre: str
    tokens: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    space_first: bool | None = None


class _NotExpressedError(Exception):
    """Why a tokenizer cannot be written, as a sentence."""


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase | None, size: int) -> None:
    """Adds a vocabulary of `size` tokens to a file, or why it has none."""
    try:
        if tokenizer is None:
            raise _NotExpressedError("The model has no tokenizer.")
        found = _vocabulary(tokenizer, size)
    except _NotExpressedError as error:
        writer.add_tokenizer_model("none")
        writer.add_string(LEFT_OUT, str(error))
        return
    assert tokenizer is not None
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.pre)
    writer.add_token_list(list(found.tokens))
    writer.add_token_types(list(found.kinds))
    if found.merges:
        writer.add_token_merges(list(found.merges))
    if found.scores:
        writer.add_token_scores(list(found.scores))
    if found.space_first is not None:
        writer.add_add_space_prefix(found.space_first)
    ids = {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_eos_token_id: tokenizer.eos_token_id,
        writer.add_unk_token_id: tokenizer.unk_token_id,
        writer.add_pad_token_id: tokenizer.pad_token_id,
    }
    for add, token in ids.items():
        if isinstance(token, int) and token < size:
            add(token)
    around = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(around) and around[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(around) and around[-1] == tokenizer.eos_token_id)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)


def _vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """Raises _NotExpressedError for a tokenizer that llama.cpp does not have."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _NotExpressedError("The tokenizer has no tokenizer.json.")
    known: dict[str, Any] = json.loads(backend.to_str())
    kind = known["model"]["type"]
    if kind != "BPE":
        raise _NotExpressedError(f"The tokenizer is a {kind}, and only BPE is written.")
    tokens, kinds = _tokens(known, size)
    merges = [each.split(" ") if isinstance(each, str) else each for each in known["model"]["merges"]]
    steps = _steps(known.get("pre_tokenizer"))
    if any(step["type"] == "ByteLevel" for step in steps):
        return Vocabulary("gpt2", _split_of(known, steps), tokens, kinds, [" ".join(pair) for pair in merges])
    # Pieces whose spaces are written as a letter; what is merged first has the highest score.
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks[token]) if token in ranks else _LAST for token in tokens]
    return Vocabulary(
        "llama", "default", tokens, kinds, scores=scores, space_first=_space_first(known, steps)
    )


def _tokens(known: Document, size: int) -> tuple[list[str], list[int]]:
    """Texts and kinds of `size` tokens; ids that the tokenizer does not use are filled."""
    kinds = [int(gguf.TokenType.UNUSED)] * size
    tokens = [f"[PAD{number}]" for number in range(size)]
    bytes_ = {_BYTE % number for number in range(256)} if known["model"].get("byte_fallback") else set()
    for text, number in known["model"]["vocab"].items():
        if number < size:
            tokens[number] = text
            kinds[number] = int(gguf.TokenType.BYTE if text in bytes_ else gguf.TokenType.NORMAL)
    for added in known.get("added_tokens", ()):
        if added["id"] < size:
            special = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
            tokens[added["id"]], kinds[added["id"]] = added["content"], int(special)
    unknown = known["model"].get("unk_token")
    if unknown in known["model"]["vocab"]:
        kinds[known["model"]["vocab"][unknown]] = int(gguf.TokenType.UNKNOWN)
    return tokens, kinds


def _steps(pre: Document | None) -> list[Document]:
    if pre is None:
        return []
    return list(pre["pretokenizers"]) if pre["type"] == "Sequence" else [pre]


def _split_of(known: Document, steps: Sequence[Document]) -> str:
    """llama.cpp's name of how a text is split. Raises _NotExpressedError for a split, or more, that has none."""
    if known.get("normalizer") not in (None, {"type": "NFC"}):
        raise _NotExpressedError(
            f"The tokenizer's normalizer {known['normalizer']['type']} has no name in llama.cpp."
        )
    splits = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            splits.append(str(step["pattern"].get("Regex")))
        elif step["type"] == "Digits" and step["individual_digits"]:
            splits.append(_DIGITS)
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            splits += [_WORDS] if step["use_regex"] else []
        else:
            raise _NotExpressedError(f"The tokenizer's step {step['type']} has no name in llama.cpp.")
    name = SPLITS.get(tuple(splits))
    if name is None:
        raise _NotExpressedError(
            "How the tokenizer splits a text has no name in llama.cpp that is known here."
        )
    return name


def _space_first(known: Document, steps: Sequence[Document]) -> bool:
    """Whether a text begins with a space of its own. Raises _NotExpressedError where spaces are no letters."""
    normalizer = known.get("normalizer") or {"type": "Sequence", "normalizers": []}
    parts = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    kinds = {part["type"] for part in parts} | {step["type"] for step in steps}
    if kinds - {"Prepend", "Replace", "Metaspace", "Split"} or not kinds & {"Replace", "Metaspace"}:
        raise _NotExpressedError(
            f"The tokenizer's steps ({', '.join(sorted(kinds)) or 'none'}) have no name in llama.cpp."
        )
    schemes = [step.get("prepend_scheme") for step in steps if step["type"] == "Metaspace"]
    return "Prepend" in kinds or any(scheme in ("always", "first") for scheme in schemes)
