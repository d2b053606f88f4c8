// SPDX-License-Identifier: Apache-2.0
// tests/install/consumer/consumer.cpp: includes the installed headers and uses one of them.
#include <moe/moe.hpp>

int main() { return moe::name(moe::ErrorCode::argument) == "E_ARG" ? 0 : 1; }
