"""The Dockerfile asks for nothing that the checkout does not have; whether it builds, only Docker can say."""

from tests.deploy.compose import ROOT, read_compose


def copied() -> set[str]:
    """What the Dockerfile takes from the checkout."""
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines()]
    copies = [words[1:-1] for words in lines if words[:1] == ["COPY"] and not words[1].startswith("--from")]
    return {source for sources in copies for source in sources}


def test_what_is_copied_is_there() -> None:
    assert {name for name in copied() if not (ROOT / name).exists()} == set()


def test_what_is_copied_is_all_that_is_sent_to_docker() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied()


def test_the_image_runs_the_api_as_the_compose_file_does() -> None:
    services = read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"})["services"]
    command = ", ".join(f'"{word}"' for word in services["api"]["command"])
    assert (ROOT / "Dockerfile").read_text().endswith(f"CMD [{command}]\n")
