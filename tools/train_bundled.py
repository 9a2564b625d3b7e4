"""Makes a bundled model: tokenizer, training, evaluation and card.

python -m tools.train_bundled small --data ../shared/data

The folder of the data holds books/*.txt and wikitext-2/{valid,test}.txt. A run that was interrupted goes on with
--resume; a run that had ended only evaluates and writes the files again.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from optigpu.hardware import probe
from optigpu.models.reference import BUNDLED
from tools.bundled_model.architectures import ARCHITECTURES, CONTEXT, Architecture
from tools.bundled_model.card import render_card
from tools.bundled_model.evaluation import int8_loss, load, sample, score
from tools.bundled_model.text import END_OF_TEXT, encode, read_documents, train_tokenizer
from tools.bundled_model.training import WARM_UP_STEPS, Recipe, train


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, then writes the model, its tokenizer and its card into the folder `--out`."""
    options = _parser().parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    architecture = ARCHITECTURES[options.name]
    work = options.work / options.name
    out = options.out or BUNDLED.get(options.name, work / "model")
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(steps=options.steps, seed=options.seed)
    documents = read_documents(options.data)
    tokenizer = train_tokenizer(documents)
    tokens = encode(tokenizer, [each.train for each in documents])
    held_out_texts = [each.held_out for each in documents]
    held_out = encode(tokenizer, held_out_texts)
    best = train(architecture, tokens, held_out, recipe, work, resume=options.resume)
    save_model(architecture, best["model"], out)
    save_tokenizer(tokenizer, out)
    model = load(out)
    test = (options.data / "wikitext-2" / "test.txt").read_text("utf-8")
    scores = {
        "held out": score(model, tokenizer, held_out_texts, tokens),
        "WikiText-2 test": score(model, tokenizer, [test], tokens),
    }
    weights = out / "model.safetensors"
    facts = {
        "name": options.name,
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "size_bytes": weights.stat().st_size,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "sample": sample(model, tokenizer, recipe.seed),
        "train_tokens": len(tokens),
        "best_step": best["step"],
        "warm_up": WARM_UP_STEPS,
        "minutes": best["seconds"] / 60,
        "machine": probe().hardware_class,
        "threads": "one thread" if options.threads == 1 else f"{options.threads} threads",
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    card = render_card(architecture, recipe, documents, scores, int8_loss(out, held_out), facts)
    (out / "MODEL_CARD.md").write_text(card, "utf-8")


def save_model(architecture: Architecture, state: dict[str, Any], folder: Path) -> None:
    """The weights in fp16, a tied head once, and a configuration that any reader of its family knows."""
    import torch

    model = architecture.build(0.0)
    model.load_state_dict(state)
    for name, value in architecture.settings.items():
        setattr(model.config, name, value)
    model.to(torch.float16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone, and wheels keep the mode


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, and the small file by which transformers knows what it is."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_bundled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    work = Path(tempfile.gettempdir()) / "optigpu-bundled"
    parser.add_argument("name", choices=ARCHITECTURES, help="which model")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the text")
    parser.add_argument("--out", type=Path, help="default: the package's own folder, or one of --work")
    parser.add_argument(
        "--work",
        type=Path,
        default=work,
        help=f"checkpoints and log, a folder for each model; default: {work}",
    )
    parser.add_argument("--steps", type=int, default=3375, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser


if __name__ == "__main__":
    main()
