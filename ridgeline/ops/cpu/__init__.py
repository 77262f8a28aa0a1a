"""The native library of CPU kernels: sources, build and loader."""
