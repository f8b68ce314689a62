"""CUDA kernels on the CPU: compiles the .cu files of a folder with the C++ compiler, and runs a program with them.

on_cpu.h has the part of CUDA that they can use. Sanitizers find what a GPU may hide: an index out of range, and threads
that read what others write without a barrier in between.
"""
