# SPDX-License-Identifier: Apache-2.0
"""What conan create runs at its end: a program that finds the package and routes three tokens; where the package has libmoe, a program in C
that runs a layer's experts on it."""
import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class MoeTestPackage(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = ("CMakeDeps",)
    test_type = "explicit"

    def requirements(self):
        self.requires(self.tested_reference_str)

    @property
    def _with_c(self):
        return bool(self.dependencies["moe"].options.with_c)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.blocks.remove("cppstd")  # moe::moe asks for C++20
        toolchain.user_presets_path = False
        toolchain.cache_variables["MOE_TEST_C"] = self._with_c
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def test(self):
        for program in ("program", *(("c_program",) if self._with_c else ())):
            if can_run(self):
                self.run(os.path.join(self.cpp.build.bindir, program), env="conanrun")
