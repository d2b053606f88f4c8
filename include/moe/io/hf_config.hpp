// SPDX-License-Identifier: Apache-2.0
// io/hf_config.hpp: a model's config.json, with every field checked when it is read. Nothing has a silent default here.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/json.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

/// Largest count or width that a configuration may state.
inline constexpr std::int64_t kMaxConfigValue = 10'000'000;

/// A config.json. For a multimodal model this is its language model's part ("text_config"), for ViTPose its backbone's. All errors are
/// E_CONFIG and name the field, its value and the bound.
class HfConfig {
 public:
  /// Reads a config.json, or the one in a checkpoint directory.
  /// If quantization_config is missing, the directory's hf_quant_config.json is used: ModelOpt's first releases state the quantisation
  /// there.
  static HfConfig from_file(std::filesystem::path path) {
    std::error_code ignored;
    std::filesystem::path beside;
    if (std::filesystem::is_directory(path, ignored)) {
      beside = path / "hf_quant_config.json";
      path /= "config.json";
    }
    HfConfig config(read_json(path), path.string());
    if (!config.has("quantization_config") && !beside.empty() && std::filesystem::exists(beside, ignored)) {
      nlohmann::json quantization = read_json(beside);
      if (!quantization.is_object()) config.fail(one_line("'", beside.string(), "' must be a JSON object"));
      quantization["quant_method"] = "modelopt";
      config.json_["quantization_config"] = std::move(quantization);
    }
    return config;
  }
  static HfConfig from_text(std::string_view json, std::string label) {
    nlohmann::json config = parse_json(json, label);
    return {std::move(config), std::move(label)};
  }

  std::string const& label() const { return label_; }
  /// "qwen3_moe", …
  std::string const& model_type() const { return model_type_; }
  /// The configuration object, for reports.
  nlohmann::json const& json() const { return json_; }

  /// A copy that notes in `fields` every field that is read from it, at any depth. `fields` must outlive it.
  HfConfig noting(std::set<std::string, std::less<>>& fields) const {
    HfConfig out = *this;
    out.read_ = &fields;
    return out;
  }
  /// Marks a field as read that does not affect what the model computes.
  void ignore(std::string_view field) const { (void)value(field); }

