#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Configures small projects that call moe_add_model_library(), moe_add_hopper_kernels() and moe_add_config_check(). Wrong arguments: each
is one error that names what is wrong, its value and the allowed values. Right ones: the generated header names what was asked for, and
every quantisation is, in both spaces, a layer that satisfies the rules and the scheme of its name. docs/start.md names all of them. Targets
of the library are stand-ins, so that nothing is searched for, except in one project that has the library as a subdirectory."""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

QWEN = "moe_add_model_library(name MODEL moe::models::Qwen3_30B_A3B"
EXPLICIT = 'moe_add_model_library(name HEADERS layers.hpp COMPOSITIONS "C, R, Q, B, E"'
BACKENDS = "no_expert_parallel all_to_all_v low_latency high_throughput"
SCHEMES = ("none fp8_block128 fp8_per_token fp8_per_tensor int8_per_token int8_per_channel int4_group128 int4_group64 "
           "int4_group32 mxfp4_w4a16 nvfp4_w4a16 mxfp4_fp8 int4_group128_fp8 int4_group64_fp8 int4_group32_fp8")
CARRIED = ("none fp8_block128 int8_per_channel int4_group128 int4_group64 int4_group32 mxfp4_w4a16 nvfp4_w4a16 mxfp4_fp8 "
           "int4_group128_fp8 int4_group64_fp8 int4_group32_fp8")
OF_MODEL = "QUANTIZATIONS BACKENDS PHASES SPACE HEADERS"
OF_COMPOSITIONS = "HEADERS KERNELS COMPOSITIONS LOGITS CUDA"
# A project without the CUDA language unless PRETEND says that it has it; the error begins with the call and its name.
PRETEND = "set(CMAKE_CUDA_COMPILER_LOADED 1)\n"
TAKEN = "add_library(name INTERFACE)\n"
REFUSED = [
    (f"{EXPLICIT} SPACE cuda)", f"(name): SPACE cuda cannot be given without MODEL, which takes {OF_COMPOSITIONS}"),
    (f"{EXPLICIT} PHASES decode)", f"(name): PHASES decode cannot be given without MODEL, which takes {OF_COMPOSITIONS}"),
    (f"{EXPLICIT} BACKENDS low_latency)", f"(name): BACKENDS low_latency cannot be given without MODEL, which takes {OF_COMPOSITIONS}"),
    (f"{EXPLICIT} QUANTIZATIONS none)", f"(name): QUANTIZATIONS none cannot be given without MODEL, which takes {OF_COMPOSITIONS}"),
    (f'{QWEN} COMPOSITIONS "C, R, Q, B, E")', f"(name): COMPOSITIONS C, R, Q, B, E cannot be given with MODEL, which takes {OF_MODEL}"),
    (f"{QWEN} LOGITS float)", f"(name): LOGITS float cannot be given with MODEL, which takes {OF_MODEL}"),
    (f"{QWEN} CUDA)", f"(name): CUDA cannot be given with MODEL, which takes {OF_MODEL}"),
    ("moe_add_model_library(name HEADERS layers.hpp)", "(name): MODEL, or HEADERS and COMPOSITIONS, are required"),
    ("moe_add_model_library(3d MODEL moe::models::Dbrx)", ': the name is "3d", expected an identifier of C++: letters, digits and _, '
     "first no digit"),
    ("moe_add_model_library(a-b MODEL moe::models::Dbrx)", ': the name is "a-b", expected an identifier of C++'),
    ("moe_add_model_library(moe MODEL moe::models::Dbrx)", "(moe): the library's names would be in the namespace moe, which exists; take"),
    (f"{TAKEN}{QWEN})", "moe_add_model_library(name): a target has this name already; each library needs one of its own"),
    (f"{TAKEN}{EXPLICIT})", "moe_add_model_library(name): a target has this name already; each library needs one of its own"),
    (f'{TAKEN}moe_add_config_check(name HEADERS mine.hpp COMPOSITIONS "C, R, Q, B, E")',
     "moe_add_config_check(name): a target has this name already; each check needs one of its own"),
    ("moe_add_model_library(name QUANTISATIONS none)", "(name): not known: QUANTISATIONS none, known: MODEL QUANTIZATIONS BACKENDS PHASES "
     "SPACE HEADERS, or HEADERS KERNELS COMPOSITIONS LOGITS CUDA"),
    (f"{QWEN} SPACE)", "(name): SPACE has no value"),
    (f"{QWEN} SPACE host cuda)", "(name): SPACE host cuda: 2 values, expected 1"),
    (f"{QWEN} SPACE host SPACE host)", "(name): SPACE host host: 2 values, expected 1"),
    (f"{QWEN} MODEL moe::models::Dbrx)", "(name): MODEL moe::models::Qwen3_30B_A3B moe::models::Dbrx: 2 values, expected 1"),
    (f"{QWEN} QUANTIZATIONS none none)", "QUANTIZATIONS none none: none is given twice, expected each value once"),
    (f"{QWEN} BACKENDS low_latency no_expert_parallel BACKENDS low_latency)",
     "BACKENDS low_latency no_expert_parallel low_latency: low_latency is given twice, expected each value once"),
    (f"{QWEN} PHASES decode prefill decode)", "PHASES decode prefill decode: decode is given twice, expected each value once"),
    (f'{EXPLICIT} "C, R, Q, B, E")', "(name): COMPOSITIONS C, R, Q, B, E C, R, Q, B, E: C, R, Q, B, E is given twice, expected each"),
    (f"{EXPLICIT} LOGITS float float)", "(name): LOGITS float float: float is given twice, expected each value once"),
    ("moe_add_model_library(name MODEL moe::models::Qwen3_30B)", "MODEL moe::models::Qwen3_30B is not known, known: "
     "moe::models::Mixtral_8x7B .* moe::models::Qwen3_30B_A3B .* moe::models::Jamba1_5_Large; a struct of your own needs HEADERS that"),
    ("moe_add_model_library(name MODEL Qwen3_30B_A3B)", "MODEL Qwen3_30B_A3B is not known, known: moe::models::Mixtral_8x7B"),
    ("moe_add_model_library(name MODEL moe::models::Qwen3_30B HEADERS mine.hpp)", "MODEL moe::models::Qwen3_30B is not known, known: "),
    (f"{QWEN} SPACE gpu)", "SPACE gpu is not known, known: host cuda"),
    (f"{QWEN} PHASES decode training)", "PHASES training is not known, known: prefill decode"),
    (f"{QWEN} BACKENDS deepep)", f"BACKENDS deepep is not known, known: {BACKENDS}"),
    (f"{QWEN} QUANTIZATIONS none int3)", f"QUANTIZATIONS int3 is not known, known: {SCHEMES}"),
    (f"{QWEN} SPACE cuda)", ": SPACE cuda: needs the CUDA language, which this project has not enabled. Add CUDA to its project(), as in "
     "project(small LANGUAGES CXX CUDA), or call enable_language(CUDA) before find_package(moe)"),
    (f"{EXPLICIT} CUDA)", "moe_add_model_library(name CUDA): needs the CUDA language"),
    ('moe_add_hopper_kernels(name "bf16 FastSilu")', "moe_add_hopper_kernels(name): needs the CUDA language"),
    *((f'{PRETEND}moe_add_hopper_kernels(name "{instance}")', f'moe_add_hopper_kernels(name): not known: "{instance}", known: "<bf16|')
      for instance in ("fp9 FastSilu", "bf16 FastSwish", "bf16", "fp8_block FastSilu AnyActivation", "w4a16 int3", "w4a8 nvfp4")),
    (f"{PRETEND}{QWEN} SPACE cuda BACKENDS low_latency QUANTIZATIONS none int8_per_token)",
     "BACKENDS low_latency cannot carry QUANTIZATIONS int8_per_token in SPACE cuda, it carries: " + CARRIED +
     ". Others need a library of their own with no_expert_parallel or all_to_all_v"),
    (f"{PRETEND}{QWEN} SPACE cuda BACKENDS high_throughput QUANTIZATIONS fp8_per_token)",
     "BACKENDS high_throughput cannot carry QUANTIZATIONS fp8_per_token in SPACE cuda, it carries: " + CARRIED),
    ("moe_add_config_check(name HEADERS mine.hpp)", "moe_add_config_check(name): HEADERS and COMPOSITIONS are required"),
    ('moe_add_config_check(name COMPOSITIONS "C, R, Q, B, E")', "moe_add_config_check(name): HEADERS and COMPOSITIONS are required"),
    ("moe_add_config_check(name HEADERS)", "moe_add_config_check(name): HEADERS and COMPOSITIONS are required"),
    ('moe_add_config_check(name HEADER mine.hpp COMPOSITIONS "C, R, Q, B, E")',
     "moe_add_config_check(name): not known: HEADER mine.hpp, known: HEADERS COMPOSITIONS"),
]
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(small LANGUAGES {languages})
foreach(target moe::moe moe::io moe::mpi moe::onednn moe::cuda moe::cublas MoeToolkit::cublas MoeToolkit::nccl MoeOneDnn::dnnl MPI::MPI_CXX)
  add_library(${{target}} INTERFACE IMPORTED)
endforeach()
set_target_properties(moe::moe PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "$<BUILD_INTERFACE:{root}/include>;$<INSTALL_INTERFACE:include>")
foreach(module MoeCudaArchitectures MoeCInterface MoeConfigCheck MoePresetLibrary MoeModelLibrary MoeHopperKernels)
  include({root}/cmake/${{module}}.cmake)
endforeach()
{call}
"""
SUBDIRECTORY = """cmake_minimum_required(VERSION 3.25)
project(above LANGUAGES {languages})
set(MOE_CUDA OFF)
add_subdirectory({root} moe)
{call}
"""


