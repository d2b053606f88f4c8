// SPDX-License-Identifier: Apache-2.0
// tests/stored_array.hpp: a tensor of a file as a vector.
#pragma once

#include <string>
#include <vector>

#include "moe/io/tensor_store.hpp"

namespace moe_test {

template <class T>
std::vector<T> read(moe::io::TensorStore const& store, std::string const& name) {
  moe::io::StoredTensor const t = store.at(name);
  return t.file->read<T>(*t.info);
}

}  // namespace moe_test
