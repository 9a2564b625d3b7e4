"""Compiles every Triton kernel for every GPU of the catalog, and writes what they take: `python -m tools.kernel_table`.

Needs no GPU. Ends with status 1 if a kernel does not compile, spills more than its example allows, or needs more than a
GPU has.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from optigpu.report.formats import console
from optigpu.vocabulary import OptiGPUError
from tools.kernels.page import document, page
from tools.kernels.table import Row, known_rows, rows

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"


def main(arguments: Sequence[str]) -> int:
    """Compiles, writes kernels.json, and prints the faults."""
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_table", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=FOLDER, help="the folder to write to (default: docs/results)"
    )
    parser.add_argument("--page", type=Path, help="a file for the table as Markdown")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="default: 2")
    parser.add_argument(
        "--published", type=Path, help="a kernels.json: what it has of the same kernels is not compiled again"
    )
    parser.add_argument(
        "--again", nargs="*", default=[], help="capabilities that are compiled again all the same"
    )
    options = parser.parse_args(arguments)
    try:
        published = json.loads(options.published.read_text("utf-8"))["rows"] if options.published else []
        found = rows(options.processes, known_rows(published, options.again))
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "kernels.json").write_text(json.dumps(document(found), indent=1) + "\n", "utf-8")
    if options.page:
        options.page.write_text(page(found), "utf-8")
    wrong = [_sentence(row, fault) for row in found for fault in row.faults]
    for sentence in wrong:
        console(stderr=True).print(sentence, markup=False)
    return 1 if wrong else 0


def _sentence(row: Row, fault: str) -> str:
    return f"{row.kernel} ({row.example}) on {row.capability}: {fault}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
