"""The Python-based backend ``dspine``. Nothing here imports Triton before the server calls it."""