  /// The field is there and not null.
  bool has(std::string_view field) const { return value(field) != nullptr; }
  /// An integer in [low, high], from the first of `fields` that is present. All spellings that are present must agree. E_CONFIG if none is
  /// present, or the value has another type or is out of range.
  std::int64_t integer(std::initializer_list<std::string_view> fields, std::int64_t low = 1, std::int64_t high = kMaxConfigValue) const {
    std::optional<std::int64_t> result;
    std::string_view first;
    for (std::string_view field : fields) {
      nlohmann::json const* v = value(field);
      if (v == nullptr) continue;
      if (!v->is_number_integer()) fail(one_line("'", field, "' is ", spelled(*v), ", expected an integer in [", low, ", ", high, "]"));
      bool const fits =
          !v->is_number_unsigned() || v->get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      std::int64_t const n = fits ? v->get<std::int64_t>() : std::numeric_limits<std::int64_t>::max();
      if (n < low || n > high) fail(one_line("'", field, "' is ", spelled(*v), ", out of range [", low, ", ", high, "]"));
      if (result && *result != n) fail(one_line("'", first, "' is ", *result, " and '", field, "' is ", n, ", but they mean the same"));
      if (!result) first = field;
      result = n;
    }
    if (!result) missing(fields);
    return *result;
  }
  std::int64_t integer(std::string_view field, std::int64_t low = 1, std::int64_t high = kMaxConfigValue) const {
    return integer({field}, low, high);
  }
  /// As integer(), but nothing if the field is absent or null.
  std::optional<std::int64_t> optional_integer(std::string_view field, std::int64_t low = 1, std::int64_t high = kMaxConfigValue) const {
    return has(field) ? std::optional(integer(field, low, high)) : std::nullopt;
  }
  /// A finite number in [low, high].
  double number(std::string_view field, double low, double high) const {
    nlohmann::json const* v = value(field);
    if (v == nullptr) missing({field});
    if (!v->is_number()) fail(one_line("'", field, "' is ", spelled(*v), ", expected a number in [", low, ", ", high, "]"));
    double const x = v->get<double>();
    if (!(x >= low && x <= high)) fail(one_line("'", field, "' is ", spelled(*v), ", out of range [", low, ", ", high, "]"));
    return x;
  }
  /// A scaling factor or limit: finite and above zero.
  float positive(std::string_view field) const { return static_cast<float>(number(field, 1e-30, 1e30)); }
  bool flag(std::string_view field) const {
    nlohmann::json const* v = value(field);
    if (v == nullptr) missing({field});
    if (!v->is_boolean()) fail(one_line("'", field, "' is ", spelled(*v), ", expected true or false"));
    return v->get<bool>();
  }
  /// A string; with `known`, one of these.
  std::string string(std::string_view field, std::initializer_list<std::string_view> known = {}) const {
    nlohmann::json const* v = value(field);
    if (v == nullptr) missing({field});
    if (!v->is_string()) fail(one_line("'", field, "' is ", spelled(*v), ", expected a string"));
    std::string s = v->get<std::string>();
    if (known.size() > 0 && std::ranges::find(known, std::string_view(s)) == known.end()) {
      std::string list;
      for (std::string_view k : known) list += (list.empty() ? "" : ", ") + std::string(k);
      throw Error(ErrorCode::unsupported, one_line("'", label_, "': '", field, "' is ", spelled(*v), ", known: ", list));
    }
    return s;
  }
  /// Element `index` of a list of integers, or the value itself if the field is one integer for all layers.
  std::int64_t integer_at(std::string_view field, std::int64_t index, std::int64_t low = 1, std::int64_t high = kMaxConfigValue) const {
    nlohmann::json const* v = value(field);
    if (v == nullptr) missing({field});
    if (!v->is_array()) return integer(field, low, high);
    nlohmann::json const& element = at(field, index);
    if (!element.is_number_integer() || element.get<std::int64_t>() < low || element.get<std::int64_t>() > high) {
      fail(one_line("'", field, "'[", index, "] is ", spelled(element), ", expected an integer in [", low, ", ", high, "]"));
    }
    return element.get<std::int64_t>();
  }
  /// Element `index` of a list, or null if the field is absent. E_CONFIG if it is not a list or too short.
  nlohmann::json const& at(std::string_view field, std::int64_t index) const {
    nlohmann::json const* v = value(field);
    if (v == nullptr) missing({field});
    if (!v->is_array()) fail(one_line("'", field, "' is ", spelled(*v), ", expected a list"));
    if (index < 0 || index >= static_cast<std::int64_t>(v->size())) {
      fail(one_line("'", field, "' holds ", v->size(), " entries, none for layer ", index));
    }
    return (*v)[static_cast<std::size_t>(index)];
  }
  /// True if the field is a list of integers that contains `wanted`. An absent field is an empty list.
  bool list_contains(std::string_view field, std::int64_t wanted) const {
    nlohmann::json const* v = value(field);
    if (v == nullptr) return false;
    if (!v->is_array()) fail(one_line("'", field, "' is ", spelled(*v), ", expected a list of integers"));
    return std::ranges::any_of(*v, [&](nlohmann::json const& e) {
      if (!e.is_number_integer()) fail(one_line("'", field, "' holds ", spelled(e), ", expected integers"));
      return e.get<std::int64_t>() == wanted;
    });
  }
  /// A nested configuration object (DBRX's ffn_config, a quantization_config).
  HfConfig section(std::string_view field) const {
    nlohmann::json const* v = value(field);
    if (v == nullptr) missing({field});
    if (!v->is_object()) fail(one_line("'", field, "' is ", spelled(*v), ", expected an object"));
    HfConfig out;
    out.json_ = *v;
    out.label_ = text(label_, ':', field);
    out.model_type_ = model_type_;
    out.read_ = read_;
    return out;
  }

  /// What per_layer_config states for layer `layer` alone; nothing if it does not name it. transformers pads its keys with zeros to one
  /// length, so they are compared as numbers.
  std::optional<HfConfig> of_layer(std::int64_t layer) const {
    constexpr std::string_view kField = "per_layer_config";
    if (!has(kField)) return std::nullopt;
    HfConfig const layers = section(kField);
    std::optional<HfConfig> out;
    for (auto const& [key, unused] : layers.json_.items()) {
      std::int64_t index = -1;
      auto const [end, error] = std::from_chars(key.data(), key.data() + key.size(), index);
      if (error != std::errc() || end != key.data() + key.size() || index < 0) {
        fail(one_line("'", kField, "' has the key '", key.substr(0, 60), "', expected the index of a layer"));
      }
      if (index != layer) continue;
      if (out) fail(one_line("'", kField, "' names layer ", layer, " twice"));
      out = layers.section(key);
    }
    return out;
  }

