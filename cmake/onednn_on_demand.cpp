// SPDX-License-Identifier: Apache-2.0
// cmake/onednn_on_demand.cpp: oneDNN, and the OpenMP runtime that it uses, for a library that exports moe_* alone: opened when the first
// runner is created whose experts are oneDNN's, so that programs on GPUs load the library where there is no oneDNN. moe_export_only_c()
// adds this source; its functions are hidden in the library and stand for oneDNN's. It includes no header of oneDNN, whose declarations
// export them.
#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <thread>

namespace {

constexpr int kRuntimeError = 5;  // dnnl_runtime_error

using Sgemm = int (*)(char, char, std::int64_t, std::int64_t, std::int64_t, float, float const*, std::int64_t, float const*, std::int64_t,
                      float, float*, std::int64_t);

/// Never closed: its threads may run until the process ends.
struct Library {
  Sgemm sgemm = nullptr;
  int (*get_max_threads)() = nullptr;      ///< null where oneDNN uses another runtime than OpenMP
  void (*set_num_threads)(int) = nullptr;  ///< likewise
  std::string obstacle;

  Library() {
    void* const handle = dlopen(MOE_C_OPENS_ONEDNN, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) sgemm = reinterpret_cast<Sgemm>(dlsym(handle, "dnnl_sgemm"));
    if (sgemm == nullptr) {
      char const* const why = dlerror();
      obstacle = why == nullptr ? MOE_C_OPENS_ONEDNN : why;
      return;
    }
    get_max_threads = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_max_threads"));  // also finds what oneDNN links
    set_num_threads = reinterpret_cast<void (*)(int)>(dlsym(handle, "omp_set_num_threads"));
  }
};

Library const& library() {
  static Library const opened;
  return opened;
}

}  // namespace

namespace moe::c {
/// Why oneDNN cannot be opened; null if it is open.
char const* onednn_obstacle() {
  Library const& opened = library();
  return opened.sgemm == nullptr ? opened.obstacle.c_str() : nullptr;
}
}  // namespace moe::c

extern "C" {
int dnnl_sgemm(char transa, char transb, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float const* a, std::int64_t lda,
               float const* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  Library const& opened = library();
  return opened.sgemm == nullptr ? kRuntimeError : opened.sgemm(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
int omp_get_max_threads() {
  Library const& opened = library();
  return opened.get_max_threads != nullptr ? opened.get_max_threads() : static_cast<int>(std::thread::hardware_concurrency());
}
void omp_set_num_threads(int count) {
  Library const& opened = library();
  if (opened.set_num_threads != nullptr) opened.set_num_threads(count);
}
}
