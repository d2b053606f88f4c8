// SPDX-License-Identifier: Apache-2.0
// tests/headers/compile_time_reference.cpp: headers of the C++ library alone; how long they take says how busy or slow a machine is.
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>
