# SPDX-License-Identifier: Apache-2.0
# cmake/MoeDependencies.cmake: finds every package. The core's packages are always required, the others unless MOE_HOST_DEPS is OFF.
set(_moe_required REQUIRED)
if(NOT MOE_HOST_DEPS)
  set(_moe_required QUIET)
endif()

find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(Boost 1.74 REQUIRED CONFIG)  # Hana, header-only

find_package(MPI ${_moe_required} COMPONENTS CXX)
find_package(nlohmann_json 3.10 ${_moe_required} CONFIG)
find_package(MoeOneDnn 2.6 ${_moe_required})

if(MOE_BUILD_EXAMPLES)
  find_package(range-v3 ${_moe_required} CONFIG)
  find_package(CLI11 ${_moe_required} CONFIG)
  find_package(fmt ${_moe_required} CONFIG)
  find_package(spdlog ${_moe_required} CONFIG)
endif()
if(MOE_BUILD_TESTS)
  find_package(GTest REQUIRED CONFIG)
  find_package(rapidcheck ${_moe_required} CONFIG)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
endif()
if(MOE_BUILD_BENCH)
  find_package(benchmark ${_moe_required} CONFIG)
endif()
