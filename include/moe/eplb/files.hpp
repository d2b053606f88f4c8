// SPDX-License-Identifier: Apache-2.0
// eplb/files.hpp: measured loads and static maps as JSON files.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <ios>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/json_levels.hpp"
#include "moe/eplb/maps.hpp"

namespace moe::eplb {

/// Key of one pipeline stage of a model, whose layers are counted from 0 inside the stage: "main/stage1".
inline std::string stage_key(std::string const& model, int stage) { return text(model, "/stage", stage); }

namespace detail {

inline nlohmann::json read_json(std::filesystem::path const& path) {
  std::error_code ignored;
  errno = 0;
  std::ifstream in(path);
  bool const directory = std::filesystem::is_directory(path, ignored);
  if (!in || directory) {
    throw Error(ErrorCode::argument, text("cannot read '", path.string(), "': ", directory ? "it is a directory" : std::strerror(errno)));
  }
  auto const bounded = moe::detail::bounded_levels(
      [&] { throw Error(ErrorCode::argument, text(path.string(), " nests deeper than ", moe::detail::kMostJsonLevels, " levels")); });
  try {
    return nlohmann::json::parse(in, bounded);
  } catch (nlohmann::json::parse_error const& error) {
    throw Error(ErrorCode::argument, text(path.string(), " is not valid JSON at byte ", error.byte));
  } catch (nlohmann::json::out_of_range const& error) {  // a number
    throw Error(ErrorCode::argument, text(path.string(), " is not valid JSON: ", moe::detail::json_reason(error.what())));
  } catch (std::ios_base::failure const& error) {
    throw Error(ErrorCode::argument, text("cannot read '", path.string(), "': ", error.code().message()));
  }
}

/// Written to a temporary file and renamed, so that no reader sees a partial file.
inline void write_json(std::filesystem::path const& path, nlohmann::json const& value) {
  std::filesystem::path const unfinished = path.string() + ".tmp";
  {
    errno = 0;
    std::ofstream out(unfinished);
    out << value.dump() << '\n';
    out.flush();
    if (!out) {
      int const reason = errno;
      std::error_code ignored;
      std::filesystem::remove(unfinished, ignored);
      throw Error(ErrorCode::argument, text("cannot write ", path.string(), ": ", std::strerror(reason)));
    }
  }
  std::error_code failed;
  std::filesystem::rename(unfinished, path, failed);
  if (failed) throw Error(ErrorCode::argument, text("cannot write ", path.string(), ": ", failed.message()));
}

template <class T>
Table<T> table_from_json(nlohmann::json const& rows, std::string const& what) {
  auto const bad = [&](std::string const& why) { return Error(ErrorCode::argument, text(what, ": ", why)); };
  if (!rows.is_array() || rows.empty()) throw bad("must be a non-empty array of rows, one a layer");
  std::vector<std::vector<T>> values;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (!rows[r].is_array() || rows[r].empty()) throw bad(text("layer ", r, " must be a non-empty array of numbers"));
    if (rows[r].size() != rows[0].size()) throw bad(text("layer ", r, " has ", rows[r].size(), " entries, layer 0 has ", rows[0].size()));
    auto& row = values.emplace_back();
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      nlohmann::json const& value = rows[r][c];
      bool const fits = std::is_integral_v<T> ? value.is_number_integer() : value.is_number();
      if (!fits)
        throw bad(text("layer ", r, ", entry ", c, " must be ", std::is_integral_v<T> ? "an integer" : "a number", ", is ", value.dump()));
      if constexpr (std::is_integral_v<T>) {
        auto const wide = value.get<std::int64_t>();
        if (static_cast<std::int64_t>(static_cast<T>(wide)) != wide)
          throw bad(text("layer ", r, ", entry ", c, " is out of range: ", wide));
      }
      row.push_back(value.get<T>());
    }
  }
  return Table<T>(values);
}

/// Files of this version say what they are; hand-written ones may leave it out. E_ARG for another format or version.
inline void check_format(nlohmann::json const& file, std::string const& what, std::string const& format) {
  if (file.contains("format") && file["format"] != format) {
    throw Error(ErrorCode::argument, text(what, ": format is ", file["format"].dump(), ", expected \"", format, '"'));
  }
  if (file.contains("version") && file["version"] != 1) {
    throw Error(ErrorCode::argument, text(what, ": version is ", file["version"].dump(), ", expected 1"));
  }
}

template <class T>
nlohmann::json to_json(Table<T> const& table) {
  nlohmann::json rows = nlohmann::json::array();
  for (int r = 0; r < table.rows(); ++r) rows.push_back(nlohmann::json(std::vector<T>(table.row(r).begin(), table.row(r).end())));
  return rows;
}

}  // namespace detail

