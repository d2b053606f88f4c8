// SPDX-License-Identifier: Apache-2.0
// tests/tool/nvtx_listener.cpp: a library that NVTX loads in a profiler's place (NVTX_INJECTION64_PATH). It writes a line for each domain,
// and for each begin and end of a range in one, to the file MOE_NVTX_LOG.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

void write(std::string const& line) {
  char const* const path = std::getenv("MOE_NVTX_LOG");
  std::FILE* const file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  std::fputs((line + '\n').c_str(), file);
  std::fclose(file);
}

nvtxDomainHandle_t create(char const* name) {
  write(std::string("domain ") + name);
  return reinterpret_cast<nvtxDomainHandle_t>(new std::string(name));
}
std::string const& name_of(nvtxDomainHandle_t domain) { return *reinterpret_cast<std::string const*>(domain); }
int push(nvtxDomainHandle_t domain, nvtxEventAttributes_t const* range) {
  write("begin " + name_of(domain) + ' ' + range->message.ascii);
  return 0;
}
int pop(nvtxDomainHandle_t domain) {
  write("end " + name_of(domain));
  return 0;
}

}  // namespace

extern "C" [[gnu::visibility("default")]] int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  auto const* const table = static_cast<NvtxExportTableCallbacks const*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (table == nullptr || table->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &count) == 0) return 0;
  if (count <= NVTX_CBID_CORE2_DomainCreateA) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(&create);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}
