// SPDX-License-Identifier: Apache-2.0
// tests/install/consumer/consumer.cpp: includes the installed headers and uses one of them.
#include <moe/core/error.hpp>
#include <moe/core/types.hpp>

int main() { return moe::name(moe::ErrorCode::argument) == "E_ARG" ? 0 : 1; }
