// SPDX-License-Identifier: Apache-2.0
// capi/functions.cpp: the functions of moe.h in libmoe.
#include "moe/c/functions.hpp"
