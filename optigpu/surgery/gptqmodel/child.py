"""python -m optigpu.surgery.gptqmodel.child FOLDER: quantizes a saved model with GPTQModel.

The library patches torch and transformers when it is imported, and keeps threads and memory. FOLDER holds
`request.json`, `calibration.json` and the model in `plain`; the result comes to `quantized`. The process ends when its
stdin does, since then its parent has gone.
"""

import json
import os
import sys
import threading
from pathlib import Path

from optigpu.vocabulary import Frozen

REQUEST, IDS, PLAIN, QUANTIZED = "request.json", "calibration.json", "plain", "quantized"


class QuantizationRequest(Frozen):
    """How to quantize: 4 bits, `group_size` inputs for each scale, on `device` with `threads`, weights in `dtype`."""

    method: str
    group_size: int
    device: str
    dtype: str
    threads: int


def main(folder: Path) -> None:
    request = QuantizationRequest.model_validate_json((folder / REQUEST).read_text("utf-8"))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Read by the library, which wants two workers and more, and by transformers when they are imported.
    os.environ.update(GPTQMODEL_CPU_WORKERS=str(max(2, request.threads)), HF_HUB_OFFLINE="1")
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    torch.set_num_threads(request.threads)
    _write_tokenizer(folder / PLAIN)
    # AWQ has zero points, as its paper does; GPTQ is symmetric, which is the library's default.
    kind = {"gptq": {}, "awq": {"method": METHOD.AWQ, "format": FORMAT.GEMM, "sym": False}}[request.method]
    config = QuantizeConfig(
        bits=4,
        group_size=request.group_size,
        device=request.device,
        offload_to_disk=False,
        pack_impl="original",  # the others compile an extension first, which takes longer than packing
        **kind,
    )
    model = GPTQModel.load(str(folder / PLAIN), config, dtype=getattr(torch, request.dtype))
    ids = json.loads((folder / IDS).read_text("utf-8"))
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]
    model.quantize(rows, batch_size=1)
    model.save(str(folder / QUANTIZED))


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose words are numbers: the library needs one, although it gets ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, PreTrainedTokenizerFast

    vocabulary = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).vocab_size
    words = WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0")
    special = {"unk_token": "0", "pad_token": "0", "bos_token": "0", "eos_token": "0"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
