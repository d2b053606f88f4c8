# SPDX-License-Identifier: Apache-2.0
# packaging/vcpkg/moe/portfile.cmake: an overlay port that builds a local checkout: vcpkg install moe --overlay-ports=packaging/vcpkg.
# The CUDA toolkit's headers, MPI and oneDNN are the system's. The feature c adds libmoe: vcpkg install "moe[c]" …
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(VCPKG_BUILD_TYPE release)  # headers, and with c a library of C functions that serves debug builds, too
if("c" IN_LIST FEATURES)
  vcpkg_check_linkage(ONLY_DYNAMIC_LIBRARY)
endif()
vcpkg_check_features(OUT_FEATURE_OPTIONS features FEATURES c MOE_BUILD_C)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS -DMOE_INSTALL=ON -DMOE_BUILD_TESTS=OFF -DMOE_BUILD_BENCH=OFF
                                                           -DMOE_BUILD_EXAMPLES=OFF -DMOE_NATIVE=OFF -DMOE_RUN_CUDA=ON ${features})
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/moe)
if("c" IN_LIST FEATURES)
  vcpkg_fixup_pkgconfig()
endif()
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
