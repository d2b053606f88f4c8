// SPDX-License-Identifier: Apache-2.0
// tests/capi/on_gpu.hpp: arrays of the tests of moe.h in the memory of the current GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <moe/moe.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "tests/capi/tensors.hpp"

namespace moe_test {

/// An Array's copy in the memory of the device that is current, and its DLTensor.
class OnGpu {
 public:
  template <class T>
  explicit OnGpu(Array<T>& host)
      : tensor_(host.tensor()),
        shape_(tensor_.shape, tensor_.shape + tensor_.ndim),
        memory_(host.size() * static_cast<std::int64_t>(sizeof(T))) {
    int device = 0;
    moe::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    tensor_.shape = shape_.data();
    memory_.copy_from_host(reinterpret_cast<char const*>(host.values().data()));
    tensor_.data = memory_.data();
    tensor_.device = {kDLCUDA, device};
  }
  template <class T>
  void read(Array<T>& host) {
    memory_.copy_to_host(reinterpret_cast<char*>(host.values().data()));
  }
  template <class T>
  void write(Array<T>& host) {
    memory_.copy_from_host(reinterpret_cast<char const*>(host.values().data()));
    cudaDeviceSynchronize();  // streams that do not wait for the default one see it
  }
  void spoil() { moe::Memory<moe::space::cuda>::fill(memory_.data(), 0x7f, memory_.bytes()); }
  DLTensor const* get() const { return &tensor_; }
  DLTensor& tensor() { return tensor_; }

 private:
  DLTensor tensor_;
  std::vector<std::int64_t> shape_;  // the Array may be gone before its copy
  moe::Buffer<char, moe::space::cuda> memory_;
};

/// A scheme's codes and scales of a matrix, on the GPU, and what they stand for.
struct Quantized {
  Quantized(char const* scheme, Array<moe::bf16>& w) {
    std::int64_t const n = w.tensor().shape[0];
    std::int64_t const rows = w.tensor().shape[1];
    std::int64_t const cols = w.tensor().shape[2];
    if (std::string(scheme) == "none") {
      wide = widened(w.values());
      codes = std::make_unique<OnGpu>(w);
      return;
    }
    moe_quantized_layout l = MOE_QUANTIZED_LAYOUT_INIT;
    check(moe_get_quantized_layout(scheme, rows, cols, &l));
    Array<std::uint8_t> c({n, rows, l.code_cols});
    Array<float> s({n, l.scale_rows, l.scale_cols});
    Array<std::uint8_t> e({n, l.scale_rows, l.scale_cols});
    c.tensor().dtype = l.code_dtype;
    bool const bytes = l.scale_dtype.code == kDLUInt;
    check(moe_quantize(scheme, &w, &c, bytes ? &e : &s));
    if (std::string(scheme).starts_with("int4_group128_zero")) {  // zero points other than the middle
      for (std::int64_t i = 1; i < s.size(); i += 4) s[i] = 7.0F;
    }
    wide = dequantized(scheme, c, s, e, rows, cols);
    codes = std::make_unique<OnGpu>(c);
    scales = bytes ? std::make_unique<OnGpu>(e) : std::make_unique<OnGpu>(s);
  }
  DLTensor const* scale() const { return scales == nullptr ? nullptr : scales->get(); }
  std::vector<float> wide;
  std::unique_ptr<OnGpu> codes;
  std::unique_ptr<OnGpu> scales;

 private:
  static void check(moe_status status) {
    if (status != MOE_OK) throw std::runtime_error(moe_last_error());
  }
};

}  // namespace moe_test
