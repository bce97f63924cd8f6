"""The spectral engine on GPUs: kernels in Triton, and what launches them."""