/// Writes load window sums by logical expert, one [layers, E] table per key (a model, or a stage_key). E_ARG if the file cannot be written.
inline void save_load(std::filesystem::path const& path, std::map<std::string, Table<std::int64_t>> const& loads) {
  nlohmann::json file{{"format", "moe-eplb-load"}, {"version", 1}, {"models", nlohmann::json::object()}};
  for (auto const& [key, load] : loads) file["models"][key] = {{"load", detail::to_json(load)}};
  detail::write_json(path, file);
}

/// Reads one [layers, E] load table: a file of save_load (`key` may be empty if it holds one model), a JSON object with "weight" or
/// "load", or the rows alone. E_ARG naming the file and what is wrong with it.
inline Table<double> read_load(std::filesystem::path const& path, std::string const& key = "") {
  nlohmann::json const file = detail::read_json(path);
  bool const has_models = file.is_object() && file.contains("models") && file["models"].is_object();
  if (!key.empty() && !has_models) throw Error(ErrorCode::argument, text(path.string(), ": has no models, so none is \"", key, "\""));
  if (file.is_array()) return detail::table_from_json<double>(file, path.string());
  if (!file.is_object()) throw Error(ErrorCode::argument, text(path.string(), ": must hold an object or an array of rows"));
  if (has_models) {
    detail::check_format(file, path.string(), "moe-eplb-load");
    nlohmann::json const& models = file["models"];
    std::string known;
    for (auto const& item : models.items()) known += (known.empty() ? "" : ", ") + item.key();
    std::string const wanted = key.empty() && models.size() == 1 ? models.begin().key() : key;
    if (!models.contains(wanted))
      throw Error(ErrorCode::argument, text(path.string(), ": no load of model \"", wanted, "\"; known: ", known));
    nlohmann::json const& model = models[wanted];
    if (!model.is_object() || !model.contains("load"))
      throw Error(ErrorCode::argument, text(path.string(), ": model \"", wanted, "\" has no load"));
    return detail::table_from_json<double>(model["load"], text(path.string(), ", ", wanted));
  }
  for (char const* field : {"weight", "load"}) {
    if (file.contains(field)) return detail::table_from_json<double>(file[field], text(path.string(), ", ", field));
  }
  throw Error(ErrorCode::argument, text(path.string(), ": holds no load: neither \"models\", \"weight\" nor \"load\""));
}

/// Writes static maps, replica order included. E_ARG if the file cannot be written.
inline void save_maps(std::filesystem::path const& path, std::map<std::string, ExpertMaps> const& maps) {
  nlohmann::json file{{"format", "moe-eplb-maps"}, {"version", 1}, {"models", nlohmann::json::object()}};
  for (auto const& [key, m] : maps) {
    file["models"][key] = {{"num_logical", m.num_logical()},
                           {"physical_to_logical", detail::to_json(m.physical_to_logical())},
                           {"replica", detail::to_json(m.replica_index())}};
  }
  detail::write_json(path, file);
}

/// Reads the maps of one model and checks them against what the model needs. E_ARG: no such model, wrong number of layers, expert slots or
/// experts, or an invalid map (names the first bad layer and physical id).
inline ExpertMaps load_maps(std::filesystem::path const& path, std::string const& key, int num_layers, int num_logical, int num_physical) {
  nlohmann::json const file = detail::read_json(path);
  std::string const what = text(path.string(), ", ", key);
  if (!file.is_object() || !file.contains("models") || !file["models"].is_object() || !file["models"].contains(key)) {
    throw Error(ErrorCode::argument, text(path.string(), ": no maps of model \"", key, "\""));
  }
  detail::check_format(file, path.string(), "moe-eplb-maps");
  nlohmann::json const& model = file["models"][key];
  if (!model.is_object() || !model.contains("physical_to_logical")) {
    throw Error(ErrorCode::argument, text(what, ": no physical_to_logical"));
  }
  if (model.contains("num_logical") && model["num_logical"] != num_logical) {
    throw Error(ErrorCode::argument, text(what, ": num_logical is ", model["num_logical"].dump(), ", the model has ", num_logical));
  }
  auto map = detail::table_from_json<std::int32_t>(model["physical_to_logical"], what);
  if (map.rows() != num_layers || map.cols() != num_physical) {
    throw Error(ErrorCode::argument,
                text(what, ": maps are of [", map.rows(), ", ", map.cols(), "], the model needs [", num_layers, ", ", num_physical, "]"));
  }
  if (!model.contains("replica")) return ExpertMaps(std::move(map), num_logical);
  auto const replica = detail::table_from_json<std::int32_t>(model["replica"], text(what, ", replica"));
  if (replica.rows() != map.rows() || replica.cols() != map.cols()) {
    throw Error(ErrorCode::argument, text(what, ": replica is of another shape than physical_to_logical"));
  }
  return ExpertMaps(std::move(map), replica, num_logical);
}

}  // namespace moe::eplb
