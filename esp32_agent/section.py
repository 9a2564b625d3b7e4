"""What config.json becomes. It stays in memory, while config.py, which reads and checks, is forgotten again."""


class ConfigError(Exception):
    """The sentence that says what is wrong with the configuration."""


class Section:
    """The members of an object of the file, as attributes: config.py says which there are, and of which kinds."""

    def __init__(self, members: dict[str, object]) -> None:
        for name, value in members.items():
            setattr(self, name, value)
