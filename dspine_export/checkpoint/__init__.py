"""Drafter and target checkpoints: formats, validation, lazy tensor access and the pairing of the two.

Everything read here is untrusted: each problem ends as a `CheckpointError` that names the file, the key and the way out.
"""
