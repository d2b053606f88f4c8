// SPDX-License-Identifier: Apache-2.0
// tests/gpu/routing_tables_test.cu: a batch in host memory through the device's routing kernel, for the tests in routing_tables_test.cpp.
#include "moe/core/buffer.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "routing_batch.hpp"

namespace {

/// A device copy of n elements; empty for a null pointer.
template <class T>
class Copy {
 public:
  Copy(T const* host, std::int64_t n) : buffer_(host == nullptr ? 0 : n) {
    if (buffer_.size() > 0) buffer_.copy_from_host(host);
  }
  T* data() { return buffer_.size() > 0 ? buffer_.data() : nullptr; }
  void read(T* host) const {
    if (buffer_.size() > 0) buffer_.copy_to_host(host);
  }

 private:
  moe::Buffer<T, moe::space::cuda> buffer_;
};

}  // namespace

void moe_test::select_batch(moe::routing::RouterConfig const& config, moe::routing::RouteArgs<float> const& args) {
  using namespace moe;
  using namespace moe::routing;
  std::int64_t const m = args.logits.extent(0);
  int const slots = config.num_slots(), joint = config.num_joint_shared;
  Copy<float> bias(config.correction_bias, config.num_experts + config.num_zero_experts);
  Copy<float> scale(config.per_expert_scale, config.num_experts);
  Copy<std::int64_t> table(config.hash_table, config.vocabulary * config.topk);
  RouterConfig device = config;
  device.correction_bias = bias.data();
  device.per_expert_scale = scale.data();
  device.hash_table = table.data();
  Copy<float> logits(args.logits.data_handle(), m * config.num_logits()), weights(args.topk_weights.data_handle(), m * slots);
  Copy<float> shared(joint > 0 ? args.shared_weights.data_handle() : nullptr, m * joint);
  Copy<std::int64_t> tokens(args.token_ids, m);
  Copy<std::int32_t> ids(args.topk_ids.data_handle(), m * slots);
  Copy<RouteCounters> counters(args.counters, 1);
  AnyRouter(device).select(RouteArgs<float>{.logits = make_rows(static_cast<float const*>(logits.data()), m, config.num_logits()),
                                            .num_valid_rows = args.num_valid_rows,
                                            .token_ids = tokens.data(),
                                            .topk_ids = make_rows(ids.data(), m, slots),
                                            .topk_weights = make_rows(weights.data(), m, slots),
                                            .counters = counters.data(),
                                            .shared_weights = make_rows(shared.data(), m, joint)},
                           nullptr);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  ids.read(args.topk_ids.data_handle());
  weights.read(args.topk_weights.data_handle());
  shared.read(args.shared_weights.data_handle());
  counters.read(args.counters);
}
