"""The classes and functions that people import, one file each; `optigpu.exports` lists them. Imports nothing itself."""
