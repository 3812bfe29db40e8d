"""What the commands do, free of any terminal: stages in order, progress through one small interface, results as plain data."""
