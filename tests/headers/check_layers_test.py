#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What check_layers.py must see and must let pass: borders between folders, long functions, kernels with many parameters, exit codes,
assembly; and what scripts/test_table.py says of skipped cases."""
import pathlib
import sys
import unittest
import xml.etree.ElementTree as xml

import check_layers as c

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import test_table  # noqa: E402


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
        self.refused("backends/common/wire_row.hpp", "backends/collective/host/gather_exchange.hpp")
        self.refused("backends/common/wire_row.hpp", "backends/naive.hpp")
        self.refused("backends/window/device/common/rows.cuh", "backends/window/device/low_latency/params.hpp")
        self.refused("backends/window/device/common/rows.cuh", "backends/window/host/rounds.hpp")
        self.allowed("backends/window/host/pplx.hpp", "backends/common/wire_row.hpp")
        self.allowed("backends/naive.hpp", "backends/collective/host/gather_exchange.hpp")

    def test_experts(self):
        self.refused("experts/common/check_weights.hpp", "experts/weights.hpp")
        self.refused("experts/hopper/common/problem.hpp", "experts/hopper/layer/loaders.cuh")
        self.refused("experts/hopper/w4/kernel.cuh", "experts/hopper/token/token_kernel.cuh")
        self.refused("experts/hopper/layer/loaders.cuh", "experts/hopper/contiguous_layer.hpp")
        self.allowed("experts/hopper/w4/kernel.cuh", "experts/hopper/common/reduce.cuh")
        self.allowed("experts/hopper_contiguous.hpp", "experts/hopper/contiguous_layer.hpp")
        self.allowed("experts/hopper/policy.hpp", "experts/common/check_weights.hpp")

    def test_experts_policies(self):
        self.refused("experts/hopper_w4a8.hpp", "experts/hopper_w4a16.hpp")
        self.refused("experts/cublas_grouped.cuh", "experts/cuda_reference.hpp")
        self.refused("experts/monolithic.cuh", "experts/cublas_grouped/products.hpp")
        self.refused("experts/hopper/policy.hpp", "experts/hopper_masked.hpp")
        self.refused("experts/weights.hpp", "experts/reference.hpp")
        self.allowed("experts/hopper_w4a8.cuh", "experts/hopper_w4a8.hpp")
        self.allowed("experts/cublas_grouped.cuh", "experts/cublas_grouped/products.hpp")
        self.allowed("experts/hopper_w4a8.hpp", "experts/hopper/w4/activation.hpp")
        self.allowed("experts/reference.hpp", "experts/weights.hpp")
        self.allowed("experts/onednn.hpp", "experts/common/host_rows.hpp")


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

    def test_sees_functions_whose_head_has_braces(self):
        body = "  work();\n" * 128
        for head in ("void f(A a = {}) {", "void f(V v = {1,2,3}) {", "C::C(int a) : b_{a} {", "C::C(int a) : b_{a}, c_(a), d_{} {",
                     "template <class... T>\nC<T...>::C(T... t) : T{t}... {", "C::C(int a) try : b_{a} {",
                     "C::C() : Base<int>{1}, f_([] { g(); }) {", "void f(F g = [](int) { return 1; }) {",
                     "template <class T> requires requires(T t) { t.x(); } void f() {", "template <A V = A{1}> void f() {",
                     "template <class T> requires C<T> && requires(T t) { t.x(); }\nvoid f() {", "void f() requires (N > 1) {",
                     "template <class T> void f(T t) requires requires { t.x(); } {", "A& A::operator=(A const& a) {",
                     "bool operator==(A const& a, A const& b) {", "extern \"C\" int f(A a = {}) {", "int A::operator[](int i) const {",
                     "[[nodiscard]] auto f(int a[2]) -> A<int> {", "auto const f = [](int a) {", "int const x = [] {",
                     "auto const x = g(1, [](int a) {"):
            with self.subTest(head):
                above = head.count("\n")
                end = "});\n" if head.count("(") > head.count(")") else "}\n"
                self.assertEqual([found[:2] for found in c.long_functions("int a;\n" + head + "\n" + body + end + "int b = f({1}, 2);\n")],
                                 [(2, 130 + above)])
                within = "struct S {\n public:\n  " + head + "\n" + body + end + "};\nvoid g(A a = {}) {\n" + body + "}\n"
                self.assertEqual([found[:2] for found in c.long_functions(within)], [(3, 130 + above), (134 + above, 130)])
        self.assertEqual(c.long_functions("template <class T>\nC::C(int a, T b)\n    : b_{a} {\n" + body + "}\n")[0][3], "C::C(int a, T b)")

    def test_what_is_long_and_no_function(self):
        for head in ("A const table[] = {", "constexpr auto table = make<decltype(f())>{", "int const x = f({", "struct alignas(16) S {",
                     "template <class T>\nrequires (N<T> > 1)\nstruct S {", "template <class T>\nconcept C = requires(T t) {",
                     "namespace n {", "extern \"C\" {", "C::C(int a) : b_{"):
            with self.subTest(head):
                self.assertEqual(c.long_functions(head + "\n" + "  a,\n" * 300 + "};\n"), [])

    def test_what_no_header_may_contain(self):
        lines = lambda text: [number for number, _ in c.forbidden(text)]  # noqa: E731
        self.assertEqual(lines("void f() {\n#pragma omp parallel for\n}\n"), [2])
        self.assertEqual(lines("void f() {\n#pragma omp simd\n}\n"), [])  # vectors, no threads
        self.assertEqual(lines("void f() {\n#pragma omp parallel for simd\n}\n"), [2])
        self.assertEqual(lines("MPI_Win window;\nMPI_Win_free(&window);\n"), [1, 2])
        self.assertEqual(lines("inline __global__ void a() {}\n__global__ inline void b() {}\n"), [1, 2])
        self.assertEqual(lines("static __global__ void a() {}\ntemplate <class T>\n__global__ void b() {}\n#pragma once\n"), [])

    def test_kernels_with_many_parameters(self):
        most = ", ".join(f"Pair<int, {n}> const* p{n}" for n in range(c.MAX_KERNEL_PARAMETERS))
        for head in ("__global__ void k(", "static __global__ void __launch_bounds__(8 * f(2, 3), 1)\n    k(",
                     "template <class A, class B>\n__global__ void __launch_bounds__(256) k("):
            with self.subTest(head):
                line = head.partition("__global__")[0].count("\n") + 2
                self.assertEqual(c.wide_kernels("\n" + head + most + ") {\n  f(1, 2, 3, 4, 5, 6, 7);\n}\n"), [])
                self.assertEqual(c.wide_kernels("\n" + head + most + ", int q) {\n}\n"), [(line, "k", c.MAX_KERNEL_PARAMETERS + 1)])
                self.assertEqual(c.wide_kernels("\n" + head + "int a, /* b, c, d, e, f, g */ A<1, 2> h = {1, 2, 3, 4, 5, 6});\n"), [])
        self.assertEqual(c.wide_kernels("__global__ void k();\nvoid f(int, int, int, int, int, int, int);\n"), [])
        self.assertTrue(c.PARAMETER_EXCUSE.search("// More than 6 parameters: it reads like its formula"))
        self.assertFalse(c.PARAMETER_EXCUSE.search("// More than 6 parameters"))

    def test_the_way_to_mpi(self):
        reach = {"moe/moe.hpp": ["a", "b"], "a": ["b"], "b": ["c", "a"], "c": []}
        self.assertEqual(c.way_to_mpi(reach, "moe/moe.hpp", {"c"})[-2:], ["b", "c"])
        self.assertEqual(c.way_to_mpi(reach, "moe/moe.hpp", {"d"}), [])

    def test_exit_codes(self):
        self.assertEqual(c.unread_skips("int main() {\n  return RUN_ALL_TESTS();\n}\n"), [2])
        self.assertEqual(c.unread_skips("int const result = RUN_ALL_TESTS();\n"), [1])
        self.assertEqual(c.unread_skips("// return RUN_ALL_TESTS();\nreturn moe_test::exit_code(RUN_ALL_TESTS());\n"), [])

    def test_assembly(self):
        self.assertEqual(c.assembly('asm("a");\n__asm__ volatile("b" ::: "memory");\n  __asm("c");\nasm volatile("d");\n'), [1, 2, 3, 4])
        self.assertEqual(c.assembly('// asm("a")\nint plasma, asm_lines, __asm_x;\nf("asm");\n#include "asm"\n'), [])

    def test_long_headers(self):
        text = "\n" * c.MAX_LINES
        for name in ("moe/moe.h", "moe/a.hpp", "tests/gpu/a.cuh"):
            self.assertEqual(c.too_long(name, text + "a"), [f"{name}: {c.MAX_LINES + 1} lines, at most {c.MAX_LINES}"])
            self.assertEqual(c.too_long(name, text), [])
        self.assertEqual(c.too_long("tests/gpu/a_test.cu", text + "a"), [])

    def test_text_that_is_no_code(self):
        self.assertEqual(c.without_comments_and_strings('a(R"html({ " )" {)html", b)'), "a(, b)")
        self.assertEqual(c.without_comments_and_strings('a("asm {", \'{\');  // asm {\n#define B asm {\nb'), "a(, );  \n\nb")


class TestTable(unittest.TestCase):
    """The table at the end of `scripts/gpu test`."""

    def table(self, *cases):
        """Of cases (name, status, output)."""
        root = xml.Element("testsuite")
        for name, status, output in cases:
            case = xml.SubElement(root, "testcase", name=name, status=status)
            xml.SubElement(case, "system-out").text = output
            if status == "notrun":
                xml.SubElement(case, "skipped", message="SKIP_RETURN_CODE=77")
            if status == "fail":
                xml.SubElement(case, "failure", message="Failed")
        return test_table.table(root)

    def test_cases_that_googletest_skipped(self):
        start = "[==========] Running 3 tests from 1 test suite.\nskipped: all 3 cases were skipped\n"  # of another rank
        skip = "a.cu:9: Skipped\nneeds 2 GPUs\n\n[  SKIPPED ] A.{} (0 ms)\n"
        rows, last = self.table(("gpu.a", "run", start + "[       OK ] A.a (1 ms)\n" + skip.format("b") + skip.format("c")))
        self.assertEqual(rows, [("passed", "gpu.a", "1 cases"), ("skipped", "  2 of its cases", "needs 2 GPUs (A.b, …)")])
        self.assertEqual(last, "1 passed, 0 failed, 0 skipped; 2 cases skipped in programs that passed")

    def test_cases_that_a_script_leaves_out(self):
        few = "moe: E_UNSUPPORTED: --device cuda: {0} ranks on one node, which has 1 GPUs; each rank needs its own"
        hopper = "moe: E_UNSUPPORTED: hopper experts: they are built for compute capability 9.0 (sm_90a), device 0 has 8.0"
        rows, last = self.table(
            ("tool.cuda_nccl_test", "run", "".join(f"skipped, {n} ranks: {few.format(n)}\n" for n in (2, 4, 2)) + "9 cases, 0 failures\n"),
            ("tool.cuda_list_test", "run", f"skipped: fp8 pplx hopper_masked: {hopper}\nskipped: fp8 naive hopper_masked: {hopper}\n"),
            ("example.a", "run", "skipped: no input\n"))
        self.assertEqual(rows, [
            ("passed", "tool.cuda_nccl_test", ""), ("skipped", "  2 of its cases", few.format(2) + " (2 ranks, …)"),
            ("skipped", "  1 of its cases", few.format(4) + " (4 ranks)"),
            ("passed", "tool.cuda_list_test", ""), ("skipped", "  2 of its cases", hopper + " (fp8 pplx hopper_masked, …)"),
            ("passed", "example.a", ""), ("skipped", "  1 of its cases", "no input")])
        self.assertEqual(last, "3 passed, 0 failed, 0 skipped; 6 cases skipped in programs that passed")

    def test_what_the_build_left_out(self):
        log = "-- moe: no NCCL, the test multigpu.a is left out\n-- Configuring done\n-- moe: no host packages, the tool is left out\n"
        self.assertEqual(test_table.unbuilt(log), [("not there", "", "no NCCL, the test multigpu.a is left out"),
                                                   ("not there", "", "no host packages, the tool is left out")])
        self.assertEqual(test_table.unbuilt("-- Generating done\n"), [])

    def test_programs(self):
        rows, last = self.table(("a", "notrun", "skipped: 4 ranks need a GPU each, found 1\n"), ("b", "notrun", ""),
                                ("c", "fail", "[  FAILED  ] A.b (2 ms)\nskipped: a case\n"), ("d", "fail", "Unable to find executable: d"))
        self.assertEqual(rows, [("skipped", "a", "4 ranks need a GPU each, found 1"), ("skipped", "b", "SKIP_RETURN_CODE=77"),
                                ("FAILED", "c", "A.b"), ("FAILED", "d", "not built")])
        self.assertEqual(last, "0 passed, 2 failed, 2 skipped; 0 cases skipped in programs that passed")


if __name__ == "__main__":
    unittest.main()
