"""Kernels: arithmetic on pages, for one processor each."""
