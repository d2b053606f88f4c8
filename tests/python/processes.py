# SPDX-License-Identifier: Apache-2.0
# tests/python/processes.py: the ranks of a test, each a process.
from __future__ import annotations

import subprocess


def start(*command, environment: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(processes: list[subprocess.Popen], seconds: float) -> str:
    """Waits for the ranks, within the deadline, and ends those that are left when one failed. Their output."""
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=seconds)[0])
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return "\n".join(outputs)
