"""Writes reference files: named matrices, read by tests/reference/reference_file.h.

Layout: the line "octet-reference 1", then for every matrix the line "name dtype rows cols" and its
elements, little-endian and row by row.
"""

import numpy


def write(path, entries):
    """entries: name -> array of at most two axes, of dtype float32, float64 or int32."""
    with open(path, "wb") as file:
        file.write(b"octet-reference 1\n")
        for name, values in entries.items():
            matrix = numpy.atleast_2d(numpy.asarray(values))
            assert matrix.ndim == 2 and " " not in name, name
            assert matrix.dtype.name in ("float32", "float64", "int32"), (name, matrix.dtype)
            rows, cols = matrix.shape
            file.write(f"{name} {matrix.dtype.name} {rows} {cols}\n".encode())
            file.write(numpy.ascontiguousarray(matrix).astype(matrix.dtype.newbyteorder("<")).tobytes())
