"""Drafter executors, the embedded target, and the draft-verify loop between them. Importing this package loads nothing heavy."""
