"""torch.export of the two entry points, with weights as fakes: shapes are traced, no weight is read."""
