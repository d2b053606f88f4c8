# SPDX-License-Identifier: Apache-2.0
# packaging/vcpkg/moe/portfile.cmake: an overlay port that builds a local checkout: vcpkg install moe --overlay-ports=packaging/vcpkg.
# The CUDA toolkit's headers, MPI and oneDNN are the system's.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS -DMOE_INSTALL=ON -DMOE_BUILD_TESTS=OFF -DMOE_BUILD_BENCH=OFF
                                                           -DMOE_BUILD_EXAMPLES=OFF -DMOE_BUILD_C=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/moe)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
