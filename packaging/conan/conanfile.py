# SPDX-License-Identifier: Apache-2.0
"""A Conan 2 recipe that packages a local checkout: conan create packaging/conan. The CUDA toolkit's headers, MPI and oneDNN are the
system's, as in any build of this project; the targets come from the package's own moeConfig.cmake."""
import pathlib
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy

ROOT = pathlib.Path(__file__).resolve().parents[2]


class MoeConan(ConanFile):
    name = "moe"
    license = "Apache-2.0"
    description = "Expert-parallel mixture-of-experts inference as C++20 types"
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"

    def set_version(self):
        self.version = re.search(r"project\(moe VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text()).group(1)

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*"):
            copy(self, pattern, str(ROOT), self.export_sources_folder)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.blocks.remove("cppstd")  # the project asks for C++20 itself; CMake 3.25 knows no such standard of nvcc
        for option in ("MOE_BUILD_TESTS", "MOE_BUILD_BENCH", "MOE_BUILD_EXAMPLES", "MOE_BUILD_C"):
            toolchain.cache_variables[option] = False
        toolchain.cache_variables["MOE_INSTALL"] = True
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["share/cmake/moe"]
