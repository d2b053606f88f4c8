// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/cublas_kernels.cu: the kernels around cuBLAS's products.
#include "moe/experts/cublas_grouped.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"

template class moe::experts::CublasGrouped::Kernel<moe::models::RuntimeLayer<float, float>, moe::quantization::None,
                                                   moe::ActivationFormat::standard>;
