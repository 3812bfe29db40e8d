"""Developer tools: benchmarks, GPU checks, and the training of the example drafter."""
