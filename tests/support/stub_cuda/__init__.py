"""CUDA devices without a GPU: stub libraries under the real CUDA wheels.

Memory is the host's, kernels do nothing. So control flow, shapes, devices, dtypes, allocations and the choice of
kernels are real; numbers, speed and races are not. `build.py` compiles the libraries, `stand_ins.py` answers where host
code reads what a kernel would have computed.
"""
