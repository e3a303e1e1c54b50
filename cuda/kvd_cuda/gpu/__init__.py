"""Kernels of kvd for NVIDIA GPUs, in Numba; each with a twin in `kvd_cuda.reference` that says what is right.

Compiled to PTX without a driver (`compile`), launched by whoever has one. Pointers are device addresses,
so a kernel is called alike by the driver and by the tests' PTX interpreter.
"""
