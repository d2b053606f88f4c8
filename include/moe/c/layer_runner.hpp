// SPDX-License-Identifier: Apache-2.0
// c/layer_runner.hpp: a ModularKernel as a Runner: DLTensors to the layer's views and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/c/overlap.hpp"
#include "moe/c/runner.hpp"
#include "moe/c/stream.hpp"
#include "moe/c/structs.hpp"
#include "moe/c/weights.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/params.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/routing/any_router.hpp"

namespace moe::c {

/// E_CONFIG, naming the first choice in which the router that a layer's type fixes is not the one that was asked for.
inline void check_same_router(routing::RouterConfig const& type, routing::RouterConfig const& asked) {
  auto const same = [](char const* what, auto fixed, auto wanted) {
    if (fixed == wanted) return;
    auto const print = [](auto value) {
      if constexpr (std::is_enum_v<decltype(value)>) {
        return static_cast<int>(value);
      } else {
        return value;
      }
    };
    throw Error(ErrorCode::config,
                text("router.", what, ": ", print(wanted), " was asked for, but the layer's type fixes it to ", print(fixed)));
  };
  same("scoring", type.scoring, asked.scoring);
  same("order", type.order, asked.order);
  same("selection", type.selection, asked.selection);
  same("renorm", type.renorm, asked.renorm);
  if (type.renorm == routing::Renorm::sum || type.renorm == routing::Renorm::floor) same("renorm_eps", type.renorm_eps, asked.renorm_eps);
  if (type.renorm == routing::Renorm::p_norm) same("renorm_p", type.renorm_p, asked.renorm_p);
  same("routed_scaling_factor", type.routed_scaling_factor, asked.routed_scaling_factor);
  same("num_expert_group", std::max(type.num_expert_group, 1), std::max(asked.num_expert_group, 1));
  if (type.num_expert_group > 1) {
    same("topk_group", type.topk_group, asked.topk_group);
    same("group_score", type.group_score, asked.group_score);
  }
  same("logit_softcap", type.logit_softcap, asked.logit_softcap);
  if (type.selection == routing::Selection::sparsemixer) same("sparsemixer_eps", type.sparsemixer_eps, asked.sparsemixer_eps);
  same("num_zero_experts", type.num_zero_experts, asked.num_zero_experts);
  if (type.num_zero_experts > 0) same("zero_expert", type.zero_expert_kind, asked.zero_expert_kind);
  same("degenerate", type.degenerate, asked.degenerate);
  same("correction_bias", type.correction_bias, asked.correction_bias);
  same("per_expert_scale", type.per_expert_scale, asked.per_expert_scale);
  same("hash_table", type.hash_table, asked.hash_table);
}

/// E_CONFIG if a layer's type fixes another activation than the one that was asked for. A preset in the CUDA space fixes it in its
/// configuration alone: its kernels take any.
template <class Config>
void check_same_activation(activation::Kind asked) {
  auto const same = [asked](activation::Kind fixed) {
    if (fixed == asked) return;
    throw Error(ErrorCode::config, text("activation: ", activation::name(asked), " was asked for, but the layer's type fixes it to ",
                                        activation::name(fixed)));
  };
  if constexpr (requires { Config::activation_kind; }) {
    same(Config::activation_kind);
  } else if constexpr (!std::is_same_v<typename Config::Activation, activation::Any>) {
    same(Config::Activation::kKind);
  }
}

/// topk_ids of a caller: [M, k] int32 or int64. E_ARG.
inline routing::GivenIds given_ids_of(DLTensor const* given, Device device) {
  DLTensor const& t = *not_null("topk_ids", given);
  if (same(t.dtype, dl_type<std::int64_t>())) return rows_of<std::int64_t>("topk_ids", given, device);
  if (same(t.dtype, dl_type<std::int32_t>())) return rows_of<std::int32_t>("topk_ids", given, device);
  detail::refuse("topk_ids", text("dtype is ", describe(t.dtype)), "int32 or int64");
}

#ifdef MOE_C_OPENS_ONEDNN
/// Why oneDNN cannot be opened; null if it is open. Of cmake/onednn_on_demand.cpp.
char const* onednn_obstacle();
#endif
/// E_UNSUPPORTED if the experts of that name need a library that is opened on demand, and cannot be.
inline void expect_library_of([[maybe_unused]] std::string_view experts) {
#ifdef MOE_C_OPENS_ONEDNN
  if (experts != "onednn") return;
  if (char const* const why = onednn_obstacle()) throw Error(ErrorCode::unsupported, text("experts: onednn needs oneDNN: ", why));
#endif
}

/// Workspace, as a type that depends on the layer: it is complete where the layer's experts share one, and only there.
template <class LayerT>
struct WorkspaceOf {
  using type = Workspace;
};

/// LayerT: a ModularKernel. Its router takes a RouterConfig (AnyRouter), or is External, or fixes its choices. Logits: the element types of
/// router logits that its forward() is instantiated for.
template <class LayerT, class... Logits>
class LayerRunner final : public Runner {
 public:
  using Config = typename LayerT::Config;
  using Space = typename LayerT::Space;
  using Comm = typename LayerT::Comm;
  using Act = typename Config::Act;
  using Params = typename LayerT::Params;
  using Router = typename LayerT::RouterType;

