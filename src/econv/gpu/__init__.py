"""Kernels on GPUs: where they run, how they are launched, and passes over images."""
