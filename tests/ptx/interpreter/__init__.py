"""Runs PTX on a CPU, to test GPU kernels where there is no GPU. One register = one array over many threads.

`machine.Machine` holds memory and launches kernels of a `program.Program`. It models what our kernels use and
refuses the rest. It is stricter than a GPU: out-of-bounds and misaligned accesses, memory that nobody wrote,
races between barriers, copies not waited for, and partial warps at .sync instructions all raise `PtxError`.
Source: PTX ISA 8.8.
"""
