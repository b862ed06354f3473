"""The backend of C++ kernels for CPUs."""
