# SPDX-License-Identifier: Apache-2.0
# cmake/MoeInstall.cmake: find_package(moe [COMPONENTS io mpi onednn host cuda cublas c]).
include(CMakePackageConfigHelpers)
set(MOE_INSTALL_CMAKEDIR ${CMAKE_INSTALL_DATADIR}/cmake/moe)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/moe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp" PATTERN "*.cuh" PATTERN "*.inl")
install(TARGETS ${MOE_EXPORTED_TARGETS} EXPORT moeTargets)
install(EXPORT moeTargets NAMESPACE moe:: DESTINATION ${MOE_INSTALL_CMAKEDIR})

set(MOE_LIBMOE_FILE libmoe.so.${PROJECT_VERSION})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/moeConfig.cmake.in ${PROJECT_BINARY_DIR}/moeConfig.cmake
                              INSTALL_DESTINATION ${MOE_INSTALL_CMAKEDIR} PATH_VARS CMAKE_INSTALL_LIBDIR NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/moeConfigVersion.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${PROJECT_BINARY_DIR}/moeConfig.cmake ${PROJECT_BINARY_DIR}/moeConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindMoeToolkit.cmake ${PROJECT_SOURCE_DIR}/cmake/FindMoeOneDnn.cmake
              ${PROJECT_SOURCE_DIR}/cmake/MoePresetLibrary.cmake ${PROJECT_SOURCE_DIR}/cmake/MoeModelLibrary.cmake
              ${PROJECT_SOURCE_DIR}/cmake/MoeConfigCheck.cmake
              ${PROJECT_SOURCE_DIR}/cmake/MoeCInterface.cmake ${PROJECT_SOURCE_DIR}/cmake/libmoe.map
              ${PROJECT_SOURCE_DIR}/cmake/onednn_on_demand.cpp
              ${PROJECT_SOURCE_DIR}/cmake/MoeHopperKernels.cmake
              ${PROJECT_SOURCE_DIR}/cmake/MoeCudaArchitectures.cmake
        DESTINATION ${MOE_INSTALL_CMAKEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/moe)
