"""Triton-language kernels of the DSpine operators, importable as ``dspine_kernels`` after installation."""
