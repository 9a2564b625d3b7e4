"""Programs that run under CPython and under MicroPython, as on a board.

python on_device.py time PORT TIMEOUT_S prints the time of an NTP server.
python on_device.py churn FOLDER writes to a storage for ever, and prints the number of each round.
python on_device.py full FOLDER fills a medium that takes files of up to 10,000 bytes, and prints what happened.
"""

import os
import sys

IS_BOARD = sys.implementation.name == "micropython"


def ask_time(port, timeout_s):
    from esp32_agent.port.micropython import board

    if IS_BOARD:
        from esp32_agent.port.micropython.board import BoardClock as Clock
    else:
        from esp32_agent.port.host.build import HostClock as Clock
    try:
        print(board.ask("127.0.0.1", int(port), Clock(), os.urandom(8), int(timeout_s)))
    except OSError:
        print("OSError")


def storage_in(folder):
    if IS_BOARD:
        from esp32_agent.port.micropython.board import FlashStorage

        return FlashStorage(folder)
    from pathlib import Path

    from esp32_agent.port.host.build import FileStorage

    return FileStorage(Path(folder))


def churn(folder):
    """Replaces a file by equal parts and writes a log of numbers; prints each number when it is done."""
    storage, number = storage_in(folder), 0
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


def full(folder):
    storage = storage_in(folder)
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
    from esp32_agent.port.base import StorageFullError

    try:
        change()
    except StorageFullError:
        return True
    return False


{"time": ask_time, "churn": churn, "full": full}[sys.argv[1]](*sys.argv[2:])
