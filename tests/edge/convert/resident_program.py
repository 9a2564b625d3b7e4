"""`resident_program.py FOLDER`: runs the programs in FOLDER one after the other, so that TensorFlow is loaded once.

Each line of stdin is the name of a program and its request; the answers are those of the programs, on stdout.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path


def main(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "optigpu_convert", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    answering, building, evaluating = (
        importlib.import_module(f"{spec.name}.{name}") for name in ("answers", "build", "evaluate")
    )
    programs = {"build": building.build, "evaluate": evaluating.evaluate}
    answers = answering.Answers(os.dup(1))
    os.dup2(2, 1)  # libraries print there
    for line in sys.stdin:
        step, request = json.loads(line)
        try:
            answers.done(programs[step](request, answers))
        except answering.RefusalError as refusal:
            answers.refuse(refusal)


main(Path(sys.argv[1]))
