"""Presents results to people and programs: terminal tables, Markdown, CSV, live progress."""

from optigpu.report.brief import brief_grid
from optigpu.report.catalog import (
    environment_grid,
    job_title,
    jobs_grid,
    model_facts,
    models_grid,
    runs_grid,
    technique_facts,
    techniques_grid,
)
from optigpu.report.edge_leaderboard import edge_csv, edge_grids
from optigpu.report.formats import Column, Grid, console, csv_text, html, latex, markdown, terminal
from optigpu.report.ladder import ladder_csv, ladder_grid, ladder_records
from optigpu.report.leaderboard import (
    comparison_grid,
    leaderboard_csv,
    leaderboard_grid,
    leaderboard_grids,
    leaderboard_records,
)
from optigpu.report.progress import RunProgress, SelfTestProgress, selftest_csv, selftest_grid

__all__ = [
    "Column", "Grid", "RunProgress", "SelfTestProgress", "brief_grid", "comparison_grid", "console", "csv_text",
    "edge_csv", "edge_grids", "environment_grid", "html", "job_title", "jobs_grid", "ladder_csv", "ladder_grid",
    "ladder_records", "latex", "leaderboard_csv", "leaderboard_grid", "leaderboard_grids", "leaderboard_records",
    "markdown", "model_facts", "models_grid", "runs_grid", "selftest_csv", "selftest_grid", "technique_facts",
    "techniques_grid", "terminal",
]  # fmt: skip
