"""A job as data: the request (spec), its variants (plan), their gains (attribution), and replay."""
