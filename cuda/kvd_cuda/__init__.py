"""Kernels of kvd: score, select and compact one lease's KV cache.

The seam is `kvd_cuda.backend.Backend`. `kvd_cuda.host.HostBackend` implements it for CPU memory,
`kvd_cuda.compress` drives any backend, `kvd_cuda.reference` says in plain float64 what is right.
Nothing is imported here: numba and torch load only with the backend that needs them.
"""
