"""Draws the text of the tests, in the layout of OPTIGPU_DATASETS_DIR, from `bundled:tiny` with a seed.

python -m tools.draw_text
"""

import bz2
import random
from collections.abc import Iterator
from pathlib import Path

from optigpu.backends.torch.applied import DecodingModel
from optigpu.models.loading.load import load_tokenizer
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import DeviceKind

MODEL = "bundled:tiny"
SEED, SEQUENCES, TOKENS = 20, 80, 480
FOLDER = Path(__file__).resolve().parents[1] / "tests" / "text"
PARTS = {
    "wikitext-2/test.txt": slice(0, 20),
    "wikitext-2/valid.txt": slice(20, 30),
    "books/first.txt": slice(30, 50),
    "books/second.txt": slice(50, 70),
}
"""Which of the drawn sequences each file has."""
ITEMS = slice(70, 80)
CONTEXT_WORDS, ENDING_WORDS = 40, 10


def main() -> None:
    """Writes the files."""
    drawn = draw()
    for name, part in PARTS.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(drawn[part]) + "\n", "utf-8")
    items = FOLDER / "hellaswag" / "hellaswag_val_full.txt.bz2"
    items.parent.mkdir(exist_ok=True)
    items.write_bytes(bz2.compress("\n".join(made_items(drawn[ITEMS])).encode()))


def draw() -> list[str]:
    """What the model writes of itself."""
    model = DecodingModel(MODEL, (), DeviceKind.CPU, SEED, lambda _: None)
    tokenizer = load_tokenizer(parse_reference(MODEL))
    return [
        str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
        for ids in model.sample(SEQUENCES, TOKENS).tolist()
    ]


def made_items(texts: list[str]) -> Iterator[str]:
    """Lines of HellaSwag's file: the beginning of a text, and as endings how it and three others go on."""
    source, length = random.Random(SEED), CONTEXT_WORDS + ENDING_WORDS
    words = [text.split() for text in texts]
    parts = [each[start : start + length] for each in words for start in range(0, len(each) - length, length)]
    endings = [" ".join(part[CONTEXT_WORDS:]) for part in parts]
    for number, part in enumerate(parts):
        label = source.randrange(4)
        others = source.sample([*endings[:number], *endings[number + 1 :]], 3)
        yield " ".join(part[:CONTEXT_WORDS])
        yield str(label)
        yield from [*others[:label], endings[number], *others[label:]]


if __name__ == "__main__":
    main()
