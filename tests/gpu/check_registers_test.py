#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What check_registers.py must see: every kernel of a header with its namespaces, kernels without a line, exceptions without a use."""
import contextlib
import io
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import check_registers as c

HEADER = """
// __global__ void in_a_comment() {}
namespace moe::routing {
namespace detail {
struct Args { int rows = 0; };
__global__ inline void plain(Args const a) { if (a.rows > 0) { text("} __global__ void in_a_string("); } }
template <int V, class Config>
__global__ void __launch_bounds__(kWarp* max_warps(V, (1 + 2) * 3), 1)
    bounded(__grid_constant__ Config const cfg) {
}
}  // namespace detail
static __global__ void outside(int n) {}
}  // namespace moe::routing
namespace moe {
inline __global__ void other() {}
}  // namespace moe
"""


class Declared(unittest.TestCase):
    def test_names(self):
        self.assertEqual(c.declared_kernels(HEADER), ["moe::routing::detail::plain", "moe::routing::detail::bounded",
                                                      "moe::routing::outside", "moe::other"])

    def test_every_kernel_is_read(self):
        for header in sorted((c.ROOT / "include" / "moe").rglob("*.?*")):
            code = c.without_comments_and_strings(header.read_text())
            kernels = c.declared_kernels(header.read_text())
            self.assertEqual(len(kernels), code.count("__global__"), header)
            self.assertTrue(not kernels or header.suffix == ".cuh", header)
            for kernel in kernels:
                self.assertRegex(kernel, r"^moe::(\w+::)*[a-z]\w+$", header)


class WithoutEntry(unittest.TestCase):
    DECLARED = {"moe::listed": "a.cuh", "moe::experts::listed": "b.cuh"}

    def test_a_kernel_without_a_line(self):
        problems = c.without_entry(self.DECLARED, ["moe::listed<int, moe::experts::listed>"], {})
        self.assertEqual(len(problems), 1)
        self.assertIn("moe::experts::listed of b.cuh", problems[0])

    def test_all_have_lines(self):
        self.assertEqual(c.without_entry(self.DECLARED, ["moe::listed<4>", "moe::listed<8>", "moe::experts::listed"], {}), [])

    def test_exceptions(self):
        listed = ["moe::listed"]
        self.assertEqual(c.without_entry(self.DECLARED, listed, {"moe::experts::listed": "needs what few builds have"}), [])
        for name, reason, wanted in (("moe::experts::listed", "", "no reason"), ("moe::listed", "why", "it is listed"),
                                     ("moe::gone", "why", "no such kernel")):
            self.assertTrue(any(wanted in problem for problem in c.without_entry(self.DECLARED, listed, {name: reason})), name)


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3moe4fastEv' for 'sm_90a'
ptxas info    : Function properties for _ZN3moe4fastEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 16 barriers, 1024 bytes smem
"""
FAST = "96            0           0   1024  moe::fast"
SERIALISED = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a call\n"
CALLED = "ptxas info    : Function properties for _ZN3moe6calledEv\n    8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"


class Compared(unittest.TestCase):
    """What the check answers to a log and a list, in a folder without headers."""

    def problems(self, log, *listed):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
            path = pathlib.Path(folder)
            (path / "a.cu.o.ptxas").write_text(log)
            (path / "objects").write_text(f"{path}/a.cu.o\n")
            (path / "list").write_text("\n".join(("nvcc 13.0.88", *listed, "")))
            arguments = ["check_registers.py", "--objects", str(path / "objects"), "--nvcc", "13.0.88", "--list", str(path / "list")]
            with mock.patch.object(sys, "argv", arguments), mock.patch.object(c, "ROOT", path):
                code = c.main()
        self.assertEqual(code != 0, "FAILED" in printed.getvalue(), printed.getvalue())
        return printed.getvalue() if code else ""

    def test_the_same(self):
        self.assertEqual(self.problems(LOG, FAST), "")

    def test_serialised_wgmma(self):
        self.assertIn("C7510", self.problems(LOG + SERIALISED, FAST))

    def test_changed_registers(self):
        self.assertIn("moe::fast", self.problems(LOG.replace("Used 96", "Used 97"), FAST))

    def test_a_kernel_that_is_not_listed_and_one_that_is_gone(self):
        self.assertIn("moe::fast", self.problems(LOG))
        self.assertIn("moe::gone", self.problems(LOG, FAST, FAST.replace("fast", "gone")))

    def test_spills_need_a_reason(self):
        spilled = LOG.replace("0 bytes spill stores, 0 bytes spill loads", "8 bytes spill stores, 4 bytes spill loads")
        line = FAST.replace("0           0 ", "8           4 ")
        self.assertIn("moe::fast", self.problems(spilled, line))
        self.assertEqual(self.problems(spilled, "spill ^moe::fast : once a unit", line), "")
        self.assertIn("no reason", self.problems(spilled, "spill ^moe::fast : ", line))

    def test_a_called_function_that_spills(self):
        self.assertIn("moe::called", self.problems(LOG + CALLED, FAST))


if __name__ == "__main__":
    unittest.main()
