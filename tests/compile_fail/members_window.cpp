// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/members_window.cpp: windows that lack one member each, under the backends of the library.
// errors: each
// expect: the policy lacks the member 'using Space'
// expect: the window lacks the member 'int rank()'
// expect: the window lacks the member 'int size()'
// expect: the window lacks the member 'void* peer(int rank, int64_t offset)'
// expect: the window lacks the member 'int64_t bytes()'
// expect: the window lacks the member 'using Comm'
// expect: the window lacks the member 'Window(Comm&, int64_t user_bytes, Params const&)'
// expect: the window lacks the member 'Window(Comm&, int64_t user_bytes, Params const&)'
// expect: the window of the host lacks the member 'publish(
// expect: the window of the host lacks the member 'publish(
// expect: the window of the device lacks the member 'comm::WindowView const& view() const'
#include "../archetypes.hpp"
//
#include "../without_member.hpp"
#include "moe/archetypes/window.hpp"
#include "moe/backends/high_throughput.hpp"
#include "moe/backends/one_sided.hpp"
#include "moe/backends/pplx.hpp"
#include "moe/backends/two_sided.hpp"
#include "moe/backends/window/host/low_latency.hpp"

using namespace moe_test;
MOE_WITHOUT_TYPE(NoWindowSpace, StatedWindow, Space);
MOE_WITHOUT(NoWindowRank, StatedWindow, rank);
MOE_WITHOUT(NoWindowSize, StatedWindow, size);
MOE_WITHOUT(NoPeer, StatedWindow, peer);
MOE_WITHOUT(NoBytes, StatedWindow, bytes);
MOE_WITHOUT_TYPE(NoComm, StatedWindow, Comm);
MOE_WITHOUT_TYPE(NoParams, StatedWindow, Params);
struct NotBuilt : StatedWindow {
#ifdef MOE_FIXED
  using StatedWindow::StatedWindow;
#endif
};
MOE_WITHOUT(NoPublish, StatedWindow, publish);
MOE_WITHOUT(NoWindowBarrier, StatedWindow, barrier);
struct DeviceWindow {
  using Space = moe::space::cuda;
  using Comm = moe::comm::Self<Space>;
  struct Params {};
  DeviceWindow(Comm&, std::int64_t, Params const&);
  int rank() const;
  int size() const;
  void* peer(int, std::int64_t) const;
  std::int64_t bytes() const;
#ifdef MOE_FIXED
  moe::comm::WindowView const& view() const;
#endif
};

// The complete ones model the concept: other tests compose layers over them.
#ifdef MOE_FIXED
template <class T, class Backend>
struct Checked {
  static_assert(ExchangeWindow<T>);
};
#else
template <class T, class Backend>
using Checked = Compose<ArchetypeRouter<>, ArchetypeQuantization<>, Backend>;
#endif
static_assert(sizeof(Checked<NoWindowSpace, moe::backends::OneSided<NoWindowSpace>>) > 0);
static_assert(sizeof(Checked<NoWindowRank, moe::backends::LowLatency<NoWindowRank>>) > 0);
static_assert(sizeof(Checked<NoWindowSize, moe::backends::LowLatencyRankMajor<NoWindowSize>>) > 0);
static_assert(sizeof(Checked<NoPeer, moe::backends::HighThroughput<NoPeer>>) > 0);
static_assert(sizeof(Checked<NoBytes, moe::backends::TwoSided<NoBytes>>) > 0);
static_assert(sizeof(Checked<NoComm, moe::backends::Pplx<NoComm>>) > 0);
static_assert(sizeof(Checked<NoParams, moe::backends::OneSided<NoParams>>) > 0);
static_assert(sizeof(Checked<NotBuilt, moe::backends::LowLatency<NotBuilt>>) > 0);
static_assert(sizeof(Checked<NoPublish, moe::backends::LowLatencyRankMajor<NoPublish>>) > 0);
static_assert(sizeof(Checked<NoWindowBarrier, moe::backends::Pplx<NoWindowBarrier>>) > 0);
static_assert(sizeof(Checked<DeviceWindow, moe::backends::OneSided<DeviceWindow>>) > 0);
