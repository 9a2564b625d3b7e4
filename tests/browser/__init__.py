"""The pages in a real browser, on the service and PostgreSQL."""
