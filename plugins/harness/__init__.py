"""Runs the plugins outside TensorRT: a binding to the C++ harness, a float64 reference, and the cases of the GPU check."""
