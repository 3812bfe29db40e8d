"""A Triton backend named ``cpu`` that compiles nothing: with TRITON_INTERPRET=1 every kernel runs in Triton's numpy interpreter.

vLLM's CPU build takes Triton for absent unless a backend of this name exists, and its Model Runner V2 cannot start without Triton.
"""
