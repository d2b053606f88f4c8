#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The changelog begins with this version. The Debian package has the headers and the CMake package, states this version and depends on the
packages of what its programs and libraries link; where the build has libmoe, programs in C and C++ find it in the unpacked package, through
CMake and pkg-config, and run. The Conan recipe and the vcpkg port are well formed, state the version too, and set options that
CMakeLists.txt has. Exit code 77 where cpack's Debian tools are missing. The tests install.conan and install.vcpkg run them."""
import argparse
import ast
import json
import pathlib
import re
import shutil
import subprocess
import sys


def run(*command) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"FAILED ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def provided(package: str) -> list[str]:
    """The names that a package of this system stands for besides its own: a dependency may name one (libspdlog1.10-fmt9)."""
    listed = subprocess.run(["dpkg-query", "--show", "--showformat", "${Provides}\n", package], capture_output=True, text=True, check=False)
    return re.findall(r"([a-z0-9][a-z0-9+.-]+)(?: \([^)]*\))?(?:,|$)", listed.stdout, re.M)


def unmet(package: pathlib.Path, work: pathlib.Path) -> list[str]:
    """Packages of this system that own a library which a file of the package links, and on which the package does not depend."""
    depends = set(re.findall(r"([a-z0-9][a-z0-9+.-]+)(?: \([^)]*\))?(?:,|$| \|)", run("dpkg-deb", "--field", package, "Depends")))
    missing = []
    for file in (f for f in (work / "unpacked").rglob("*") if f.is_file() and not f.is_symlink() and f.read_bytes()[:4] == b"\x7fELF"):
        headers = run("objdump", "-p", file)
        for library in re.findall(r"^ +NEEDED +(\S+)", headers, re.M):
            owner = subprocess.run(["dpkg-query", "--search", f"*/{library}"], capture_output=True, text=True, check=False)
            owners = {line.split(":")[0] for line in owner.stdout.splitlines()}
            names = owners | {name for package_name in owners for name in provided(package_name)}
            if owners and not names & depends:
                missing.append(f"{package.name}: {file.name} links {library} of {', '.join(sorted(owners))}, no dependency")
    return missing


def consume_libmoe(options) -> None:
    """The project in c_consumer, which knows only what the unpacked package has in its usr."""
    source, work = options.source / "tests/install/c_consumer", options.work / "c_consumer"
    run(options.cmake, "-S", source, "-B", work, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={options.work / 'unpacked/usr'}",
        f"-DCMAKE_CXX_COMPILER={options.cxx}")
    run(options.cmake, "--build", work)
    for program in ("c_consumer", "c_consumer_pkg_config", "cpp_consumer"):
        if str(options.work) not in run("ldd", work / program):
            sys.exit(f"FAILED: {program} does not load the package's libmoe")
        run(work / program)


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("source", "build", "work"):
        parser.add_argument(f"--{option}", required=True, type=pathlib.Path)
    for option in ("cpack", "cmake", "cxx"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--libmoe", type=int, default=0, help="1: the build has a libmoe with layers of the host")
    options = parser.parse_args()
    version = re.search(r"project\(moe VERSION (\S+)", (options.source / "CMakeLists.txt").read_text()).group(1)
    problems = []
    newest = re.search(r"^## (\S+)", (options.source / "CHANGELOG.md").read_text(), re.M).group(1)
    if newest != version:
        problems.append(f"CHANGELOG.md begins with {newest}, CMakeLists.txt states {version}")

    recipe = options.source / "packaging/conan/conanfile.py"
    classes = [node for node in ast.parse(recipe.read_text()).body if isinstance(node, ast.ClassDef)]
    methods = {node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)}
    problems += [f"conanfile.py has no {name}()" for name in ("export_sources", "build", "package", "package_info") if name not in methods]
    options_of_cmake = set(re.findall(r"^(?:option\(|set\((?=.* CACHE ))(MOE_\w+)", (options.source / "CMakeLists.txt").read_text(), re.M))
    for file in (recipe, options.source / "packaging/vcpkg/moe/portfile.cmake"):
        named = set(re.findall(r"(?:\b|-D)(MOE_\w+)", file.read_text()))
        problems += [f"{file.name}: CMakeLists.txt has no option {name}" for name in sorted(named - options_of_cmake)]
        if "MOE_INSTALL" not in named:
            problems.append(f"{file.name} does not set MOE_INSTALL")
    port = json.loads((options.source / "packaging/vcpkg/moe/vcpkg.json").read_text())
    if port["version"] != version:
        problems.append(f"vcpkg.json states {port['version']}, CMakeLists.txt {version}")

    if shutil.which("dpkg-deb") is None:
        for problem in problems:
            print(f"FAILED: {problem}")
        print("dpkg-deb is not installed: no Debian package was made")
        return 1 if problems else 77
    shutil.rmtree(options.work, ignore_errors=True)
    run(options.cpack, "-G", "DEB", "--config", options.build / "CPackConfig.cmake", "-B", options.work)
    packages = list(options.work.glob("*.deb"))
    if len(packages) != 1:
        sys.exit(f"FAILED: {len(packages)} packages, expected 1")
    listed = run("dpkg-deb", "--contents", packages[0])
    for path in ("./usr/include/moe/moe.hpp", "./usr/share/cmake/moe/moeConfig.cmake", "./usr/share/cmake/moe/MoePresetLibrary.cmake"):
        if path not in listed:
            problems.append(f"{packages[0].name} lacks {path}")
    if run("dpkg-deb", "--field", packages[0], "Version").strip() != version:
        problems.append(f"{packages[0].name} has another version than {version}")
    run("dpkg-deb", "--extract", packages[0], options.work / "unpacked")
    if options.libmoe:
        consume_libmoe(options)
    if shutil.which("dpkg-shlibdeps") and shutil.which("objdump"):
        problems += unmet(packages[0], options.work)
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{packages[0].name}: {len(listed.splitlines())} entries, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
