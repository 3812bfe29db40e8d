"""Graph rewrites between capture and lowering: one straight-line list of named passes, verified after each."""