  LayerRunner(Request const& r, bool& told) : LayerRunner(r, told, params_of(r)) {}

  void forward(Call const& call) override {
    if constexpr (facts::selects<Router>()) {
      if (!external_) return forward_by_dtype(call);
    }
    throw Error(ErrorCode::state, "moe_runner_forward: this runner has no router; call moe_runner_forward_routed()");
  }
  void forward_routed(Call const& call) override {
    OnDevice<Space> const current(device_);
    Arguments const a = arguments_of(call, [&](Arguments& out) {
      out.ids = given_ids_of(call.topk_ids, device_);
      out.weights = rows_of<float>("topk_weights", call.topk_weights, device_);
    });
    [[maybe_unused]] auto const turn = use_workspace(a.stream);
    layer_->forward_routed(a.hidden, a.ids, a.weights, a.output, a.options, a.stream);
  }

  void weights_changed(void* stream) override {
    OnDevice<Space> const current(device_);
    layer_->weights_changed(stream_of<Space>(stream, device_));
  }
  void check() override { layer_->check(); }
  void wait(void* stream) override {
    OnDevice<Space> const current(device_);
    refuse_capture<Space>("moe_runner_wait()", stream, "waits for it");
    layer_->wait(stream_of<Space>(stream, device_));
  }
  void describe(moe_runner_info& info) override {
    info.device = {device_.space == SpaceKind::host ? kDLCPU : kDLCUDA, device_.id};
    info.rank = comm().rank();
    info.size = comm().size();
    info.num_local_experts = num_local_;
    info.weights_packed = packs_weights<typename LayerT::Kernel>() ? 1 : 0;
    LayerMemory const memory = layer_->memory();
    info.bytes = static_cast<std::int64_t>(memory.arena + memory.window) + workspace_bytes_;
    info.window_bytes = static_cast<std::int64_t>(memory.window);
    info.dtype = name_of(dtype_of<Act>);
    info.quantization = LayerT::Quant::kName;
    info.backend = LayerT::Backend::kName;
    info.experts = LayerT::Experts::kName;
  }
  ~LayerRunner() override {
    // A destructor reports nothing: if the device cannot be made current, the driver frees the memory at the end of the process.
    try {
      OnDevice<Space> const current(device_);
      layer_.reset();
      if constexpr (kShares) {
        if (workspace_ != nullptr) std::exchange(workspace_, nullptr)->leave();
      }
    } catch (...) {
    }
  }
  Workspace workspace(Device asking) override {
    if (asking != device_) {
      throw Error(ErrorCode::argument,
                  text("workspace_of: is a runner on ", c::describe(device_), ", expected one on ", c::describe(asking)));
    }
    if constexpr (kShares) return workspace_;
    return nullptr;
  }
  LayerT& layer() { return *layer_; }

 private:
  /// Whether the experts can share their workspace with those of other runners.
  static constexpr bool kShares = facts::shares_workspace<typename LayerT::Experts::Params>();
  static constexpr bool kAlone = std::is_same_v<Comm, comm::Self<Space>>;

  // NOLINTNEXTLINE(performance-unnecessary-value-param): changed where experts share their workspace.
  LayerRunner(Request const& r, bool& told, Params params) : device_(r.device), external_(r.external_router) {
    group = r.group;
    expect_library_of(LayerT::Experts::kName);
    OnDevice<Space> const current(device_);
    auto const weights = weights_of<Config, typename LayerT::Quant>(*r.weights, r.device, params.placement.num_local(group->rank()),
                                                                    Shape<Config>(r.shape), r.activation.gated());
    num_local_ = static_cast<std::int32_t>(weights.w13.codes.extent(0));
    borrow(r);
    Comm& over = comm();
    told = true;
    if constexpr (kShares) {
      using Shared = typename decltype(params.experts.workspace)::element_type;
      params.experts.workspace = r.workspace != nullptr ? r.workspace : std::make_shared<Shared>();
      workspace_bytes_ = -params.experts.workspace->bytes();
    }
    layer_ = std::make_unique<LayerT>(over, weights, params);
    if constexpr (kShares) {
      workspace_ = params.experts.workspace;
      workspace_->join();
      workspace_bytes_ += workspace_->bytes();
    }
  }
  auto use_workspace([[maybe_unused]] Stream<Space> stream) {
    if constexpr (kShares) {
      using Shared = typename decltype(Params::experts.workspace)::element_type;
      return typename Shared::Use(workspace_.get(), stream);
    } else {
      return 0;
    }
  }

