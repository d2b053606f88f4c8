# SPDX-License-Identifier: Apache-2.0
# cmake/MoePackage.cmake: cpack -G DEB: a Debian package of what `cmake --install` installs, under /usr.
set(CPACK_PACKAGE_NAME libmoe-dev)
set(CPACK_PACKAGE_VENDOR "the authors of moe")
set(CPACK_PACKAGE_CONTACT "the authors of moe <moe@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_GENERATOR DEB)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# The CUDA toolkit is found by FindMoeToolkit.cmake, whether it came as a package or not.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libboost-dev (>= 1.74)")
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "libdnnl-dev")  # libmoe opens oneDNN for layers on the host, and does not link it
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "nlohmann-json3-dev, libopenmpi-dev")
# What libmoe and the tool in the package link. A library that is in no package (NCCL of a toolkit) is left out.
find_program(MOE_SHLIBDEPS dpkg-shlibdeps)
mark_as_advanced(MOE_SHLIBDEPS)
if(MOE_SHLIBDEPS)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
endif()
include(CPack)
