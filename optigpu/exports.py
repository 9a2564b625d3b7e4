"""The public names of `optigpu`, each with the module that defines it: `optigpu.NAME` imports that module at first use.

`optigpu/__init__.py` repeats them for type checkers; tests/unit/test_exports.py holds the two equal.
"""

EXPORTS: dict[str, str] = {
    "BenchmarkResult": "optigpu.facade.benchmark_result",
    "JobReport": "optigpu.facade.job_report",
    "ladder": "optigpu.facade.measuring",
    "leaderboard": "optigpu.facade.measuring",
    "run": "optigpu.facade.measuring",
}
