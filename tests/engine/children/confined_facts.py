"""Says how it is confined: as the text of a progress message, since it measures nothing."""

import json
import os
import resource
import socket
import sys
import tempfile
from pathlib import Path

from optigpu.child import confined
from tests.engine.children import talk

port = int(sys.argv[1])


def reaches(where: int) -> bool:
    """Whether something listens at that port of loopback, as this process sees it."""
    try:
        with socket.create_connection(("127.0.0.1", where), timeout=5):
            return True
    except OSError:
        return False


def can_write(size: int) -> bool:
    """Whether a file of that size can be written."""
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(size)
            return True
    except OSError:
        return False


with socket.create_server(("127.0.0.1", 0)) as own:
    (Path(tempfile.gettempdir()) / "left").write_text("behind")
    found = {
        "reach": confined.reach(),
        "reaches_the_host": reaches(port),
        "reaches_itself": reaches(own.getsockname()[1]),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "largest_file": resource.getrlimit(resource.RLIMIT_FSIZE)[1],
        "can_write_more": can_write(resource.getrlimit(resource.RLIMIT_FSIZE)[1] + 1),
        "temporary": tempfile.gettempdir(),
        "user": [os.getuid(), os.getgid()],
        "name": __name__,
    }
talk.hear()
talk.say("progress", doing=json.dumps(found))
talk.hear()
