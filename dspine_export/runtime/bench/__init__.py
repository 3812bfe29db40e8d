"""What a draft pass costs on this GPU, against what it must cost. See `measure.run_benchmark`; nothing heavy is imported here."""
