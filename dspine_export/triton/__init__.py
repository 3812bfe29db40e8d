"""Serving on Triton Inference Server. Importing this package loads nothing heavy."""
