// SPDX-License-Identifier: Apache-2.0
// capi/instances.hpp: the table of libmoe's layers. Each group of sources adds its own; a build without MPI, CUDA or NCCL has fewer groups.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "moe/c/runner.hpp"

namespace moe_c {

template <class Act, class Quant, class Backend, class Experts>
std::unique_ptr<moe::c::Runner> make_layer(moe::c::Request const& request, bool& told);  // make_layer.hpp

struct Instance {
  moe::SpaceKind space;
  moe::DType dtype;
  std::string_view quantization;
  std::string_view backend;
  std::string_view experts;
  std::unique_ptr<moe::c::Runner> (*make)(moe::c::Request const&, bool&);
  /// Null, or why these experts, which it names, cannot run this request on its device. Empty: they can.
  std::string (*unfit)(moe::c::Request const&) = nullptr;
};

template <class Act, class Quant, class Backend, class Experts>
Instance instance(std::string (*unfit)(moe::c::Request const&) = nullptr) {
  return {Backend::Space::kKind,
          moe::dtype_of<Act>,
          Quant::kName,
          Backend::kName,
          Experts::kName,
          &make_layer<Act, Quant, Backend, Experts>,
          unfit};
}

/// The fastest experts of a request come first.
void add_host_instances(std::vector<Instance>& all);
void add_mpi_instances(std::vector<Instance>& all);
void add_cuda_instances(std::vector<Instance>& all);
void add_nccl_instances(std::vector<Instance>& all);

}  // namespace moe_c
