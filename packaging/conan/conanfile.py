# SPDX-License-Identifier: Apache-2.0
"""A Conan 2 recipe that packages a local checkout: conan create packaging/conan. The CUDA toolkit's headers, MPI and oneDNN are the
system's, as in any build of this project; the targets come from the package's own moeConfig.cmake.

with_c (False): libmoe, too, which is moe::c. cuda (AUTO, ON, OFF): the CUDA space, as MOE_CUDA; AUTO takes an nvcc that is found."""
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
    options = {"with_c": [True, False], "cuda": ["AUTO", "ON", "OFF"]}
    default_options = {"with_c": False, "cuda": "AUTO"}

    def set_version(self):
        self.version = re.search(r"project\(moe VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text()).group(1)

    def configure(self):
        if self.options.with_c:
            self.package_type = "shared-library"

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "capi/*"):
            copy(self, pattern, str(ROOT), self.export_sources_folder)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.blocks.remove("cppstd")  # the project asks for C++20 itself; CMake 3.25 knows no such standard of nvcc
        for option in ("MOE_BUILD_TESTS", "MOE_BUILD_BENCH", "MOE_BUILD_EXAMPLES"):
            toolchain.cache_variables[option] = False
        toolchain.cache_variables["MOE_INSTALL"] = True
        toolchain.cache_variables["MOE_BUILD_C"] = bool(self.options.with_c)
        toolchain.cache_variables["MOE_CUDA"] = str(self.options.cuda)
        toolchain.cache_variables["MOE_NATIVE"] = False  # libmoe runs on other processors, too,
        toolchain.cache_variables["MOE_RUN_CUDA"] = True  # and on GPUs that the machine of the build need not have
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
