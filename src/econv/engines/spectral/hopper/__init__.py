"""The spectral engine on Hopper GPUs: warp-specialised kernels in Gluon."""