  /// The model type of a whole model's language model, where its configuration may leave it out.
  static constexpr std::string_view text_part_of(std::string_view whole) {
    constexpr std::pair<std::string_view, std::string_view> kParts[] = {
        {"deepseek_ocr2", "deepseek_ocr2_text"}, {"diffusion_gemma", "diffusion_gemma_text"},
        {"dots3_note", "dots3_note_text"},       {"ernie4_5_vl_moe", "ernie4_5_vl_moe_text"},
        {"glm5_next", "glm5_next_text"},         {"vitpose", "vitpose_backbone"},
        {"inkling_mm_model", "inkling_text"},    {"inkling2", "inkling2_text"},
        {"minimax_m3_vl", "minimax_m3_vl_text"}, {"mistral_large4", "mistral_large4_text"},
        {"muse_spark", "muse_spark_text"},       {"qwen3_omni_moe", "qwen3_omni_moe_text"},
        {"qwen4_exp", "qwen4_exp_text"},         {"step3p7", "step3p5"},
        {"unlimited_ocr", "unlimited_ocr_text"},
    };
    for (auto const& [name, part] : kParts) {
      if (name == whole) return part;
    }
    return {};
  }

  [[noreturn]] void fail(std::string const& what) const { throw Error(ErrorCode::config, one_line("'", label_, "': ", what)); }
  /// A value as messages show it.
  static std::string spelled(nlohmann::json const& v) {
    if (v.is_array()) return "a list";
    if (v.is_object()) return "an object";
    std::string s = v.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    return s.size() > 60 ? s.substr(0, 60) + "..." : s;
  }

 private:
  HfConfig() = default;
  HfConfig(nlohmann::json json, std::string label) : json_(std::move(json)), label_(std::move(label)) {
    if (!json_.is_object()) fail("a configuration must be a JSON object");
    // A multimodal model nests its language model; the outer object then names the whole model.
    auto const whole = json_.find("model_type");
    std::string_view const part = whole == json_.end() || !whole->is_string() ? "" : text_part_of(whole->get_ref<std::string const&>());
    if (auto const [inner, name] = language_model(json_); inner != nullptr && (inner->contains("model_type") || !part.empty())) {
      nlohmann::json text_part = *inner;
      if (!text_part.contains("model_type")) text_part["model_type"] = part;
      if (!text_part.contains("quantization_config") && json_.contains("quantization_config")) {
        text_part["quantization_config"] = json_["quantization_config"];
      }
      json_ = std::move(text_part);
      label_ += text(':', name);
    }
    model_type_ = string("model_type");
    if (model_type_.size() > 100) model_type_.resize(100);
  }

  /// The language model's configuration inside that of a whole model, and the name of its field; null if there is none.
  static std::pair<nlohmann::json const*, std::string_view> language_model(nlohmann::json const& whole) {
    // language_config: as DeepSeek-OCR-2 and Unlimited-OCR are released.
    auto const type = whole.find("model_type");
    bool const pose = type != whole.end() && *type == "vitpose";
    for (char const* name : {pose ? "backbone_config" : "text_config", "language_config"}) {
      if (auto const at = whole.find(name); at != whole.end() && at->is_object()) return {&*at, name};
    }
    auto const thinker = whole.find("thinker_config");  // Qwen3-Omni
    if (thinker != whole.end() && thinker->is_object()) {
      if (auto const at = thinker->find("text_config"); at != thinker->end() && at->is_object()) {
        return {&*at, "thinker_config:text_config"};
      }
    }
    return {nullptr, {}};
  }
  nlohmann::json const* value(std::string_view field) const {
    if (read_ != nullptr) read_->emplace(field);
    auto const at = json_.find(field);
    return at == json_.end() || at->is_null() ? nullptr : &*at;
  }
  [[noreturn]] void missing(std::initializer_list<std::string_view> fields) const {
    std::string list;
    for (std::string_view f : fields) list += (list.empty() ? "'" : " or '") + std::string(f) + "'";
    fail(one_line(list, " is missing"));
  }
  nlohmann::json json_;
  std::string label_;
  std::string model_type_;
  std::set<std::string, std::less<>>* read_ = nullptr;  // noting()
};

}  // namespace moe::io
