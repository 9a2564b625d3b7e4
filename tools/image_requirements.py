"""Prints what pip installs into the image before the package itself; the Dockerfile calls it.

    python image_requirements.py --torch cuda > requirements.txt

Reads pyproject.toml and constraints.txt in the current folder.
"""

import argparse
import tomllib
from pathlib import Path

EXTRAS = ("service", "otel")
ALSO = ("bitsandbytes",)


def main() -> None:
    """One requirement a line: the package's own, those of the extras, and torch's wheel for CPUs if asked for."""
    parser = argparse.ArgumentParser(
        description="What pip installs into the image before the package itself."
    )
    parser.add_argument("--torch", required=True, choices=("cuda", "cpu"), help="which wheel of torch")
    torch = parser.parse_args().torch
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = [line for name in EXTRAS for line in project["optional-dependencies"][name]]
    lines = [*project["dependencies"], *extras, *ALSO]
    if torch == "cpu":
        pins = Path("constraints.txt").read_text().splitlines()
        lines += [f"{pin}+cpu" for pin in pins if pin.startswith("torch==")]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
