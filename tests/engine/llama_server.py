"""llama-server, the server of llama.cpp: found, given a file with a vocabulary, started.

The Python package llama-cpp-python does not contain it. Its source distribution has llama.cpp's source, of which the
target llama-server is built: cmake -DGGML_NATIVE=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from optigpu.vocabulary import UnsupportedError
from tests.servers.process import running

NAME = "llama-server"
VARIABLE = "OPTIGPU_LLAMA_SERVER"
"""Names the program where it is not on the PATH."""
MODEL = "optigpu"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def program() -> str | None:
    """Where llama-server is, or None."""
    return shutil.which(os.environ.get(VARIABLE) or NAME)


def with_vocabulary(source: Path, target: Path, words: Sequence[str], merges: Sequence[str] = ()) -> None:
    """Copies a GGUF file that has no vocabulary, and gives it this one: a server must write its answers as text.

    `words` are in GPT-2's letters for bytes. The tensors stay as they are, byte by byte.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "tokenizer.ggml.model"):
            continue
        writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(words))
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(words) - 1)])
    writer.add_token_merges(list(merges) or [f"{LETTERS[0]} {LETTERS[0]}"])
    for kind in (writer.add_bos_token_id, writer.add_eos_token_id):
        kind(0)
    writer.add_add_bos_token(False)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_tokenizer(source: Path, target: Path, tokenizer: Path) -> None:
    """As `with_vocabulary`, with the words of a tokenizer.json that merges bytes."""
    model = json.loads(tokenizer.read_text("utf-8"))["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    with_vocabulary(source, target, words, [" ".join(pair) for pair in model["merges"]])


@contextmanager
def started(model: Path, folder: Path, slots: int, length: int, threads: int) -> Iterator[str]:
    """llama-server with continuous batching, `slots` places of `length` tokens, and no cache of prompts.

    Gives URL#MODEL. Raises UnsupportedError where there is no llama-server, and OptiGPUError where it does not start.
    """
    found = program()
    if found is None:
        raise UnsupportedError(f"{NAME} is not there; build it of llama.cpp, and name it in {VARIABLE}.")
    command = [found, "--model", str(model), "--alias", MODEL, "--threads", str(threads), "--metrics"]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * length)]
    command += ["--no-cache-prompt", "--cache-ram", "0", "--no-ui", "--host", "127.0.0.1", "--port"]
    with running(command, "/health", folder) as url:
        yield f"{url}#{MODEL}"
