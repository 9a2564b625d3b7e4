"""A model that learned a small language in seconds, saved with its tokenizer as a `path:` model."""

import bz2
import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from optigpu.paths import cache_dir
from optigpu.quality.text import DATASETS_DIR
from tests.engine.processes import torch_threads

WINDOW = 64
STEPS = 200
_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "llama": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "max_position_embeddings": 96, "tie_word_embeddings": False},
}
_NOUNS = ("fox", "miller", "river", "lantern", "ship", "captain", "garden", "stone", "letter", "winter")
_VERBS = ("follows", "watches", "carries", "forgets", "finds", "praises")
_PLACES = ("near the mill", "by the sea", "under the bridge", "in the old town", "before the storm")


@pytest.fixture(scope="session")
def trained_model(models_dir: Path) -> Path:
    """The folder of `path:trained`."""
    folder = models_dir / "trained"
    save_trained_model(folder)
    return folder


@pytest.fixture
def language_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of datasets: `file:mine.txt` in the language that the model knows, and a test of four endings."""
    folder = tmp_path / "datasets"
    (folder / "hellaswag").mkdir(parents=True)
    (folder / "mine.txt").write_text(sentences(60, seed=5))
    (folder / "hellaswag" / "hellaswag_val_full.txt.bz2").write_bytes(made_items())
    monkeypatch.setenv(DATASETS_DIR, str(folder))
    return folder


def sentences(count: int, seed: int) -> str:
    """Sentences of a small language: some of it can be known, some cannot."""
    source = random.Random(seed)
    return " ".join(
        f"The {source.choice(_NOUNS)} {source.choice(_VERBS)} the {source.choice(_NOUNS)} {source.choice(_PLACES)}."
        for _ in range(count)
    )


def made_items() -> bytes:
    """Twelve items whose right ending is of the language, two of them labelled wrongly."""
    lines: list[str] = []
    for index, whole in enumerate(sentences(12, seed=6).split(". ")):
        words = whole.rstrip(".").split()
        context, right = " ".join(words[:3]), " ".join(words[3:])
        wrong = [right[::-1], " ".join(reversed(right.split())), right.upper()]
        label = index % 4
        endings = [*wrong[:label], right, *wrong[label:]]
        lines += [context, str((label + (index > 9)) % 4), *endings]
    return bz2.compress("\n".join(lines).encode())


def save_trained_model(folder: Path, family: str = "gpt2") -> None:
    """A GPT-2 or a Llama of two layers with a byte-level BPE of 320 ids, trained on such sentences.

    It is kept for other processes and the next run, by all that it is made of.
    """
    kept = cache_dir() / "trained" / f"{family}-{_digest()}"
    with FileLock(f"{kept}.lock"):
        if not kept.is_dir():
            unfinished = kept.with_suffix(".unfinished")
            _train(unfinished, family)
            unfinished.rename(kept)
    shutil.copytree(kept, folder)


def _digest() -> str:
    import torch
    import transformers

    parts = (torch.__version__, transformers.__version__, Path(__file__).read_text())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _train(folder: Path, family: str) -> None:
    tokenizer = _tokenizer(sentences(2000, seed=1))
    with torch_threads(1):  # more gain nothing for such small matrices, and lose much on a busy machine
        _model(tokenizer.encode(sentences(4000, seed=2)), family).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(text: str) -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator([text], vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, eos_token="<|endoftext|>")


def _model(ids: list[int], family: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, vocab_size=320, bos_token_id=0, eos_token_id=0, **_SHAPES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    text = torch.tensor(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - WINDOW, (16,))
        batch = torch.stack([text[start : start + WINDOW] for start in starts])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval()
