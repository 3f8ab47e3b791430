"""SHA-256 of codes, for comparing processes: ``python code_digests.py`` prints them as JSON.

Run under other instruction sets, without JIT, and with other thread counts, all must agree.
"""

import hashlib
import json

import numpy as np
from support import gaussian

import polarquant_nb as pq

FORMATS = {
    "hadamard": pq.PolarFormat(64, (4, 2, 2, 2)),
    "hadamard, groups, offset": pq.PolarFormat(48, (5, 3, 6, 1), "int8"),
    "haar, offset": pq.PolarFormat(32, (6, 5, 4, 3, 2), "float16", "haar"),
    "8-bit radii": pq.PolarFormat(32, (4, 3, 2), radius="log8"),
    "8-bit radii, offset": pq.PolarFormat(16, (5, 3, 3, 3), "int8", radius="log8"),
    "fitted": pq.PolarFormat(16, (3, 4, 2), rotation="none"),
}


def unkind_rows(head_dim):
    """Vectors ``(2, 2, 300, head_dim)``: most are Gaussian, some are at every limit."""
    x = gaussian(2, 2, 300, head_dim, seed=20)
    x[0, 0, 1] = 0
    x[0, 0, 2] = np.nan
    x[0, 0, 3, 5] = np.inf
    x[0, 0, 4, 6] = -np.inf
    x[0, 0, 5] = 3e38  # its squares and its norm overflow
    x[0, 0, 6, ::2] = -1e38
    x[0, 0, 7] *= np.float32(1e-20)  # its squares are subnormal
    x[0, 0, 8] *= np.float32(1e-38)
    x[0, 0, 9] = np.eye(head_dim)[3]  # angles on boundaries
    x[0, 0, 10] = 1
    x[0, 0, 11, 4:] = -0.0
    x[0, 1, 140] = np.nan
    x[1, 0, :128] = np.nan  # a page without a finite row
    x[1, 1] += 1000
    return x


def encoded(name):
    """Pages of a format, rows that cannot be stored included."""
    fmt = FORMATS[name]
    x = unkind_rows(fmt.head_dim)
    codebooks = None
    if name == "fitted":
        codebooks = pq.Codebooks([[0.1, 0.9, 1.2, 2.7, 3.3, 4.1, 5.0, 6.2], *(
            np.linspace(0.05, 1.5, 2**bits) ** 1.05 for bits in fmt.level_bits[1:]
        )])  # fmt: skip
    return pq.encode(x, fmt, codebooks=codebooks, nan="propagate")


def digests():
    """SHA-256 of the words of each format."""
    return {name: hashlib.sha256(encoded(name).words.tobytes()).hexdigest() for name in FORMATS}


if __name__ == "__main__":
    print(json.dumps(digests()))
