"""CRC-32, from zlib or, the same number a good ten times sooner, from the optional package isal (`packshift[turbo]`).

zlib needs about 0.14 ms for a record of 256 x 256 pixels, a twentieth of what it takes to make one; ISA-L, which uses the
processor's carry-less multiplication, 0.01 ms (`benchmarks/convert_speed.py`). `PACKSHIFT_TURBO=0` in the environment turns
isal off, as it does simplejpeg.
"""

from __future__ import annotations

import os

__all__ = ["crc32"]

if os.environ.get("PACKSHIFT_TURBO") == "0":
    from zlib import crc32
else:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32
