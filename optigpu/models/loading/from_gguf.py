"""A program that writes the model of a GGUF file as a folder of transformers: `from_gguf FILE FOLDER`.

The weights are what the file's blocks stand for, in float32.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

from optigpu.models.gguf_header import read_header
from optigpu.models.loading.gguf_file import forget_quantizer, restore


def main() -> int:
    """Prints why it cannot, and is then 1."""
    file, folder = map(Path, sys.argv[1:])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Weights, configuration and tokenizer.
        named = {"gguf_file": file.name}
        config = AutoConfig.from_pretrained(file.parent, **named)
        restore(config, read_header(file), file)
        model = AutoModelForCausalLM.from_pretrained(file.parent, config=config, dtype=torch.float32, **named)
        forget_quantizer(model)
        model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):  # which its writer lets nobody else read
            shutil.copymode(folder / "config.json", path)
        AutoTokenizer.from_pretrained(file.parent, **named).save_pretrained(folder)
    except Exception as error:  # the library raises errors of any kind for a file that it does not read
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
