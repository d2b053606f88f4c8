// SPDX-License-Identifier: Apache-2.0
// tests/install/header_only/program.cpp: includes the installed headers and uses one of them. MPI is not included even if it is available.
#include <moe/moe.hpp>

#ifdef MPI_VERSION
#error "moe/moe.hpp includes <mpi.h>"
#endif

int main() { return moe::name(moe::ErrorCode::argument) == "E_ARG" ? 0 : 1; }
