"""What MicroPython on an ESP32 has and lacks, as far as tools/agent_lint.py looks for it."""

import ast


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODULES = _words(
    "array asyncio binascii camera collections cryptolib deflate errno esp esp32 framebuf gc hashlib heapq io json "
    "machine math micropython network ntptime os platform random re requests select socket ssl struct sys tflm time "
    "tls uctypes vfs"
)
"""Modules of the firmware; `camera` and `tflm` are those that the agent's own firmware adds."""
CORE_MODULES = frozenset({"array", "binascii", "hashlib", "json"})
CORE_OURS = frozenset({"esp32_agent", "esp32_agent.port.base"})

DECORATORS = frozenset({"property", "staticmethod", "classmethod", "micropython.native", "micropython.viper"})

LACKING_NAMES = _words(
    "BlockingIOError BrokenPipeError ChildProcessError ConnectionAbortedError ConnectionError ConnectionRefusedError "
    "ConnectionResetError ExceptionGroup FileExistsError FileNotFoundError InterruptedError IsADirectoryError "
    "ModuleNotFoundError NotADirectoryError PermissionError ProcessLookupError RecursionError ResourceWarning "
    "TimeoutError UnicodeDecodeError UnicodeEncodeError aiter anext ascii breakpoint format vars"
)
LACKING_METHODS = _words(
    "as_integer_ratio bit_count bit_length capitalize casefold expandtabs format_map hexdigest isascii isidentifier "
    "isprintable ljust removeprefix removesuffix rjust swapcase title translate zfill"
)
LACKING_KEYWORDS = frozenset(
    {
        ("from_bytes", "byteorder"),
        ("from_bytes", "signed"),
        ("print", "flush"),
        ("split", "maxsplit"),
        ("split", "sep"),
        ("sum", "start"),
        ("to_bytes", "byteorder"),
        ("to_bytes", "length"),
        ("to_bytes", "signed"),
        ("zip", "strict"),
    }
)
LACKING_SYNTAX: tuple[tuple[type[ast.AST], str], ...] = (
    (ast.Match, "match statement"),
    (ast.TryStar, "except*"),
    (ast.AsyncFor, "async for"),
)

SPEC = r"(.?[<>=^])?[+\- ]?#?0?\d*,?(\.\d+)?[bcdoxXeEfFgGns%]?"
"""Format specs of str.format and f-strings."""
PERCENT = r"([^%]|%%|%(\(\w+\))?[-+ #0]*[\d*]*(\.\d+)?[cdiouxXeEfgGrs])*"
"""Texts on the left of %."""
