"""The library that people import: thin classes and functions over the same techniques, workloads and meters as a job."""