def configure(folder: str, call: str, arguments, languages: str, project: str = PROJECT) -> tuple[int, str]:
    """The exit code and what CMake says, in one line."""
    pathlib.Path(folder, "CMakeLists.txt").write_text(project.format(call=call, root=arguments.root, languages=languages))
    done = subprocess.run([arguments.cmake, "-G", "Ninja", "-S", folder, "-B", f"{folder}/build", f"-DCMAKE_CXX_COMPILER={arguments.cxx}",
                           *(f"-D{setting}" for setting in arguments.setting)],
                          capture_output=True, text=True, check=False)
    return done.returncode, re.sub(r"\s+", " ", done.stderr + done.stdout)


def check_refused(call: str, expected: str, arguments) -> str | None:
    with tempfile.TemporaryDirectory(prefix="moe-arguments-") as folder:
        code, said = configure(folder, call, arguments, "NONE")
    pattern = re.escape(expected).replace(r"\.\*", ".*")
    if code == 0 or said.count("CMake Error") != 1 or not re.search(pattern, said):
        return f"{call}: expected one error with \"{expected}\", and CMake ends with {code}: {said}"
    return None


def generated(call: str, arguments) -> tuple[str, list[str]]:
    """The header of a library and the names of its sources."""
    with tempfile.TemporaryDirectory(prefix="moe-arguments-") as folder:
        code, said = configure(folder, call, arguments, "CXX")
        if code != 0:
            return f"CMake ends with {code}: {said}", []
        library = pathlib.Path(folder, "build", "name")
        return (library / "include" / "name.hpp").read_text(), sorted(path.name for path in library.glob("*.cpp"))


