"""Stub, see the package."""
