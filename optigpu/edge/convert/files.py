"""The files of a converted model: written into a temporary folder, and moved to their places when all are there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optigpu.vocabulary import SpecError

MANIFEST = "manifest.json"
GOLDEN = "golden.bin"
BYTES_A_LINE = 16


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """A temporary folder beside the output, on the same file system; it is removed at the end.

    Raises SpecError if nothing can be written there.
    """
    if output.exists() and not output.is_dir():
        raise SpecError(f"--output {output}: there is a file of that name; name a folder.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = output if output.is_dir() else output.parent
        folder = Path(tempfile.mkdtemp(prefix=".optigpu-convert-", dir=beside))
    except OSError as error:
        raise SpecError(f"--output {output} cannot be written: {error.strerror}.") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, names: tuple[str, ...], output: Path) -> None:
    """Moves the files into the output folder, the manifest last: where it is, all the others are.

    Raises SpecError if they cannot be moved.
    """
    try:
        output.mkdir(exist_ok=True)
        (output / MANIFEST).unlink(missing_ok=True)
        for name in sorted(names, key=lambda each: each == MANIFEST):
            os.replace(folder / name, output / name)
    except OSError as error:
        raise SpecError(f"--output {output} cannot be written: {error.strerror}.") from None


def c_array(name: str, model: bytes) -> tuple[str, str]:
    """The model as C++ source and its header, aligned as TFLite Micro wants it."""
    header = (
        f"#ifndef {name.upper()}_H_\n#define {name.upper()}_H_\n\n"
        f"extern const unsigned char {name}[];\nextern const unsigned int {name}_len;\n\n#endif\n"
    )
    lines = (
        "    " + ", ".join(f"0x{byte:02x}" for byte in model[start : start + BYTES_A_LINE]) + ","
        for start in range(0, len(model), BYTES_A_LINE)
    )
    source = (
        f'#include "{name}.h"\n\nalignas(16) const unsigned char {name}[] = {{\n'
        + "\n".join(lines)
        + f"\n}};\nconst unsigned int {name}_len = {len(model)};\n"
    )
    return source, header