def check_phases(arguments) -> list[str]:
    """Phases decide over names; what is compiled is the same."""
    problems = []
    both = generated(f"{QWEN} BACKENDS no_expert_parallel low_latency)", arguments)
    decode = generated(f"{QWEN} BACKENDS low_latency no_expert_parallel PHASES decode)", arguments)
    sources = ["name_low_latency_none.cpp", "name_no_expert_parallel_none.cpp"]
    for (header, found), phases in ((both, ["prefill", "decode"]), (decode, ["decode"])):
        if found != sources:
            problems.append(f"PHASES {phases}: sources {found}, expected {sources}: {header[:2000]}")
        for phase in ("prefill", "decode"):
            count = header.count(f"using {phase} = ")  # one for each backend, and the preferred one
            if count != (3 if phase in phases else 0):
                problems.append(f"PHASES {phases}: {count} times \"using {phase}\" in {header[:2000]}")
    return problems


def check_hopper_kernels(arguments) -> list[str]:
    """Each instance is a source with the launcher of its scheme and activation."""
    expected = {"bf16 FixedActivation<moe::activation::Kind::gelu>":
                    ("bf16_FixedActivation_moe__activation__Kind__gelu__0", "layer_launcher<moe::hopper::Scheme::bf16, "
                     "moe::hopper::FixedActivation<moe::activation::Kind::gelu>>()"),
                "fp8_block FastSilu": ("fp8_block_FastSilu_0", "layer_launcher<moe::hopper::Scheme::fp8_block, moe::hopper::FastSilu>()")}
    instances = " ".join(f'"{instance}"' for instance in expected)
    problems = []
    with tempfile.TemporaryDirectory(prefix="moe-arguments-") as folder:
        # Without the CUDA language a .cu cannot be built; the sources are there before CMake finds that out.
        _, said = configure(folder, f"{PRETEND}moe_add_hopper_kernels(name {instances})", arguments, "NONE")
        for name, launcher in expected.values():
            source = pathlib.Path(folder, "build", "name", f"hopper_{name}.cu")
            if not source.exists() or launcher not in source.read_text():
                problems.append(f"{source.name}: not there, or without {launcher}: {said}")
    return problems


