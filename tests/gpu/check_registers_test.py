#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What check_registers.py must see: every kernel of a header with its namespaces, kernels without a line, exceptions without a use."""
import unittest

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


if __name__ == "__main__":
    unittest.main()
