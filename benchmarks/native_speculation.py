"""`python -m benchmarks.native_speculation`: native decoding with guesses from the text, beside plain native decoding.

The two take turns on the same threads. On `bundled:tiny`, which is trained, the text is what the model writes after a
prompt. On a preset's shapes with random numbers a program is made to write a given text, at the full cost of each pass,
in the tokens of bundled:tiny: code that is written again with another name, sentences of the prompt in another order,
code and prose that go on, and a text in which each token was seen before and never goes on as it did, so that no guess
is right. Ratios are medians over the turns, each of the same turn; tokens are compared.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.document import write
from benchmarks.native_program import forced, shaped_program
from optigpu.hardware.cpu import one_cpu_of_each_core
from optigpu.models.facts import facts_of
from optigpu.models.loading.load import load_model, load_tokenizer
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.cpu.speculation import GuessingDecoder
from optigpu.ops.decode.program import Program
from optigpu.report import console
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.vocabulary import OptiGPUError

ROOT = Path(__file__).resolve().parents[1]
CODE, PROSE = ROOT / "optigpu/ops/decode/cpu/interface.py", ROOT / "docs/architecture.md"
NGRAM, LOOKAHEAD = 3, 5
"""The defaults of speculative_decoding."""
PROMPT, NEW = 384, 256
MOST_CHARACTERS = 8000
FASTER, SLOWER = 1.6, 0.95
"""The goals: of plain decoding where text repeats, and where no guess is right."""


@dataclass(frozen=True)
class Case:
    """A program, the prompt that it goes on from, and what is asked of guessing."""

    name: str
    program: Program
    prompt: tuple[int, ...]
    goal: float | None = None


@dataclass(frozen=True)
class Row:
    """A case's rates in tokens/s, turn by turn, and how its guesses fared."""

    case: str
    plain: tuple[float, ...]
    guessing: tuple[float, ...]
    goal: float | None
    acceptance_rate: float | None
    tokens_per_pass: float

    @property
    def ratio(self) -> float:
        """The median of the turns' ratios."""
        return statistics.median(a / b for a, b in zip(self.guessing, self.plain, strict=True))


def measured(case: Case, threads: int, turns: int) -> Row:
    """Raises OptiGPUError when guesses change a token."""
    decoder = CpuDecoder(case.program, threads=threads, cpus=one_cpu_of_each_core())
    guessing = GuessingDecoder(decoder, NGRAM, LOOKAHEAD)
    prompt = torch.tensor([case.prompt])
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        texts: dict[int, torch.Tensor] = {}
        for which in (0, 1) if turn % 2 else (1, 0):
            texts[which], rate = _guessed(guessing, prompt) if which else _plain(decoder, prompt)
            if turn:  # the first is a warm-up
                rates[which].append(rate)
        if not texts[0].equal(texts[1]):
            raise OptiGPUError(f"{case.name}: guesses changed the text.")
    tally = guessing.tally
    right = tally.accepted / tally.guessed if tally.guessed else None
    return Row(case.name, tuple(rates[0]), tuple(rates[1]), case.goal, right, tally.tokens / tally.passes)


def _plain(decoder: CpuDecoder, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    decoder.begin(1, prompt.shape[1] + NEW)
    first, others = decoder.extend(prompt).argmax(1, keepdim=True), torch.empty(1, NEW - 1, dtype=torch.int64)
    began = time.perf_counter()
    for _ in decoder.decode_into(others, first, 1):
        pass
    return others, (NEW - 1) / (time.perf_counter() - began)


def _guessed(guessing: GuessingDecoder, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    guessing.begin(prompt, NEW)
    others = torch.empty(1, NEW - 1, dtype=torch.int64)
    began = time.perf_counter()
    for _ in guessing.decode_into(others, 1):
        pass
    return others, (NEW - 1) / (time.perf_counter() - began)


def trained_cases() -> list[Case]:
    """What bundled:tiny writes after code, and after prose."""
    reference = parse_reference("bundled:tiny")
    model = load_model(reference, device="cpu", dtype="float32")
    NativeDecode().modules(model, Notes())
    program, most = attached(model), model.config.max_position_embeddings - NEW
    return [
        Case(f"bundled:tiny after {name}", program, tuple(_ids(_text(path))[: min(PROMPT, most)]))
        for name, path in (("code", CODE), ("prose", PROSE))
    ]


def forced_cases(preset: str) -> list[Case]:
    """Given texts on a preset's shapes."""
    facts = facts_of(parse_reference(f"preset:{preset}"))
    assert facts is not None
    program = shaped_program(facts, PROMPT + NEW)
    code, prose = _ids(_text(CODE)), _ids(_text(PROSE))
    parts = [prose[start : start + 32] for start in range(0, PROMPT, 32)]
    quoting = [token for part in parts for token in part] + [token for part in parts[::-1] for token in part]
    fresh = range(2, 2 + NEW)
    misleading = [token for one in fresh for token in (one, one + 2 * NEW)][-PROMPT + 1 :]
    again = _ids(_text(CODE).replace("_int64", "_number"))
    texts: list[tuple[str, Sequence[int], float]] = [
        ("code with another name", [*code[:PROMPT], *again], FASTER),
        ("sentences of the prompt", quoting, FASTER),
        ("new code", code, SLOWER),
        ("prose", prose, SLOWER),
        ("no guess is right", [*misleading, 1, *fresh[::-1]], SLOWER),
    ]
    return [
        Case(f"{preset}: {name}", forced(program, text[: PROMPT + NEW]), tuple(text[:PROMPT]), goal)
        for name, text, goal in texts
    ]


def _text(path: Path) -> str:
    return path.read_text("utf-8")[:MOST_CHARACTERS]


def _ids(text: str) -> list[int]:
    tokenizer = load_tokenizer(parse_reference("bundled:tiny"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def main() -> int:
    """Prints the table; 0 where every goal is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama-3.2-1b", help="a preset of the family llama")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    cases = [*trained_cases(), *forced_cases(options.preset)]
    rows = [measured(case, options.threads, options.turns) for case in cases]
    table = Table(
        "case", "plain, tokens/s", "with guesses", "ratio", "goal", "guesses right", "tokens a pass"
    )
    for row in rows:
        medians = (f"{statistics.median(rates):.1f}" for rates in (row.plain, row.guessing))
        right = "none made" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}"
        goal = "" if row.goal is None else f"{row.goal:.2f}"
        table.add_row(row.case, *medians, f"{row.ratio:.2f}", goal, right, f"{row.tokens_per_pass:.2f}")
    console().print(table)
    if options.json:
        figures = [asdict(row) | {"ratio": row.ratio} for row in rows]
        write(options.json, "native_speculation", {"threads": options.threads, "rows": figures})
    return 0 if all(row.goal is None or row.ratio >= row.goal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
