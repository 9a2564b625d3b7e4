"""CTranslate2's generator, and what it says of itself while it loads a model."""

import logging
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ctranslate2
import numpy as np

from optigpu.backends.runtime import Ids, Logits
from optigpu.vocabulary import OptiGPUError, UnsupportedError

Rows = list[list[str]]
"""Sequences of tokens by their names."""
_SAID = re.compile(r"\[info\]\s+(?:- )?(.+)")
_ABOUT_THE_BUILD = ("CPU:", "Selected ISA:", "Use Intel MKL:", "SGEMM", "GEMM", "Selected compute type:")


@dataclass(frozen=True)
class Decoded:
    """Tokens [rows, count], and the seconds from the request's start to each of them."""

    tokens: Ids
    gaps_s: list[float]


class Generator:
    """A model in CTranslate2. `flags` are the processor, the instructions and the libraries that it chose."""

    def __init__(self, folder: Path, kind: str, threads: int) -> None:
        """Raises UnsupportedError for a type that this CPU does not compute, RuntimeError when it cannot load."""
        offered = ctranslate2.get_supported_compute_types("cpu")
        if kind not in offered:
            raise UnsupportedError(
                f"CTranslate2 does not support {kind} on this CPU, only {', '.join(sorted(offered))}; choose one."
            )
        made, said = _said_by(
            lambda: ctranslate2.Generator(
                str(folder), device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads
            )
        )
        self._held = [made]
        # Its threads end only when it is deleted, and must not outlive the interpreter.
        weakref.finalize(self, self._held.clear)
        self.kind = str(made.compute_type)
        self.flags = [line for line in said if line.startswith(_ABOUT_THE_BUILD)]

    def decode(self, prompts: Rows, count: int) -> Decoded:
        """The most likely tokens after prompts of one length, `count` for each.

        CTranslate2 computes the prompts in one pass and calls back after each token of each row. Raises OptiGPUError
        when it stops early.
        """
        stamps: list[int] = []

        def stamp(_: object) -> bool:
            stamps.append(time.perf_counter_ns())
            return False

        started = time.perf_counter_ns()
        results = self._held[0].generate_batch(
            prompts, max_length=count, include_prompt_in_result=False, end_token=[], callback=stamp
        )
        tokens = [result.sequences_ids[0] for result in results]
        if len(stamps) != len(prompts) * count or {len(row) for row in tokens} != {count}:
            raise OptiGPUError(f"CTranslate2 stopped before {count} tokens were decoded.")
        marks = [started, *stamps[len(prompts) - 1 :: len(prompts)]]
        return Decoded(np.asarray(tokens, np.int64), [gap / 1e9 for gap in np.diff(marks).tolist()])

    def forced(self, rows: Rows) -> Sequence[Sequence[ctranslate2.StorageView]]:
        """Logits of a step after each token of sequences that are given, [rows][tokens] of [vocabulary].

        The step is that of `decode`: CTranslate2 decodes a prompt token by token where the prompt is part of the
        result, and takes the given token in the place of the most likely one.
        """
        results = self._held[0].generate_batch(
            rows, max_length=len(rows[0]), end_token=[], return_logits_vocab=True
        )
        found: list[Sequence[ctranslate2.StorageView]] = [result.logits[0] for result in results]
        return found


def logits_at(views: Sequence[Sequence[ctranslate2.StorageView]], position: int) -> Logits:
    """Of all rows at one position, [rows, vocabulary]."""
    taken = [np.asarray(row[position].to(ctranslate2.DataType.float32)) for row in views]
    return np.stack([each.reshape(-1) for each in taken])


def _said_by(load: Callable[[], ctranslate2.Generator]) -> tuple[ctranslate2.Generator, list[str]]:
    """What `load` gives, and the lines that CTranslate2 writes meanwhile, which it can write to stderr alone."""
    before = ctranslate2.get_log_level()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        try:
            ctranslate2.set_log_level(logging.INFO)
            os.dup2(file.fileno(), 2)
            made = load()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            ctranslate2.set_log_level(before)
        file.seek(0)
        return made, [match.group(1).strip() for match in map(_SAID.search, file) if match]
