"""Continuous batching over one target and one drafter, independent of any server. Importing this package loads nothing heavy."""
