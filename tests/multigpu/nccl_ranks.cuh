// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/nccl_ranks.cuh: one rank per GPU in this process, over an NCCL window. Include it to give RankGroup real ranks.
#pragma once

#include <thread>

#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "tests/multigpu/exchange_ranks.cuh"

namespace moe_test {

/// The communicators and windows of all ranks. Collective calls run in one thread per rank.
class NcclRanks {
 public:
  NcclRanks(int ranks, std::int64_t bytes, std::uint64_t timeout_ns) : nccl_(static_cast<std::size_t>(ranks)), windows_(nccl_.size()) {
    std::vector<int> devices(nccl_.size());
    std::vector<ncclComm_t> comms(nccl_.size());
    for (int r = 0; r < ranks; ++r) {
      devices[static_cast<std::size_t>(r)] = r;
    }
    moe::comm::detail::check_nccl_version();
    moe::comm::detail::check_nccl(ncclCommInitAll(comms.data(), ranks, devices.data()), "ncclCommInitAll");
    std::vector<std::string> errors(nccl_.size());
    on_all([&](std::size_t i) {
      try {
        moe::check_cuda(cudaSetDevice(static_cast<int>(i)), "cudaSetDevice");
        nccl_[i] = std::make_unique<moe::comm::Nccl>(comms[i]);
        moe::comm::NcclSymmetric::Params const params{.timeout_ms = static_cast<std::int64_t>((timeout_ns + 999'999) / 1'000'000)};
        windows_[i] = std::make_unique<moe::comm::NcclSymmetric>(*nccl_[i], bytes, params);
      } catch (std::exception const& e) {
        errors[i] = e.what();
      }
    });
    for (auto const& e : errors) {
      if (!e.empty()) {
        throw std::runtime_error(e);
      }
    }
  }
  ~NcclRanks() {
    on_all([&](std::size_t i) {
      cudaSetDevice(static_cast<int>(i));
      windows_[i].reset();
      nccl_[i].reset();
    });
  }
  std::vector<moe::comm::WindowView> views() const {
    std::vector<moe::comm::WindowView> all;
    for (auto const& w : windows_) {
      all.push_back(w->view());
    }
    return all;
  }

 private:
  template <class Call>
  void on_all(Call&& call) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < nccl_.size(); ++i) {
      threads.emplace_back([&, i] { call(i); });
    }
    for (auto& t : threads) {
      t.join();
    }
  }
  std::vector<std::unique_ptr<moe::comm::Nccl>> nccl_;
  std::vector<std::unique_ptr<moe::comm::NcclSymmetric>> windows_;
};
inline RealRanks connect_nccl_ranks(int ranks, std::int64_t bytes, std::uint64_t timeout_ns) {
  auto const owner = std::make_shared<NcclRanks>(ranks, bytes, timeout_ns);
  return {owner->views(), owner};
}
[[maybe_unused]] inline bool const nccl_ranks_connect = (connect_real_ranks = &connect_nccl_ranks, true);

}  // namespace moe_test
