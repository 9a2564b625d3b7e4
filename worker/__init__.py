"""Claims jobs and measures them: a Celery worker (service) or a polling loop (embedded) around one function."""
