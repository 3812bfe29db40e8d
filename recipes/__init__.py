"""Shipped build recipes, package data of ``dspine_recipes``."""
