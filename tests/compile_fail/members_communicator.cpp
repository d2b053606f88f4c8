// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/members_communicator.cpp: communicators that lack one member each, under backends and in groups.
// errors: each
// expect: the policy lacks the member 'static constexpr char const* kName'
// expect: the policy lacks the member 'using Space'
// expect: the communicator lacks the member 'int rank()'
// expect: the communicator lacks the member 'int size()'
// expect: the communicator lacks the member 'all_gather(
// expect: the communicator lacks the member 'all_gather_v(
// expect: the communicator lacks the member 'all_to_all_v(
// expect: the communicator lacks the member 'broadcast(
// expect: the communicator lacks the member 'barrier(
// expect: the communicator lacks the member 'all_reduce(
// expect: the communicator lacks the member 'reduce_scatter_v(
// expect: the communicator lacks the member 'int rank()'
// expect: the communicator lacks the member 'int size()'
// expect: the policy lacks the member 'using Space'
// expect: the communicator lacks the member 'barrier(
#include "../archetypes.hpp"
//
#include "../without_member.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/naive.hpp"
#include "moe/eplb/group.hpp"

using namespace moe_test;
MOE_WITHOUT(NoName, ArchetypeCommunicator, kName);
MOE_WITHOUT_TYPE(NoSpace, ArchetypeCommunicator, Space);
MOE_WITHOUT(NoRank, ArchetypeCommunicator, rank);
MOE_WITHOUT(NoSize, ArchetypeCommunicator, size);
MOE_WITHOUT(NoGather, ArchetypeCommunicator, all_gather);
MOE_WITHOUT(NoGatherV, ArchetypeCommunicator, all_gather_v);
MOE_WITHOUT(NoAllToAll, ArchetypeCommunicator, all_to_all_v);
MOE_WITHOUT(NoBroadcast, ArchetypeCommunicator, broadcast);
MOE_WITHOUT(NoBarrier, ArchetypeCommunicator, barrier);
MOE_WITHOUT(NoSum, ArchetypeCommunicator, all_reduce);
MOE_WITHOUT(NoScatter, ArchetypeCommunicator, reduce_scatter_v);
struct GroupNoSpace : NoSpace {};
MOE_WITHOUT(GroupNoBarrier, ArchetypeCommunicator, barrier);

/// A backend of the user, which needs rank() and size() alone.
template <class CommT>
struct OwnBackend : ArchetypeBackend<> {
  using Comm = CommT;
};

// The complete one models the concept: other tests compose layers over it.
#ifdef MOE_FIXED
template <class T, class Backend>
struct Checked {
  static_assert(Communicator<T>);
};
#else
template <class T, class Backend>
using Checked = Compose<ArchetypeRouter<>, ArchetypeQuantization<>, Backend>;
#endif
static_assert(sizeof(Checked<NoName, moe::backends::Naive<NoName>>) > 0);
static_assert(sizeof(Checked<NoSpace, moe::backends::AllToAllV<NoSpace>>) > 0);
static_assert(sizeof(Checked<NoRank, moe::backends::AllGatherReduceScatter<NoRank>>) > 0);
static_assert(sizeof(Checked<NoSize, moe::backends::Naive<NoSize>>) > 0);
static_assert(sizeof(Checked<NoGather, moe::backends::AllToAllV<NoGather>>) > 0);
static_assert(sizeof(Checked<NoGatherV, moe::backends::AllGatherReduceScatter<NoGatherV>>) > 0);
static_assert(sizeof(Checked<NoAllToAll, moe::backends::AllToAllV<NoAllToAll>>) > 0);
static_assert(sizeof(Checked<NoBroadcast, moe::backends::Naive<NoBroadcast>>) > 0);
static_assert(sizeof(Checked<NoBarrier, moe::backends::Naive<NoBarrier>>) > 0);
static_assert(sizeof(Checked<NoSum, moe::backends::Naive<NoSum>>) > 0);
static_assert(sizeof(Checked<NoScatter, moe::backends::AllGatherReduceScatter<NoScatter>>) > 0);
static_assert(sizeof(Checked<NoRank, OwnBackend<NoRank>>) > 0);
static_assert(sizeof(Checked<NoSize, OwnBackend<NoSize>>) > 0);
static_assert(sizeof(moe::eplb::CommGroup<GroupNoSpace>) > 0);
static_assert(sizeof(moe::eplb::CommGroup<GroupNoBarrier>) > 0);
