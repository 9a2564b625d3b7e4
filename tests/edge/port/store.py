"""Changes to a storage under CPython or MicroPython, to be killed or to fill up: python store.py FOLDER churn|full."""

import sys

from esp32_agent.port.base import StorageFullError

if sys.implementation.name == "micropython":
    from esp32_agent.port.micropython.storage import FlashStorage

    def make(folder):
        return FlashStorage(folder)

else:
    from pathlib import Path

    from esp32_agent.port.host.storage import FileStorage

    def make(folder):
        return FileStorage(Path(folder))


def churn(storage):
    """Replaces a file by equal parts and writes a log of numbers, for ever; prints each number when it is done."""
    number = 0
    while True:
        number += 1
        line = f"{number:06d}\n".encode()
        storage.replace("state", line * 400)
        storage.append("log", line)
        if number % 5 == 0:
            storage.truncate("log", storage.size("log") - len(line))
            storage.append("log", line)
        print(number)
        if hasattr(sys.stdout, "flush"):
            sys.stdout.flush()


def full(storage):
    """Fills a medium that takes files of up to 10,000 bytes; prints what happened."""
    storage.replace("state", b"a" * 5000)
    print("replace", refused(lambda: storage.replace("state", b"b" * 20_000)))
    print("old", storage.read("state") == b"a" * 5000, storage.size("state.new"))
    storage.append("log", b"c" * 9000)
    print("append", refused(lambda: storage.append("log", b"d" * 5000)))
    print("kept", storage.read("log", 0, 9000) == b"c" * 9000, storage.size("log") <= 10_000)
    storage.truncate("log", 8000)
    storage.append("log", b"e" * 1500)
    print("again", storage.read("log", 7999, 10) == b"c" + b"e" * 9, storage.size("log"))


def refused(change):
    """Whether the medium was full."""
    try:
        change()
    except StorageFullError:
        return True
    return False


{"churn": churn, "full": full}[sys.argv[2]](make(sys.argv[1]))