def check_subdirectory(arguments) -> list[str]:
    """The same call in a project that has this one as a subdirectory: no variable and no found package of it is in the caller's scope."""
    with tempfile.TemporaryDirectory(prefix="moe-arguments-") as folder:
        call = f"{QWEN} BACKENDS no_expert_parallel low_latency)"
        code, said = configure(folder, call, arguments, "CXX", SUBDIRECTORY)
        header = pathlib.Path(folder, "build", "name", "include", "name.hpp")
        return [] if code == 0 and header.exists() else [f"a project above: CMake ends with {code}: {said}"]


def check_page(arguments) -> list[str]:
    """docs/start.md names the module's schemes, and those that windows of the CUDA space refuse, in the module's order."""
    root = pathlib.Path(arguments.root)
    module = (root / "cmake" / "MoePresetLibrary.cmake").read_text()
    page = re.sub(r"\s+", " ", (root / "docs" / "start.md").read_text())
    problems = []
    for variable, sentence in (("MOE_PRESET_QUANTIZATIONS", r"`QUANTIZATIONS` takes ([^.]*)\."),
                               ("MOE_PRESET_NOT_OVER_WINDOWS", r"so that (`[^.]*) are refused there\.")):
        listed = re.search(rf"set\({variable}\s+([^)]*)\)", module)
        named = re.search(sentence, page)
        if not listed or not named:
            problems.append(f"no set({variable} …) in the module, or nothing like \"{sentence}\" in docs/start.md")
        elif re.findall(r"`([^`]*)`", named[1]) != listed[1].split():
            problems.append(f"docs/start.md: \"{named[0]}\", and {variable} is {listed[1].split()}")
        elif variable == "MOE_PRESET_QUANTIZATIONS" and listed[1].split() != SCHEMES.split():
            problems.append(f"this test knows {SCHEMES}, and {variable} is {listed[1].split()}")
    return problems


def check_schemes(arguments) -> list[str]:
    """One translation unit that includes the header of a library with all schemes, for each space."""
    with tempfile.TemporaryDirectory(prefix="moe-arguments-") as folder:
        text, flags = "#include <string_view>\n", []
        for space in ["host", "cuda"] if arguments.cuda else ["host"]:
            call = f"{PRETEND}moe_add_model_library({space}_blocks MODEL moe::models::Qwen3_30B_A3B QUANTIZATIONS {SCHEMES} SPACE {space})"
            # Without the CUDA language a .cu cannot be built; the header is there before CMake finds that out.
            pathlib.Path(folder, space).mkdir()
            code, said = configure(f"{folder}/{space}", call, arguments, "CXX")
            if code != 0 and space == "host":
                return [f"{call}: CMake ends with {code}: {said}"]
            flags.append(f"-I{folder}/{space}/build/{space}_blocks/include")
            text += f"#include <{space}_blocks.hpp>\n"
            for scheme in SCHEMES.split():
                block = f"{space}_blocks::no_expert_parallel::{scheme}::decode"
                text += (f"static_assert(std::string_view({block}::Layer::Quant::kName) == \"{scheme}\");\n"
                         f"static_assert(sizeof({block}) > 0);\n")
        source = pathlib.Path(folder, "schemes.cpp")
        source.write_text(text)
        done = subprocess.run([arguments.cxx, f"@{arguments.flags}", *flags, "-fsyntax-only", source],
                              capture_output=True, text=True, check=False)
        return [] if done.returncode == 0 else [f"the blocks of all schemes: {done.stderr[:4000]}"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cmake", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--flags", required=True, help="a file with the compiler's flags, one a line")
    parser.add_argument("--cuda", action="store_true", help="also the CUDA space")
    parser.add_argument("--setting", action="append", default=[], help="NAME=VALUE of CMake: where dependencies are")
    arguments = parser.parse_args()
    problems = [problem for call, expected in REFUSED if (problem := check_refused(call, expected, arguments))]
    problems += check_phases(arguments)
    problems += check_hopper_kernels(arguments)
    problems += check_subdirectory(arguments)
    problems += check_page(arguments)
    problems += check_schemes(arguments)
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(REFUSED)} wrong calls, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