  static Params params_of(Request const& r) {
    Params p{.shape = r.shape, .max_tokens_per_rank = r.max_tokens_per_rank, .placement = r.placement()};
    if constexpr (std::is_same_v<typename Router::Params, routing::RouterConfig>) {
      p.router = r.router;
    } else {
      fix_router(p.router, r);
    }
    check_same_activation<Config>(r.activation.kind);
    if constexpr (std::is_same_v<typename Config::Activation, activation::Any>) {
      p.activation = r.activation;
    } else {
      p.activation.constants = r.activation.constants;
    }
    if constexpr (facts::takes_num_threads<typename LayerT::Experts::Params>()) p.experts.num_threads = r.num_threads;
    if (r.log) p.log = [](std::string const& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
    return p;
  }
  /// The run-time values of a router whose type fixes the rest. E_CONFIG if it is another router than the one asked for.
  template <class RouterParams>
  static void fix_router(RouterParams& p, Request const& r) {
    p.num_experts = r.shape.num_experts;
    p.topk = r.shape.topk;
    if (r.external_router) return;
    if constexpr (facts::takes_correction_bias<RouterParams>()) p.correction_bias = r.router.correction_bias;
    if constexpr (requires { p.per_expert_scale = nullptr; }) p.per_expert_scale = r.router.per_expert_scale;
    if constexpr (requires { p.routed_scaling_factor = 1.0F; }) p.routed_scaling_factor = r.router.routed_scaling_factor;
    if constexpr (requires { p.renorm_eps = 1.0F; }) p.renorm_eps = r.router.renorm_eps;
    if constexpr (requires { p.logit_softcap = 1.0F; }) p.logit_softcap = r.router.logit_softcap;
    if constexpr (requires { p.num_expert_group = 1; }) p.num_expert_group = r.router.num_expert_group;
    if constexpr (requires { p.topk_group = 1; }) p.topk_group = r.router.topk_group;
    if constexpr (requires { p.degenerate = r.router.degenerate; }) p.degenerate = r.router.degenerate;
    if constexpr (facts::takes_tables<RouterParams>()) {
      p.hash_table = r.router.hash_table;
      p.vocabulary = r.router.vocabulary;
    }
    if constexpr (facts::selects<Router>()) check_same_router(Router(p).resolved(), r.router);
  }

  Comm& comm() {
    if constexpr (kAlone) {
      return self_;
    } else {
      auto* const over = dynamic_cast<GroupOver<Comm>*>(group.get());
      if (over == nullptr) {
        throw Error(ErrorCode::config,
                    text("backend: ", LayerT::Backend::kName, " needs a group over ", Comm::kName, ", this one is over ", group->name()));
      }
      return over->comm;
    }
  }

  struct Named {
    char const* what;
    DLTensor const* tensor;
  };
  struct Borrowed {
    char const* what;
    ByteRows bytes;
  };
  /// The views of a call.
  struct Arguments {
    typename LayerT::Hidden hidden;
    routing::GivenIds ids;
    Rows<float const> weights;
    typename LayerT::Output output;
    ForwardOptions options;
    Stream<Space> stream{};
  };
  /// Reads what every call has and, with read(arguments), the rest. A rank whose arguments are refused tells its peers: they get E_PEER.
  template <class Read>
  Arguments arguments_of(Call const& call, Read const& read) {
    if constexpr (facts::may_not_capture<typename LayerT::Exchange>()) {
      if (!layer_->exchange().capturable()) {
        refuse_capture<Space>("a call", call.stream,
                              "of this runner reads the counts of rows on the host; fewer max_tokens_per_rank, or another backend");
      }
    }
    try {
      Arguments a;
      a.hidden = rows_of<Act, Config::hidden>("hidden", call.hidden, device_);
      a.output = rows_of<Act, Config::hidden>("output", call.output, device_);
      moe_forward_options given = MOE_FORWARD_OPTIONS_INIT;
      if (call.options != nullptr) {
        given = checked("options", call.options);
        a.options = options_of(given, a.hidden.extent(0));
      }
      read(a);
      refuse_overlap(call, given);
      a.stream = stream_of<Space>(call.stream, device_);
      return a;
    } catch (...) {
      tell_peers(call);
      throw;
    }
  }
  /// E_ARG if output shares memory with what the call reads. An output in the place of hidden, which a layer takes, is refused like any
  /// other: moe.h does not promise that every composition behind it has read a row before it writes one.
  void refuse_overlap(Call const& call, moe_forward_options const& options) const {
    ByteRows const output = bytes_of(*call.output);
    auto const refuse_if = [&](char const* what, ByteRows const& read) {
      if (overlap(output, read)) throw Error(ErrorCode::argument, overlap_text(what));
    };
    for (auto const& [what, t] :
         {Named{"hidden", call.hidden}, Named{"router_logits", call.logits}, Named{"topk_ids", call.topk_ids},
          Named{"topk_weights", call.topk_weights}, Named{"token_ids", options.token_ids}, Named{"num_rows", options.num_rows}}) {
      if (t != nullptr) refuse_if(what, bytes_of(*t));
    }
    for (auto const& [what, bytes] : borrowed_) refuse_if(what, bytes);
  }
  /// What the layer reads in every call and the caller keeps: weights and scales unless the experts have packed them, biases, and the
  /// router's arrays.
  void borrow(Request const& r) {
    moe_weights const& w = *r.weights;
    auto const add = [&](char const* what, DLTensor const* t) {
      if (t != nullptr) borrowed_.push_back({what, bytes_of(*t)});
    };
    if constexpr (!packs_weights<typename LayerT::Kernel>()) {
      add("w13", w.w13);
      add("w2", w.w2);
      add("w13_scale", w.w13_scale);
      add("w2_scale", w.w2_scale);
    }
    add("w13_bias", w.w13_bias);
    add("w2_bias", w.w2_bias);
    if (external_) return;
    auto const add_array = [&](char const* what, auto const* data, std::int64_t count) {
      if (data != nullptr) borrowed_.push_back({what, bytes_of(data, count * static_cast<std::int64_t>(sizeof *data))});
    };
    add_array("router.correction_bias", r.router.correction_bias, std::int64_t{r.router.num_experts} + r.router.num_zero_experts);
    add_array("router.per_expert_scale", r.router.per_expert_scale, r.router.num_experts);
    add_array("router.hash_table", r.router.hash_table, r.router.vocabulary * r.router.topk);
  }
  ForwardOptions options_of(moe_forward_options const& given, std::int64_t rows) const {
    ForwardOptions options{.num_valid_rows = given.num_valid_rows};
    if (given.token_ids != nullptr) options.token_ids = vector_of<std::int64_t>("token_ids", given.token_ids, rows, device_);
    if (given.num_rows != nullptr) options.num_rows = vector_of<std::int32_t>("num_rows", given.num_rows, 1, device_);
    return options;
  }
  void forward_by_dtype(Call const& call) {
    DLDataType const given = call.logits == nullptr ? dl_type<float>() : call.logits->dtype;  // run() refuses NULL
    if ((run_if<Logits>(call, given) || ...)) return;
    std::string known;
    ((known += text(known.empty() ? "" : " or ", c::describe(dl_type<Logits>()))), ...);
    try {
      detail::refuse("router_logits", text("dtype is ", c::describe(given)), known);
    } catch (...) {
      tell_peers(call);
      throw;
    }
  }
  /// That this rank's arguments were refused. Under a capture no rank runs anything.
  void tell_peers([[maybe_unused]] Call const& call) {
    if constexpr (!kAlone) {
      if (!is_capturing<Space>(call.stream)) layer_->abandon({});
    }
  }
  template <class L>
  bool run_if(Call const& call, DLDataType given) {
    if (!same(given, dl_type<L>())) return false;
    run<L>(call);
    return true;
  }
  template <class L>
  void run(Call const& call) {
    OnDevice<Space> const current(device_);
    Rows<L const> logits;
    Arguments const a = arguments_of(call, [&](Arguments&) { logits = rows_of<L>("router_logits", call.logits, device_); });
    [[maybe_unused]] auto const turn = use_workspace(a.stream);
    layer_->forward(a.hidden, logits, a.output, a.options, a.stream);
  }

  Device device_;
  bool external_;
  std::int32_t num_local_ = 0;
  typename WorkspaceOf<LayerT>::type workspace_;
  std::vector<Borrowed> borrowed_;
  std::int64_t workspace_bytes_ = 0;  // of the shared memory, what this runner has added
  [[no_unique_address]] std::conditional_t<kAlone, Comm, HostStream> self_{};
  std::unique_ptr<LayerT> layer_;
};

}  // namespace moe::c
