#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What check_layers.py must see and must let pass: borders between folders, long functions, assembly."""
import unittest

import check_layers as c


class Borders(unittest.TestCase):
    def refused(self, source, target):
        self.assertTrue(c.border("moe/" + source, "moe/" + target), f"{source} may include {target}")

    def allowed(self, source, target):
        self.assertEqual(c.border("moe/" + source, "moe/" + target), "")

    def test_policies_know_nothing_of_each_other(self):
        self.refused("backends/pplx.hpp", "backends/low_latency.hpp")
        self.refused("backends/window/device/high_throughput/positions.cuh", "backends/window/device/low_latency/dispatch.cuh")
        self.refused("backends/window/device/pplx/exchange.hpp", "backends/low_latency.hpp")
        self.refused("backends/window/device/pplx.cuh", "backends/window/device/two_sided/launch.cuh")
        self.allowed("backends/window/device/pplx/exchange.hpp", "backends/pplx.hpp")
        self.allowed("backends/window/device/pplx.cuh", "backends/window/device/pplx/launch.cuh")
        self.allowed("backends/window/device/pplx/dispatch.cuh", "backends/window/device/common/peer_rows.cuh")

    def test_what_is_shared_lies_below(self):
        self.refused("backends/common/wire_row.hpp", "backends/window/host/rounds.hpp")
        self.refused("backends/common/wire_row.hpp", "backends/collective/gather_exchange.hpp")
        self.refused("backends/common/wire_row.hpp", "backends/naive.hpp")
        self.refused("backends/window/device/common/rows.cuh", "backends/window/device/low_latency/params.hpp")
        self.refused("backends/window/device/common/rows.cuh", "backends/window/host/rounds.hpp")
        self.allowed("backends/window/host/pplx.hpp", "backends/common/wire_row.hpp")
        self.allowed("backends/naive.hpp", "backends/collective/gather_exchange.hpp")

    def test_experts(self):
        self.refused("experts/hopper/common/problem.hpp", "experts/hopper/layer/loaders.cuh")
        self.refused("experts/hopper/w4/kernel.cuh", "experts/hopper/token/token_kernel.cuh")
        self.refused("experts/hopper/layer/loaders.cuh", "experts/hopper/contiguous_layer.hpp")
        self.allowed("experts/hopper/w4/kernel.cuh", "experts/hopper/common/reduce.cuh")
        self.allowed("experts/hopper_contiguous.hpp", "experts/hopper/contiguous_layer.hpp")


class LongFunctions(unittest.TestCase):
    def lengths(self, text):
        return [(lines, bound) for _, lines, bound, _ in c.long_functions(text)]

    def test_counts_from_the_head_to_the_last_brace(self):
        body = "  work();\n" * (c.MAX_FUNCTION_LINES - 1)
        self.assertEqual(self.lengths("void f(int a) {\n" + body + "}\n"), [(c.MAX_FUNCTION_LINES + 1, c.MAX_FUNCTION_LINES)])
        self.assertEqual(self.lengths("void f(int a) {\n" + body[10:] + "}\n"), [])

    def test_kernels_may_be_longer(self):
        body = "  if (a) {\n    b();\n  }\n" * (c.MAX_KERNEL_LINES // 3)
        self.assertEqual(self.lengths("template <int N>\n__global__ void k(int a) {\n" + body + "}\n"),
                         [(body.count("\n") + 3, c.MAX_KERNEL_LINES)])

    def test_sees_members_and_no_classes(self):
        body = "    work();\n" * c.MAX_FUNCTION_LINES
        found = self.lengths("namespace n {\nclass C {\n  int a = 0;\n  template <class T>\n  int f(T const& t) const {\n" + body +
                             "  }\n};\n}\n")
        self.assertEqual(found, [(c.MAX_FUNCTION_LINES + 3, c.MAX_FUNCTION_LINES)])
        self.assertEqual(self.lengths("struct S {\n" + "  int a(int);\n" * 300 + "};\n"), [])

    def test_text_that_is_no_code(self):
        self.assertEqual(c.without_comments_and_strings('a("asm {", \'{\');  // asm {\n#define B asm {\nb'), "a(, );  \n\nb")


if __name__ == "__main__":
    unittest.main()
