// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_quantize.cpp: the command line of `moe quantize`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "examples/moe/commands.hpp"
#include "examples/moe/option_values.hpp"
#include "examples/moe/quantize.hpp"
#include "moe/core/error.hpp"

namespace moe_tool {

void add_quantize(CLI::App& app) {
  struct CommandLine {
    QuantizeOptions options;
    std::string mx_rule;
  };
  auto const line = std::make_shared<CommandLine>();
  CLI::App* const command = app.add_subcommand(
      "quantize", "Quantise one tensor of a safetensors file (q, scale, dq), or the routed experts of a checkpoint directory");
  command->add_option("--scheme,--to", line->options.scheme, "how; of schemes that quantise rows too, the weights")
      ->required()
      ->check(one_of(quantize_schemes()));
  command->add_option("--input", line->options.input, "a .safetensors file, or a checkpoint directory")
      ->required()
      ->check(some_text("a file or directory"));
  command->add_option("--tensor", line->options.tensor, "name of the tensor in the file")->check(some_text("the name of a tensor"));
  command->add_option("--output", line->options.output, "a .safetensors file; for a checkpoint a directory that does not exist yet")
      ->required()
      ->check(some_text("a file or directory to write"));
  command->add_option("--mx-rule", line->mx_rule, "shared exponent of mxfp8… (default ceil) and mxfp4_… (default ocp)")
      ->check(one_of({"ceil", "ocp", "even"}));
  command->add_flag("--json", line->options.json, "print the report as one JSON object");
  command->callback([line] {
    require_one_rank("quantize");
    QuantizeOptions& options = line->options;
    std::error_code error;
    auto const found = std::filesystem::status(options.input, error);
    if (!std::filesystem::exists(found)) {
      throw moe::Error(moe::ErrorCode::argument, moe::text("--input '", options.input.string(), "' cannot be read: ", error.message()));
    }
    using moe::quantization::MxRule;
    if (!line->mx_rule.empty()) {
      if (!options.scheme.starts_with("mx")) {
        throw CLI::ValidationError("--mx-rule", "only mxfp8 and mxfp4 take it, not " + options.scheme);
      }
      options.mx_rule = line->mx_rule == "ceil" ? MxRule::ceil : line->mx_rule == "ocp" ? MxRule::ocp : MxRule::even;
    }
    if (std::filesystem::is_directory(found)) {
      auto const schemes = checkpoint_schemes();
      if (!options.tensor.empty())
        throw CLI::ValidationError("--tensor", "the input is a checkpoint directory, all its experts are quantised");
      if (std::find(schemes.begin(), schemes.end(), options.scheme) == schemes.end()) {
        throw CLI::ValidationError("--scheme", refusal(options.scheme, "for a checkpoint one of ", joined(schemes)));
      }
      quantize_checkpoint(options);
    } else {
      if (options.tensor.empty()) throw CLI::RequiredError("--tensor");
      quantize_tensor_file(options);
    }
  });
}

}  // namespace moe_tool
