"""Presents results to people and programs: terminal tables, Markdown, CSV, charts, live progress."""
