"""The version, alone in a file so that packaging can read it without importing anything else."""

__version__ = "0.1.0"
