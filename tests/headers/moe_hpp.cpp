// SPDX-License-Identifier: Apache-2.0
// tests/headers/moe_hpp.cpp: what every program pays for <moe/moe.hpp>; its compile time is a test.
#include <moe/moe.hpp>
