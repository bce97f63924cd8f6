"""The spectral engines: differentiate in Fourier space, then one small product for each irrep.

The steps are those of `econv.plan`; their cost grows with the order of the group where the dense
engine's grows with its square. The same sums run as plain torch operations (`torch`), in C++ on a
CPU (`native`), and as kernels on GPUs (`triton`, `hopper`). What they share is `operator`.
"""
