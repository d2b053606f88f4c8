# SPDX-License-Identifier: Apache-2.0
# python/moe/_tvm_version.py: importing it refuses a version of apache-tvm-ffi that the extension does not run on.
from __future__ import annotations

import tvm_ffi

#: The versions whose functions the extension takes, as pyproject.toml states them.
LEAST, BELOW = (0, 1, 11), (0, 2)


def check_version(version: str) -> None:
    """ImportError unless the extension runs on the version; one that is not of numbers is let through."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if len(numbers) >= 2 and not LEAST <= numbers < BELOW:
        least, below = (".".join(map(str, bound)) for bound in (LEAST, BELOW))
        raise ImportError(f"moe: apache-tvm-ffi has version {version}, expected at least {least} and below {below}; install one of these")


check_version(getattr(tvm_ffi, "__version__", ""))
